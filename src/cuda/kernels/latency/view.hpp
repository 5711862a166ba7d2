// What the kernels of a latency exchange and the proxy between domains know of it. Plain data.
//
// A row format (LL, LL128, Simple; docs/glossary.md) is: who may use it (below, and make_view of
// latency/engine.cpp), memory (layout.hpp), stores (send.cuh), receiving (row_ll128.cuh,
// ll_receive.cuh, receive.cuh), and its instances of the dispatch (dispatch_call.cuh,
// dispatch*.cu).
#pragma once
#include <cstddef>
#include <cstdint>

#include "core/placement.hpp"
#include "cuda/kernels/base/group_view.hpp"
#include "cuda/kernels/base/masks.hpp"
#include "cuda/kernels/latency/layout.hpp"
#include "ferry/dtype.hpp"

namespace ferry::cuda {

struct LatencyView {
  GroupView group{};
  Placement placement{};
  DeviceLatencyLayout layout{};
  std::int64_t capacity = 0;
  std::int64_t hidden = 0;
  int topk = 1;   ///< of the configuration
  int parts = 1;  ///< latency_parts(hidden)
  int ll = 0;     ///< most tokens that cross as LL; at most kLLTokens, 0: none
  /// Rows of a dispatch that are not LL cross as LL128 (row_ll128.cuh); with layout.ll128.
  bool ll128 = false;
  Dtype dtype = Dtype::bf16;
  LatencyWords* words = nullptr;
  /// Null: who misses a deadline ends the group. Else combines are per_rank.
  LatencyAlarm* alarm = nullptr;
  // Whatever ranks write and read of each other has the layout above. Ranks of the own domain write
  // into each other's registered memory; for those beyond this rank writes into an outbox of its
  // own and finds what they sent in an inbox; a proxy carries it between them.
  std::byte* peers[kMaxDomain]{};    ///< where this rank writes what a rank shall get …
  std::byte* rows[kMaxDomain]{};     ///< … of that: where its rows of even generations begin
  std::byte* sources[kMaxDomain]{};  ///< … and where it finds what that rank sent
  std::byte* inbox = nullptr;        ///< `sources` of ranks beyond; null: there are none
  std::uint32_t beyond[(kMaxDomain + 31) / 32]{};  ///< a bit for each of those
  std::int32_t slots[kMaxDomain]{};  ///< at a rank's `peers`: the row of sums for slot 0
  std::uint8_t line[kMaxDomain]{};   ///< there: as which source this rank writes
};

/// `rank` is reached in `memory`, where this one writes as source `line`, and read of in `source`.
inline void join_rank(LatencyView& view, int rank, std::byte* memory, int line, std::byte* source) {
  const std::size_t block = static_cast<std::size_t>(view.capacity) * view.layout.row_slot;
  view.peers[rank] = memory;
  view.rows[rank] = memory + view.layout.rows + static_cast<std::size_t>(line) * block;
  view.sources[rank] = source;
  view.line[rank] = static_cast<std::uint8_t>(line);
}
/// The ranks of the own domain, whose registered memory is in `peers`.
inline void join_domain(LatencyView& view) {
  std::byte* own = view.peers[view.group.rank];
  for (int r = 0; r < view.group.ranks; ++r) {
    if (view.peers[r] != nullptr) join_rank(view, r, view.peers[r], view.group.rank, own);
  }
}

/// Whether a source of so many tokens of so wide elements sends LL rows (kLLTokens).
FERRY_FN constexpr bool is_ll_of(const LatencyView& view, int tokens, std::size_t element_bytes) {
  return tokens <= view.ll && may_carry_generation(view.group.ranks, view.hidden, element_bytes);
}

enum class LatencyFormat : std::uint32_t { as_is, e4m3, e4m3_pow2, e4m3_packed };

/// `per_slot`: one row for each slot, summed by the owner in ascending k. `per_rank`: the rank of
/// the experts sums its slots in ascending k, rounds to the dtype, and the owner sums the ranks in
/// ascending order.
enum class CombinePath : std::uint32_t { per_slot, per_rank };

/// How rows are written in flight; as ferry::CombineFormat.
enum class CombineFormat : std::uint32_t { as_is, e4m3, logfmt10 };

}  // namespace ferry::cuda
