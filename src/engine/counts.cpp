#include "engine/counts.hpp"

#include <algorithm>
#include <cstring>
#include <span>
#include <string>
#include <utility>

#include "core/check.hpp"
#include "core/crossing_plan.hpp"
#include "core/exchange_plan.hpp"
#include "core/exchange_signature.hpp"
#include "core/pair_counts.hpp"
#include "engine/growth.hpp"

namespace ferry::engine {
namespace {

constexpr const char* kStage = "plan: counts";

/// `first_expert`: [R + 1] of each rank. A source's row is looked through once, in order.
void check_counts(Channel& channel, int source, std::span<const std::int32_t> row,
                  std::span<const std::size_t> first_expert) {
  const std::size_t ranks = first_expert.size() - 1;
  const std::int32_t* experts = row.data() + ranks;
  for (std::size_t target = 0; target < ranks; ++target) {
    const std::int64_t tokens = row[target];
    std::int64_t slots = 0;
    std::int32_t least = row[target];
    for (std::size_t e = first_expert[target]; e < first_expert[target + 1]; ++e) {
      least = std::min(least, experts[e]);
      slots += experts[e];
    }
    if (least < 0 || slots < tokens || slots > tokens * kMaxTopk) {
      channel.throw_violation(kStage, source,
                              "said that it sends " + std::to_string(tokens) + " tokens in " +
                                  std::to_string(slots) + " slots to rank " +
                                  std::to_string(target));
    }
  }
}

void swap_pair_counts(Channel& channel, const GroupConfig& config, const StepMessage& head,
                      PairCounts counts, PlanState& state) {
  for (const PairCounts::Step step : PairCounts::kSteps) {
    channel.swap(kStage, head,
                 [&](int peer, std::byte* body) { return counts.write(step, peer, body); });
    check_same_call(channel, kStage, head.call);
    for (int source = 0; source < channel.size(); ++source) {
      if (counts.read(step, source, channel.body(source))) continue;
      channel.throw_violation(kStage, source, "sent counts that contradict each other");
    }
  }
  state.exchange = counts.take_plan();
  state.crossing = counts.take_crossing(config.crossing);
}

std::int64_t most_tokens(Channel& channel) {
  std::int64_t most = 0;
  for (const int peer : channel.ranks()) most = std::max(most, channel.head(peer).rows);
  return std::min(most, kMaxRows);
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
  std::vector<std::size_t> first_expert;
  for (int rank = 0; rank <= channel.size(); ++rank) {
    first_expert.push_back(static_cast<std::size_t>(placement.first_expert(rank)));
  }
  GroupCounts all(placement, channel.rank());
  std::vector<std::int32_t> row(each + crossings), domain_tokens;
  domain_tokens.reserve(static_cast<std::size_t>(channel.size()) * crossings);
  for (int source = 0; source < channel.size(); ++source) {
    if (channel.has(source)) {
      // A copy: what is looked at is what is used.
      std::memcpy(row.data(), channel.body(source), row.size() * sizeof(std::int32_t));
    } else {
      std::fill(row.begin(), row.end(), 0);
    }
    const auto counts = std::span<const std::int32_t>(row).first(each);
    check_counts(channel, source, counts, first_expert);
    all.add(counts);
    domain_tokens.insert(domain_tokens.end(), row.begin() + static_cast<std::ptrdiff_t>(each),
                         row.end());
  }
  state.exchange = make_plan(std::move(own), std::move(all), placement, channel.rank());
  const int culprit = impossible_crossing(state.exchange, domains, domain_tokens);
  if (culprit >= 0) {
    channel.throw_violation(kStage, culprit,
                            "counted tokens for a domain that do not fit those for its ranks");
  }
  state.crossing =
      make_crossing_plan(state.exchange, domains, std::move(domain_tokens), config.crossing);
}

void swap_counts(Channel& channel, const GroupConfig& config, const Placement& placement,
                 const Domains& domains, RouteCounts own, std::uint64_t placement_digest,
                 PlanState& state) {
  StepMessage head;
  head.call = plan_signature(own.topk, placement_digest);
  head.rows = own.tokens;
  if (placement.ranks > kMatrixRanks) {
    PairCounts counts(std::move(own), placement, domains, channel.rank());
    swap_pair_counts(channel, config, head, std::move(counts), state);
    state.most_tokens = most_tokens(channel);
    return;
  }
  const auto counts = counts_message(own, placement, domains, channel.rank());
  channel.swap(kStage, head, std::as_bytes(std::span(counts)));
  check_same_call(channel, kStage, head.call);
  state.most_tokens = most_tokens(channel);
  take_counts(channel, config, placement, domains, std::move(own), state);
}

std::size_t counts_bytes(const Placement& placement, const Domains& domains) {
  if (placement.ranks > kMatrixRanks) return PairCounts::message_bytes(placement, domains);
  // Of every rank, every expert and every domain, of which there are at most as many as ranks: what
  // is asked before the domains are known is the same.
  return index(2 * placement.ranks + placement.experts) * sizeof(std::int32_t);
}

}  // namespace ferry::engine
