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

  std::vector<std::int32_t> rank_tokens;   ///< [R, R]: row s, column d: tokens that s sends to d
  std::vector<std::int32_t> expert_slots;  ///< [R, local experts]: slots of s for my experts

  std::vector<std::int32_t> send_tokens;         ///< own tokens by destination rank, then token
  std::vector<std::int64_t> send_offset;         ///< [R + 1] into send_tokens
  std::vector<std::int64_t> peer_row;            ///< [R]: at rank d, my rows begin at this row
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
  /// Tokens that rank s sends to rank d.
  std::int64_t tokens_of(int source, int target) const {
    return rank_tokens[static_cast<std::size_t>(source) * static_cast<std::size_t>(ranks()) +
                       static_cast<std::size_t>(target)];
  }
  /// Rows that rank d receives in all.
  std::int64_t recv_rows_of(int peer) const;
  /// At rank d, where the rows of source s begin.
  std::int64_t first_row(int peer, int source) const;
  std::vector<std::int64_t> slots_per_expert() const;
  /// First row of every local expert's block, and the end: [local experts + 1].
  std::vector<std::int64_t> expert_offsets(std::int64_t alignment) const;
};

/// `counts` holds, for every source rank in order, its tokens_per_rank [R] and then its
/// slots_per_expert [E].
ExchangePlan make_plan(RouteCounts own, std::span<const std::int32_t> counts,
                       const Placement& placement, int rank);

/// The routes of received rows, as the sender writes them: global ids to local ids of `peer`,
/// −1 for experts elsewhere. out: [send_rows(peer), K].
void local_routes(const ExchangePlan& plan, int peer, std::int32_t* out);

/// Expert-major row of every slot of the received rows; −1 where the slot is not local.
/// topk_idx: [n, K] local ids. Rows inside a block are in rank-major order, then slot.
std::vector<std::int64_t> place_slots(std::span<const std::int32_t> topk_idx,
                                      std::span<const std::int64_t> expert_offsets);

}  // namespace ferry
