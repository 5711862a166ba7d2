#include "engine/counts.hpp"

#include <cstring>
#include <span>
#include <string>
#include <utility>

#include "core/check.hpp"
#include "core/crossing_plan.hpp"
#include "core/exchange_plan.hpp"

namespace ferry::engine {
namespace {

constexpr const char* kStage = "plan: counts";

void check_counts(Channel& channel, const Placement& placement,
                  std::span<const std::int32_t> counts) {
  const auto ranks = static_cast<std::size_t>(channel.size());
  const std::size_t each = ranks + static_cast<std::size_t>(placement.experts);
  for (int source = 0; source < channel.size(); ++source) {
    const auto row = counts.subspan(static_cast<std::size_t>(source) * each, each);
    for (int target = 0; target < channel.size(); ++target) {
      const std::int64_t tokens = row[static_cast<std::size_t>(target)];
      std::int64_t slots = 0;
      bool possible = tokens >= 0;
      for (std::int64_t e = placement.first_expert(target); e < placement.first_expert(target + 1);
           ++e) {
        const std::int32_t count = row[ranks + static_cast<std::size_t>(e)];
        possible = possible && count >= 0;
        slots += count;
      }
      if (!possible || slots < tokens || slots > tokens * kMaxTopk) {
        channel.throw_violation(kStage, source,
                                "said that it sends " + std::to_string(tokens) + " tokens in " +
                                    std::to_string(slots) + " slots to rank " +
                                    std::to_string(target));
      }
    }
  }
}

}  // namespace

std::vector<std::int32_t> counts_message(const RouteCounts& own, const Placement& placement,
                                         const Domains& domains, int rank) {
  std::vector<std::int32_t> counts(own.tokens_per_rank);
  counts.insert(counts.end(), own.slots_per_expert.begin(), own.slots_per_expert.end());
  const auto crossings = count_crossings(own, placement, domains, rank);
  counts.insert(counts.end(), crossings.begin(), crossings.end());
  return counts;
}

void take_counts(Channel& channel, const GroupConfig& config, const Placement& placement,
                 const Domains& domains, RouteCounts own, PlanState& state) {
  const std::size_t each = own.tokens_per_rank.size() + own.slots_per_expert.size();
  const auto crossings = static_cast<std::size_t>(domains.count());
  std::vector<std::int32_t> all, domain_tokens;
  for (int source = 0; source < channel.size(); ++source) {
    const auto append = [&](std::vector<std::int32_t>& to, std::size_t first, std::size_t count) {
      to.resize(to.size() + count);
      std::memcpy(to.data() + to.size() - count,
                  channel.body(source) + first * sizeof(std::int32_t),
                  count * sizeof(std::int32_t));
    };
    append(all, 0, each);
    append(domain_tokens, each, crossings);
  }
  check_counts(channel, placement, all);
  state.exchange = make_plan(std::move(own), all, placement, channel.rank());
  const int culprit = impossible_crossing(state.exchange, domains, domain_tokens);
  if (culprit >= 0) {
    channel.throw_violation(kStage, culprit,
                            "counted tokens for a domain that do not fit those for its ranks");
  }
  state.crossing =
      make_crossing_plan(state.exchange, domains, std::move(domain_tokens), config.crossing);
}

}  // namespace ferry::engine
