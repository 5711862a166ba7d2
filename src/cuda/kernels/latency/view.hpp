// What the kernels of a latency exchange and the proxy between domains know of it, and where its
// words, rows and sums lie. Plain data.
//
// Row formats (LL, LL128, Simple) are in row_ll.cuh, row_ll128.cuh and row_simple.cuh; row.cuh says
// how they are built.
#pragma once
#include <cstddef>
#include <cstdint>

#include "core/placement.hpp"
#include "cuda/kernels/base/group_view.hpp"
#include "cuda/kernels/latency/layout.hpp"
#include "ferry/dtype.hpp"

namespace ferry::cuda {

/// Words of this rank alone, in its GPU's memory; zero at first. Of the counters of blocks each
/// knows what it was when the call began, so none is ever set back.
struct LatencyWords {
  std::uint64_t generation;     ///< of the last dispatch that was sent
  std::uint64_t received[2];    ///< the last generation of each parity that was received
  std::uint64_t released;       ///< what the peers were told
  std::uint32_t calls;          ///< kernel calls so far
  std::uint32_t came_before;    ///< `came` at the end of the last call
  std::uint32_t passed_before;  ///< `passed` then
  std::uint32_t epoch;          ///< of the group, that began with the last regroup; 0: none did
  std::uint32_t unused[18];     ///< what follows lies in other lines
  std::uint32_t came;           ///< blocks that have read the words above
  std::uint32_t left;           ///< blocks that have ended
  std::uint32_t passed;         ///< blocks that have found all headers
  std::uint32_t halted;         ///< blocks that wait for the verdict on a header; 0 between calls
  std::uint32_t lost;  ///< number of the last call in which something of a rank was missing
  std::uint32_t masked[kMaxDomain];  ///< number of the call in which it was, kMaskedByHost or
                                     ///< kLostRank; 0: it is not
  std::uint64_t judged;              ///< generation of the last verdict
  /// Generation in which this rank's header was over its deadline, and what became of it:
  /// generation * 2, + 1: it is there.
  std::uint64_t suspected[kMaxDomain];
  std::uint64_t verdict[kMaxDomain];
  std::uint64_t rounds;               ///< of rejoining
  std::uint64_t wait_ns[kMaxDomain];  ///< ns, of the running call, if asked for; 0 between calls
  std::uint32_t last_mask;  ///< number of the last call in which a rank was masked; 0: none
  std::uint32_t begun;      ///< number of the newest call
};

/// What one dispatch leaves for its combine; GPU memory of this rank, together with `slots` (i32
/// [R, capacity, topk]: row of the expert-major output, −1: none) and the weights that came with it
/// (f32, of the same shape).
struct LatencyHandle {
  std::uint64_t generation;
  std::int32_t tokens[kMaxDomain];  ///< of each source; 0: it is masked or refused
  std::uint32_t sent[kMaxDomain];   ///< not 0: the rank got rows and was not masked: sums come back
};

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

inline constexpr std::uint32_t kPerSlotTag = 1u << 31;
/// Bits of the tags of a combine's rows that say how it combines: the path, and above kFormatShift
/// the format.
inline constexpr int kFormatShift = 29;
inline constexpr std::uint32_t kGenerationTag = (1u << kFormatShift) - 1;

/// Words of rejoining: the round, and below it a generation.
inline constexpr int kRejoinShift = 48;

// Places; `base` is any rank's registered memory.

struct LatencyPlaces {
  const LatencyView& v;
  std::uint64_t generation;

  FERRY_FN std::size_t parity() const { return generation % 2; }
  FERRY_FN std::uint32_t tag() const { return static_cast<std::uint32_t>(generation); }
  /// Of rows of a combine: ranks that take different paths find each other's tags odd, not right.
  FERRY_FN std::uint32_t sum_tag(bool per_slot) const {
    return tag() ^ (per_slot ? kPerSlotTag : 0u);
  }
  FERRY_FN std::size_t line(int source) const {
    return (parity() * static_cast<std::size_t>(v.group.ranks) + static_cast<std::size_t>(source));
  }
  FERRY_FN std::size_t slot(int source, std::int64_t token) const {
    return line(source) * static_cast<std::size_t>(v.capacity) + static_cast<std::size_t>(token);
  }
  FERRY_FN std::size_t sum_slot(int row, std::int64_t token) const {
    return (parity() * v.layout.sum_slots + static_cast<std::size_t>(row)) *
               static_cast<std::size_t>(v.capacity) +
           static_cast<std::size_t>(token);
  }
  FERRY_FN std::uint64_t* released(std::byte* base, int receiver) const {
    return line_of(base, v.layout.released, receiver);
  }
  FERRY_FN static std::uint64_t* line_of(std::byte* base, std::size_t lines, int rank) {
    return reinterpret_cast<std::uint64_t*>(base + lines +
                                            static_cast<std::size_t>(rank) * kLineBytes);
  }
  /// Of this rank's last rejoin: round << kRejoinShift | generation that was agreed on. Its proxy
  /// looks there; in an inbox no peer writes to this rank's own line.
  FERRY_FN std::uint64_t* rejoined(std::byte* inbox) const {
    return line_of(inbox, v.layout.answers, v.group.rank);
  }
  /// What the owner of `base` knows of `rank`: of Gone.
  FERRY_FN std::uint32_t* gone(std::byte* base, int rank) const {
    return reinterpret_cast<std::uint32_t*>(base + v.layout.gone) + rank;
  }
  /// Words of the head, then the numbers of rows.
  FERRY_FN std::uint64_t* header(std::byte* base, int source) const {
    return reinterpret_cast<std::uint64_t*>(base + v.layout.headers +
                                            line(source) * v.layout.header_bytes);
  }
  FERRY_FN std::uint64_t* numbers(std::byte* base, int source) const {
    return header(base, source) + kLatencyHeadWords;
  }
  FERRY_FN std::uint64_t* places(std::byte* base, int source) const {
    return header(base, source) + v.layout.places_at / 8;
  }
  FERRY_FN std::uint64_t* header_weights(std::byte* base, int source) const {
    return header(base, source) + v.layout.weights_at / 8;
  }
  FERRY_FN std::uint32_t* row_tags(std::byte* base, int source, std::int64_t token) const {
    return reinterpret_cast<std::uint32_t*>(base + v.layout.row_tags) +
           slot(source, token) * kMaxParts;
  }
  FERRY_FN std::byte* row(std::byte* base, int source, std::int64_t token) const {
    return base + v.layout.rows + slot(source, token) * v.layout.row_slot;
  }
  FERRY_FN std::uint64_t* weights(std::byte* base, int source) const {
    return reinterpret_cast<std::uint64_t*>(base + v.layout.weights) +
           slot(source, 0) * static_cast<std::size_t>(v.topk);
  }
  FERRY_FN std::uint32_t* sum_tags(std::byte* base, int row, std::int64_t token) const {
    return reinterpret_cast<std::uint32_t*>(base + v.layout.sum_tags) +
           sum_slot(row, token) * kMaxParts;
  }
  FERRY_FN std::byte* sum(std::byte* base, int row, std::int64_t token,
                          std::size_t row_bytes) const {
    return base + v.layout.sums + sum_slot(row, token) * row_bytes;
  }
  /// The same of a row that is not as it is.
  FERRY_FN std::byte* encoded_sum(std::byte* base, int row, std::int64_t token) const {
    return base + v.layout.encoded_sums + sum_slot(row, token) * v.layout.encoded_slot;
  }
};

}  // namespace ferry::cuda
