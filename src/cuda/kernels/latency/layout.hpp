// The memory of a latency exchange on GPUs: how large its pieces are and what its words say. Plain
// arithmetic, in builds without CUDA, too: the size is asked for everywhere. view.hpp has the
// places.
#pragma once
#include <cstddef>
#include <cstdint>

#include "core/device.hpp"
#include "core/layout.hpp"

namespace ferry::cuda {

inline constexpr int kMaxLatencyTopk = 32;  ///< a lane for each slot of a route
inline constexpr int kMaxParts = 8;         ///< of a row; their tags lie in one sector
inline constexpr int kPartChannels = 1024;  ///< a part is a whole number of these

/// What a source tells each receiver beside its rows: a header of 64-bit words, each with the low
/// 32 bits of the generation above its data, so that none need come before another: two of the head
/// (`make_head`, and `refused`), rows for each local expert, places [capacity, topk], weights
/// [capacity, topk].
inline constexpr int kLatencyHeadWords = 2;

/// `refused` is the second word: 0, or why nothing comes: token * 64 + slot + 1 of a route that is
/// none, or kNoPlace: too many slots name one expert.
/// To a rank of another domain also kLeftOut: the rank takes no part, and there is nothing else.
/// `format`: all that ranks must agree on in a dispatch.
FERRY_FN constexpr std::uint32_t make_head(int tokens, std::uint32_t format) {
  return static_cast<std::uint32_t>(tokens) | format << 16;
}
FERRY_FN constexpr int head_tokens(std::uint32_t head) {
  return static_cast<int>(head & 0xffff);
}
FERRY_FN constexpr std::uint32_t head_format(std::uint32_t head) {
  return head >> 16;
}

/// In the format of a head: weights come with the rows.
inline constexpr std::uint32_t kWithWeights = 1u << 8;

/// No refusal has this number: a route of a token beyond the most.
inline constexpr std::uint32_t kLeftOut = 0xfffffffe;

/// Place of a slot's row: local expert and ordinal among the source's rows for it.
FERRY_FN constexpr std::uint32_t make_place(std::uint32_t expert, std::uint32_t ordinal) {
  return expert << 16 | ordinal;
}
inline constexpr std::uint32_t kNoPlace = 0xffffffff;
inline constexpr std::int64_t kMostLatencyExperts = 8192;  ///< local ones, counted in shared memory
inline constexpr std::int64_t kMostLatencyTokens = 65535;  ///< 16 bits of a head and a place

/// So few tokens of a source, at most, cross with their generation beside the data
/// (row_ll.cuh).
inline constexpr int kLLTokens = 8;

/// Bytes of an LL128 row: of every 1024 channels 2 KiB and a line behind them, or less.
FERRY_FN constexpr std::size_t ll128_row_bytes(std::size_t hidden, std::size_t element_bytes) {
  const std::size_t pieces = (hidden + kPartChannels - 1) / kPartChannels;
  return pieces * (kPartChannels * element_bytes + kLineBytes);
}

/// Whether rows may carry their generation, as LL or LL128. Wider elements, and more
/// ranks, have no registers left for it.
FERRY_FN constexpr bool may_carry_generation(int ranks, std::int64_t hidden,
                                             std::size_t element_bytes) {
  return element_bytes == 2 && hidden % 16 == 0 && ranks <= 32;
}

struct LatencyDeviceShape {
  int ranks = 1;
  std::int64_t local_experts = 1;  ///< of the rank that has the most
  std::int64_t capacity = 0;
  std::int64_t hidden = 0;
  int topk = 1;
  std::size_t element_bytes = 2;
  /// Ranks of other domains take part, whose rows come as records; rows of few tokens cross like
  /// any others then.
  bool crosses = false;
  bool masks = false;
};

/// What crosses to another domain with each row, just before it, so that both are one write. Behind
/// this come the places of the token's slots, u32 [topk], and their weights, f32 [topk].
struct LatencyRecord {
  std::uint64_t generation = 0;
  std::uint32_t tokens = 0;   ///< of the source
  std::uint32_t refused = 0;  ///< as in a header
  std::uint32_t rows = 0;     ///< records that come, this one included; 0: there is no row
  std::uint32_t unused = 0;
};
/// With what keeps the row behind it aligned.
FERRY_FN constexpr std::size_t record_bytes(int topk) {
  return round_up(sizeof(LatencyRecord) + static_cast<std::size_t>(topk) * 8, 32);
}

/// One rank's registered memory of a latency exchange. Everything is there twice, for even and odd
/// generations, but for what comes before `headers`. All before `rows` is zero before the first
/// call.
struct DeviceLatencyLayout {
  std::size_t released = 0;  ///< [R] lines: the receiver has read all up to this generation
  std::size_t gone = 0;      ///< u32 [R], of Gone
  std::size_t words = 0;     ///< LatencyWords, where peers may poll; 0: they may not
  std::size_t offers = 0;    ///< [R] lines: rejoin.cu
  std::size_t answers = 0;   ///< [R] lines
  std::size_t headers = 0;   ///< [2, R, header_bytes]
  std::size_t header_bytes = 0;
  std::size_t places_at = 0;   ///< inside a header
  std::size_t weights_at = 0;  ///< inside a header
  std::size_t weights = 0;     ///< u64 [2, R, capacity, topk], pushed by combine; with generation
  std::size_t row_tags = 0;    ///< u32 [2, R, capacity, kMaxParts]
  std::size_t sum_tags = 0;  ///< u32 [2, S, capacity, kMaxParts], in an outbox sum_blocks of those
  std::size_t ll_rows = 0;   ///< [2, R, kLLTokens, ll_row_slot]
  std::size_t ll_row_slot = 0;
  std::size_t ll_scale_at = 0;  ///< inside such a row; and the bytes of one of ll_sums
  std::size_t ll_sums = 0;      ///< [2, R, kLLTokens, ll_scale_at]
  std::size_t rows = 0;         ///< [2, R, capacity, row_slot]
  std::size_t row_slot = 0;
  bool ll128 = false;            ///< there is room for LL128 rows, which are zero at first, too
  std::size_t record_bytes = 0;  ///< before each row of another domain; 0: there are none
  std::size_t scale_at = 0;      ///< inside a quantised row's slot
  std::size_t sums = 0;          ///< [2, S, capacity, hidden]: S is the source rank or the slot
  std::size_t sum_slots = 0;     ///< max(R, topk)
  /// An outbox holds so many blocks of `sums`, and of their tags. In the first lie the rows for
  /// owners; slots of owners beyond the domain have others, for they have the same numbers.
  std::size_t sum_blocks = 1;
  /// The same for rows of a format that is not as_is: codes first (core/layout.hpp). They are
  /// shorter than a row as it is, and lie in its place, but for those of a few channels.
  std::size_t encoded_sums = 0;
  std::size_t encoded_slot = 0;  ///< bytes of a place
  CombineRowLayout encoded{};
  std::size_t bytes = 0;
  std::size_t outbox_bytes = 0;
};

/// In an outbox: the row of sums for slot 0 of tokens of `owner`.
FERRY_FN constexpr int first_slot_row(const DeviceLatencyLayout& layout, int owner, int topk) {
  const int slots = static_cast<int>(layout.sum_slots), each = slots / topk;
  return (1 + owner / each) * 2 * slots + owner % each * topk;
}

FERRY_FN constexpr DeviceLatencyLayout make_device_latency_layout(const LatencyDeviceShape& shape) {
  const auto r = static_cast<std::size_t>(shape.ranks);
  const auto capacity = static_cast<std::size_t>(shape.capacity);
  const auto hidden = static_cast<std::size_t>(shape.hidden);
  const auto k = static_cast<std::size_t>(shape.topk);
  const std::size_t plain = hidden * shape.element_bytes;
  const std::size_t quantized = round_up(hidden, 16) + (hidden + 127) / 128 * 4;
  DeviceLatencyLayout layout{};
  Carver carver{};
  layout.released = carver.take(r * kLineBytes);
  layout.gone = carver.take(r * sizeof(std::uint32_t));
  layout.offers = carver.take(r * kLineBytes);
  layout.answers = carver.take(r * kLineBytes);
  layout.places_at = (kLatencyHeadWords + static_cast<std::size_t>(shape.local_experts)) * 8;
  layout.weights_at = layout.places_at + capacity * k * 8;
  layout.header_bytes = round_up(layout.weights_at + capacity * k * 8, kLineBytes);
  layout.headers = carver.take(2 * r * layout.header_bytes);
  layout.weights = carver.take(2 * r * capacity * k * 8);
  layout.sum_slots = r > k ? r : k;
  if (shape.crosses && !shape.masks) {  // with masks there are no rows of slots
    const std::size_t each = layout.sum_slots / k;
    layout.sum_blocks = 1 + (r + each - 1) / each;
  }
  layout.row_tags = carver.take(2 * r * capacity * kMaxParts * 4);
  layout.sum_tags =
      carver.take(layout.sum_blocks * 2 * layout.sum_slots * capacity * kMaxParts * 4);
  layout.ll_scale_at = 2 * round_up(plain, 512);
  layout.ll_row_slot = round_up(layout.ll_scale_at + (hidden + 127) / 128 * 8, kLineBytes);
  const std::size_t ll = shape.crosses ? 0 : kLLTokens;
  layout.ll_rows = carver.take(2 * r * ll * layout.ll_row_slot);
  layout.ll_sums = carver.take(2 * r * ll * layout.ll_scale_at);
  layout.scale_at = round_up(hidden, 16);
  const std::size_t row = plain > quantized ? plain : quantized;
  layout.record_bytes = shape.crosses ? record_bytes(shape.topk) : 0;
  const std::size_t ll128 = ll128_row_bytes(hidden, shape.element_bytes);
  layout.ll128 = !shape.crosses && shape.capacity > kLLTokens &&
                 may_carry_generation(shape.ranks, shape.hidden, shape.element_bytes);
  layout.row_slot = layout.ll128 ? ll128 : round_up(row + layout.record_bytes, 32);
  layout.rows = carver.take(2 * r * capacity * layout.row_slot) + layout.record_bytes;
  std::size_t block = 2 * layout.sum_slots * capacity * plain;
  layout.sums = carver.take(block);
  layout.encoded = make_combine_row_layout(hidden);
  layout.encoded_sums = layout.sums;
  layout.encoded_slot = plain;
  if (layout.encoded.logfmt_bytes > plain || layout.encoded.e4m3_bytes > plain) {
    const std::size_t longer = layout.encoded.logfmt_bytes > layout.encoded.e4m3_bytes
                                   ? layout.encoded.logfmt_bytes
                                   : layout.encoded.e4m3_bytes;
    carver.end += (layout.sum_blocks - 1) * block;
    layout.encoded_slot = round_up(longer, 16);
    block = 2 * layout.sum_slots * capacity * layout.encoded_slot;
    layout.encoded_sums = carver.take(block);
  }
  layout.bytes = round_up(carver.end, 4096);
  layout.outbox_bytes = round_up(carver.end + (layout.sum_blocks - 1) * block, 4096);
  return layout;
}

/// Parts of a row: the same on all ranks.
FERRY_FN constexpr int latency_parts(std::int64_t hidden) {
  const std::int64_t pieces = (hidden + kPartChannels - 1) / kPartChannels;
  const std::int64_t each = (pieces + kMaxParts - 1) / kMaxParts;
  return static_cast<int>((pieces + each - 1) / each);
}

}  // namespace ferry::cuda
