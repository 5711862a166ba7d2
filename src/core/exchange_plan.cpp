#include "core/exchange_plan.hpp"

#include <algorithm>
#include <array>
#include <utility>

#include "core/check.hpp"

namespace ferry {
namespace {

/// The ranks that a route names, ascending and without repeats. Returns how many.
int destinations(const std::int32_t* route, int topk, const Placement& placement,
                 std::array<std::int32_t, kMaxTopk>& ranks) {
  int count = 0;
  for (int k = 0; k < topk; ++k) {
    if (route[k] < 0) continue;
    const int rank = placement.rank_of(route[k]);
    int at = count;
    while (at > 0 && ranks[static_cast<std::size_t>(at - 1)] > rank) --at;
    if (at > 0 && ranks[static_cast<std::size_t>(at - 1)] == rank) continue;
    std::copy_backward(ranks.begin() + at, ranks.begin() + count, ranks.begin() + count + 1);
    ranks[static_cast<std::size_t>(at)] = rank;
    ++count;
  }
  return count;
}

template <class T>
std::vector<std::int64_t> exclusive_prefix(const std::vector<T>& counts) {
  std::vector<std::int64_t> offsets(counts.size() + 1, 0);
  for (std::size_t i = 0; i < counts.size(); ++i) offsets[i + 1] = offsets[i] + counts[i];
  return offsets;
}

/// Send lists and destinations, from the own routes.
void place_own_tokens(ExchangePlan& plan) {
  const RouteCounts& own = plan.own;
  plan.send_offset = exclusive_prefix(own.tokens_per_rank);
  plan.send_tokens.resize(static_cast<std::size_t>(plan.send_offset.back()));
  plan.destinations.reserve(plan.send_tokens.size());
  plan.destination_offset.assign(1, 0);
  plan.destination_offset.reserve(static_cast<std::size_t>(own.tokens) + 1);
  std::vector<std::int32_t> filled(own.tokens_per_rank.size(), 0);
  std::array<std::int32_t, kMaxTopk> ranks{};
  for (std::int64_t token = 0; token < own.tokens; ++token) {
    const int n =
        destinations(own.topk_idx.data() + token * own.topk, own.topk, plan.placement, ranks);
    for (int i = 0; i < n; ++i) {
      const auto d = static_cast<std::size_t>(ranks[static_cast<std::size_t>(i)]);
      const std::int32_t row = filled[d]++;
      plan.send_tokens[static_cast<std::size_t>(plan.send_offset[d] + row)] =
          static_cast<std::int32_t>(token);
      plan.destinations.push_back({static_cast<std::int32_t>(d), row});
    }
    plan.destination_offset.push_back(static_cast<std::int64_t>(plan.destinations.size()));
  }
}

}  // namespace

RouteCounts count_routes(std::vector<std::int32_t> topk_idx, std::int64_t tokens, int topk,
                         const Placement& placement) {
  RouteCounts counts;
  counts.topk = topk;
  counts.tokens = tokens;
  counts.topk_idx = std::move(topk_idx);
  counts.tokens_per_rank.assign(static_cast<std::size_t>(placement.ranks), 0);
  counts.slots_per_expert.assign(static_cast<std::size_t>(placement.experts), 0);
  std::array<std::int32_t, kMaxTopk> ranks{};
  for (std::int64_t token = 0; token < tokens; ++token) {
    const std::int32_t* route = counts.topk_idx.data() + token * topk;
    const int n = destinations(route, topk, placement, ranks);
    for (int i = 0; i < n; ++i) {
      ++counts.tokens_per_rank[static_cast<std::size_t>(ranks[static_cast<std::size_t>(i)])];
    }
    for (int k = 0; k < topk; ++k) {
      if (route[k] >= 0) ++counts.slots_per_expert[static_cast<std::size_t>(route[k])];
    }
  }
  return counts;
}

ExchangePlan make_plan(RouteCounts own, std::span<const std::int32_t> counts,
                       const Placement& placement, int rank) {
  ExchangePlan plan;
  plan.placement = placement;
  plan.rank = rank;
  plan.own = std::move(own);
  const auto ranks = static_cast<std::size_t>(placement.ranks);
  const auto experts = static_cast<std::size_t>(placement.experts);
  const auto first = static_cast<std::size_t>(placement.first_expert(rank));
  const auto local = static_cast<std::size_t>(placement.local_experts(rank));
  plan.rank_tokens.reserve(ranks * ranks);
  plan.expert_slots.reserve(ranks * local);
  for (std::size_t s = 0; s < ranks; ++s) {
    const auto row = counts.subspan(s * (ranks + experts), ranks + experts);
    plan.rank_tokens.insert(plan.rank_tokens.end(), row.begin(),
                            row.begin() + static_cast<std::ptrdiff_t>(ranks));
    const auto slots = row.subspan(ranks + first, local);
    plan.expert_slots.insert(plan.expert_slots.end(), slots.begin(), slots.end());
  }
  plan.recv_offset.assign(1, 0);
  for (int s = 0; s < placement.ranks; ++s) {
    plan.recv_offset.push_back(
        plan.recv_offset.back() +
        plan.rank_tokens[static_cast<std::size_t>(s) * ranks + static_cast<std::size_t>(rank)]);
  }
  for (int d = 0; d < placement.ranks; ++d) plan.peer_row.push_back(plan.first_row(d, rank));
  place_own_tokens(plan);
  return plan;
}

std::int64_t ExchangePlan::first_row(int peer, int source) const {
  const auto ranks = static_cast<std::size_t>(placement.ranks);
  std::int64_t row = 0;
  for (std::size_t s = 0; s < static_cast<std::size_t>(source); ++s) {
    row += rank_tokens[s * ranks + static_cast<std::size_t>(peer)];
  }
  return row;
}

std::int64_t ExchangePlan::recv_rows_of(int peer) const {
  return first_row(peer, ranks());
}

std::vector<std::int64_t> ExchangePlan::slots_per_expert() const {
  std::vector<std::int64_t> slots(static_cast<std::size_t>(local_experts()), 0);
  for (std::size_t i = 0; i < expert_slots.size(); ++i) slots[i % slots.size()] += expert_slots[i];
  return slots;
}

std::vector<std::int64_t> ExchangePlan::expert_offsets(std::int64_t alignment) const {
  std::vector<std::int64_t> blocks = slots_per_expert();
  for (auto& rows : blocks) rows = (rows + alignment - 1) / alignment * alignment;
  return exclusive_prefix(blocks);
}

void local_routes(const ExchangePlan& plan, int peer, std::int32_t* out) {
  const auto first = static_cast<std::int32_t>(plan.placement.first_expert(peer));
  const auto end = first + static_cast<std::int32_t>(plan.placement.local_experts(peer));
  const auto d = static_cast<std::size_t>(peer);
  for (std::int64_t i = plan.send_offset[d]; i < plan.send_offset[d + 1]; ++i) {
    const std::int64_t token = plan.send_tokens[static_cast<std::size_t>(i)];
    const std::int32_t* route = plan.own.topk_idx.data() + token * plan.own.topk;
    for (int k = 0; k < plan.own.topk; ++k) {
      *out++ = route[k] >= first && route[k] < end ? route[k] - first : -1;
    }
  }
}

std::vector<std::int64_t> place_slots(std::span<const std::int32_t> topk_idx,
                                      std::span<const std::int64_t> expert_offsets) {
  std::vector<std::int64_t> next(expert_offsets.begin(), expert_offsets.end());
  std::vector<std::int64_t> rows(topk_idx.size());
  for (std::size_t i = 0; i < topk_idx.size(); ++i) {
    rows[i] = topk_idx[i] < 0 ? -1 : next[static_cast<std::size_t>(topk_idx[i])]++;
  }
  return rows;
}

}  // namespace ferry
