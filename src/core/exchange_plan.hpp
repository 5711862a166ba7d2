// Routes → counts → plan: what goes where. Pure; the protocols move the counts between the steps.
#pragma once
#include <cstddef>
#include <cstdint>
#include <span>
#include <vector>

#include "core/placement.hpp"

namespace ferry {

/// What one rank knows from its own routes alone.
struct RouteCounts {
  int topk = 0;
  std::int64_t tokens = 0;
  std::vector<std::int32_t> topk_idx;          ///< [T, K], global expert ids, −1 = unused
  std::vector<std::int32_t> tokens_per_rank;   ///< [R]: a token counts once for each rank
  std::vector<std::int32_t> slots_per_expert;  ///< [E]: every slot counts, duplicates too
};

/// Counts the routes of one rank. Every id must be −1 or 0 … experts−1 (checked by the caller).
RouteCounts count_routes(std::vector<std::int32_t> topk_idx, std::int64_t tokens, int topk,
                         const Placement& placement);

/// Destination j of a token is the j-th rank, ascending, that the token goes to.
struct Destination {
  std::int32_t rank = 0;
  std::int32_t row = 0;  ///< ordinal among the rows that this rank sends there
};

/// Where every row goes and what arrives, on one rank.
struct ExchangePlan {
  Placement placement{};
  int rank = 0;
  RouteCounts own{};

  /// [R, R]: row s, column d: tokens that s sends to d; empty in groups of more than kMatrixRanks
  /// (core/pair_counts.hpp).
  std::vector<std::int32_t> rank_tokens;
  std::vector<std::int32_t> expert_slots;  ///< [R, local experts]: slots of s for my experts

  std::vector<std::int32_t> send_tokens;         ///< own tokens by destination rank, then token
  std::vector<std::int64_t> send_offset;         ///< [R + 1] into send_tokens
  std::vector<std::int64_t> peer_row;            ///< [R]: at rank d, my rows begin at this row
  std::vector<std::int64_t> peer_recv_rows;      ///< [R]: rows that rank d receives in all
  std::vector<std::int64_t> peer_sent_before;    ///< [R]: rows of rank s to ranks before mine
  std::vector<std::int64_t> peer_sent_rows;      ///< [R]: rows that rank s sends in all
  std::vector<std::int64_t> recv_offset;         ///< [R + 1]: rows of source s at my rank
  std::vector<std::int64_t> destination_offset;  ///< [T + 1] into destinations
  std::vector<Destination> destinations;         ///< of own tokens, ascending rank

  int ranks() const { return placement.ranks; }
  std::int64_t local_experts() const { return placement.local_experts(rank); }
  std::int64_t recv_rows() const { return recv_offset.back(); }
  std::int64_t send_rows(int peer) const {
    const auto d = static_cast<std::size_t>(peer);
    return send_offset[d + 1] - send_offset[d];
  }
  /// [R]: tokens that `source` sends to each rank.
  std::span<const std::int32_t> tokens_of(int source) const {
    const auto r = static_cast<std::size_t>(ranks());
    return std::span(rank_tokens).subspan(static_cast<std::size_t>(source) * r, r);
  }
  std::int64_t tokens_of(int source, int target) const {
    return tokens_of(source)[static_cast<std::size_t>(target)];
  }
  std::vector<std::int64_t> slots_per_expert() const;
  /// First row of every local expert's block, and the end: [local experts + 1].
  std::vector<std::int64_t> expert_offsets(std::int64_t alignment) const;
};

/// What all ranks counted, as far as one of them needs it.
class GroupCounts {
 public:
  GroupCounts(const Placement& placement, int rank);
  /// Of the next source in rank order: its tokens_per_rank [R], then its slots_per_expert [E].
  void add(std::span<const std::int32_t> counts);

 private:
  friend ExchangePlan make_plan(RouteCounts own, GroupCounts counts, const Placement& placement,
                                int rank);
  std::size_t first_;  // of the rank's experts, in what a source counted
  std::size_t local_;
  std::size_t ranks_;
  std::vector<std::int32_t> rank_tokens_{};
  std::vector<std::int32_t> expert_slots_{};
};

ExchangePlan make_plan(RouteCounts own, GroupCounts counts, const Placement& placement, int rank);
/// `counts`: of every source rank in order.
ExchangePlan make_plan(RouteCounts own, std::span<const std::int32_t> counts,
                       const Placement& placement, int rank);

/// What a plan has of its own routes: send_… and destinations.
void place_own_tokens(ExchangePlan& plan);
/// What a plan has of `rank_tokens`: recv_offset and all peer_…. One pass by rows, each of which is
/// in one piece: a walk down a column of a large group misses the caches at every step.
void sum_rank_tokens(ExchangePlan& plan);

/// At some ranks, where the rows of one source after another begin.
class FirstRows {
 public:
  FirstRows(const ExchangePlan& plan, std::span<const int> ranks)
      : plan_(plan), ranks_(ranks), rows_(ranks.size()) {}
  /// For each of the ranks. Takes one step for each source since the last one; of an earlier one it
  /// begins again.
  const std::vector<std::int64_t>& of(int source);

 private:
  const ExchangePlan& plan_;
  std::span<const int> ranks_;
  std::vector<std::int64_t> rows_;
  int source_ = 0;
};

/// The routes of received rows, as the sender writes them: global ids to local ids of `peer`,
/// −1 for experts elsewhere. out: [send_rows(peer), K].
void local_routes(const ExchangePlan& plan, int peer, std::int32_t* out);

/// Expert-major row of every slot of the received rows; −1 where the slot is not local.
/// topk_idx: [n, K] local ids. Rows inside a block are in rank-major order, then slot.
std::vector<std::int64_t> place_slots(std::span<const std::int32_t> topk_idx,
                                      std::span<const std::int64_t> expert_offsets);

}  // namespace ferry
