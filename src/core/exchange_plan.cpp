#include "core/exchange_plan.hpp"

#include <algorithm>
#include <array>
#include <numeric>
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

}  // namespace

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

GroupCounts::GroupCounts(const Placement& placement, int rank)
    : first_(static_cast<std::size_t>(placement.ranks + placement.first_expert(rank))),
      local_(static_cast<std::size_t>(placement.local_experts(rank))),
      ranks_(static_cast<std::size_t>(placement.ranks)) {
  rank_tokens_.reserve(ranks_ * ranks_);
  expert_slots_.reserve(ranks_ * local_);
}

void GroupCounts::add(std::span<const std::int32_t> counts) {
  const auto append = [&](std::vector<std::int32_t>& to, std::size_t first, std::size_t count) {
    const auto from = counts.subspan(first, count);
    to.insert(to.end(), from.begin(), from.end());
  };
  append(rank_tokens_, 0, ranks_);
  append(expert_slots_, first_, local_);
}

ExchangePlan make_plan(RouteCounts own, GroupCounts counts, const Placement& placement, int rank) {
  ExchangePlan plan;
  plan.placement = placement;
  plan.rank = rank;
  plan.own = std::move(own);
  plan.rank_tokens = std::move(counts.rank_tokens_);
  plan.expert_slots = std::move(counts.expert_slots_);
  sum_rank_tokens(plan);
  place_own_tokens(plan);
  return plan;
}

ExchangePlan make_plan(RouteCounts own, std::span<const std::int32_t> counts,
                       const Placement& placement, int rank) {
  GroupCounts all(placement, rank);
  const auto each = static_cast<std::size_t>(placement.ranks + placement.experts);
  for (std::size_t at = 0; at < counts.size(); at += each) all.add(counts.subspan(at, each));
  return make_plan(std::move(own), std::move(all), placement, rank);
}

void sum_rank_tokens(ExchangePlan& plan) {
  const auto ranks = static_cast<std::size_t>(plan.ranks());
  const auto self = static_cast<std::size_t>(plan.rank);
  std::vector<std::int64_t>& received = plan.peer_recv_rows;
  received.assign(ranks, 0);
  plan.recv_offset.assign(1, 0);
  plan.peer_sent_before.clear();
  plan.peer_sent_rows.clear();
  for (int source = 0; source < plan.ranks(); ++source) {
    if (source == plan.rank) plan.peer_row = received;
    const std::int32_t* row = plan.tokens_of(source).data();
    for (std::size_t d = 0; d < ranks; ++d) received[d] += row[d];
    const std::int64_t before = std::accumulate(row, row + self, std::int64_t{0});
    plan.peer_sent_before.push_back(before);
    plan.peer_sent_rows.push_back(std::accumulate(row + self, row + ranks, before));
    plan.recv_offset.push_back(plan.recv_offset.back() + row[self]);
  }
}

const std::vector<std::int64_t>& FirstRows::of(int source) {
  if (source < source_) {
    std::fill(rows_.begin(), rows_.end(), 0);
    source_ = 0;
  }
  for (; source_ < source; ++source_) {
    const auto row = plan_.tokens_of(source_);
    for (std::size_t i = 0; i < rows_.size(); ++i) {
      rows_[i] += row[static_cast<std::size_t>(ranks_[i])];
    }
  }
  return rows_;
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
