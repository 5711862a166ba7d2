// Sizes and offsets of everything in registered memory, from one constexpr function for each
// purpose, for host and device alike.
#pragma once
#include <cstddef>
#include <cstdint>

#include "core/device.hpp"

namespace ferry {

/// Flags and messages of different ranks never share a cache line (two lines on machines that
/// fetch pairs).
inline constexpr std::size_t kLineBytes = 128;

FERRY_FN constexpr std::size_t round_up(std::size_t value, std::size_t multiple) {
  return (value + multiple - 1) / multiple * multiple;
}

/// Hands out aligned places in order; `end` is the size.
struct Carver {
  std::size_t end = 0;
  FERRY_FN constexpr std::size_t take(std::size_t bytes, std::size_t align = kLineBytes) {
    const std::size_t at = round_up(end, align);
    end = at + bytes;
    return at;
  }
};

/// What a rank says of the membership (protocol/membership_statement.hpp), at most.
inline constexpr std::size_t kStatementBytes = 512;

/// One rank's control segment, written by its peers.
struct ControlLayout {
  std::size_t swap_flags = 0;  ///< [R] lines: generation of source's last message
  std::size_t delivered = 0;   ///< [R] lines: generation in which source's rows are all here
  std::size_t done = 0;        ///< [R] lines: generation in which the reader has read my rows
  std::size_t crossed = 0;     ///< [R] lines: chunks of source's that crossed to here, ever
  std::size_t broadcasts = 0;  ///< [R] lines: failure broadcasts
  std::size_t awaited = 0;     ///< [R] lines: for whom source waits (engine/wait_chain.hpp)
  std::size_t heartbeat = 0;   ///< one line, written by the owner: when it last waited, the call
                               ///< that it is in (core/call.hpp, CallWord), when it last waited
                               ///< for a transfer, whether it has left, at which step it joined
  std::size_t evicted = 0;     ///< one line: the epoch in which peers went on without the owner
  std::size_t bell = 0;        ///< one line: raised by peers that have said something new, and
                               ///< by processes that wait for a seat, which count their knocks
  std::size_t statement = 0;   ///< written by the owner (protocol/board.hpp)
  std::size_t mailbox = 0;     ///< [2, R, message_bytes]
  std::size_t message_bytes = 0;
  std::size_t bytes = 0;
};

/// `body_bytes`: the largest message.
FERRY_FN constexpr ControlLayout make_control_layout(int ranks, std::size_t body_bytes) {
  const auto r = static_cast<std::size_t>(ranks);
  ControlLayout layout{};
  Carver carver{};
  layout.swap_flags = carver.take(r * kLineBytes);
  layout.delivered = carver.take(r * kLineBytes);
  layout.done = carver.take(r * kLineBytes);
  layout.crossed = carver.take(r * kLineBytes);
  layout.broadcasts = carver.take(r * kLineBytes);
  layout.awaited = carver.take(r * kLineBytes);
  layout.heartbeat = carver.take(kLineBytes);
  layout.evicted = carver.take(kLineBytes);
  layout.bell = carver.take(kLineBytes);
  layout.statement = carver.take(kLineBytes + 2 * kStatementBytes);
  layout.message_bytes = round_up(body_bytes, kLineBytes);
  layout.mailbox = carver.take(2 * r * layout.message_bytes);
  layout.bytes = round_up(carver.end, 4096);
  return layout;
}

/// What a dispatch writes into the receive region: rows, then scales, both dense.
struct ReceiveLayout {
  std::size_t rows = 0;    ///< [capacity, row_bytes]
  std::size_t scales = 0;  ///< f32 [capacity, scale_columns]
  std::size_t bytes = 0;
};

FERRY_FN constexpr ReceiveLayout make_receive_layout(std::int64_t capacity, std::size_t row_bytes,
                                                     std::int64_t scale_columns) {
  const auto n = static_cast<std::size_t>(capacity);
  ReceiveLayout layout{};
  Carver carver{};
  layout.rows = carver.take(n * row_bytes);
  layout.scales = carver.take(n * static_cast<std::size_t>(scale_columns) * sizeof(float));
  layout.bytes = carver.end;
  return layout;
}

/// What travels beside the rows: source tokens and routes (first dispatch of a plan), weights.
struct SideLayout {
  std::size_t source_token = 0;  ///< i32 [rows]
  std::size_t topk_idx = 0;      ///< i32 [rows, K]
  std::size_t weights = 0;       ///< f32 [rows, K]
  std::size_t bytes = 0;
};

FERRY_FN constexpr SideLayout make_side_layout(std::int64_t rows, int topk, bool routes,
                                               bool weights) {
  const auto n = static_cast<std::size_t>(rows);
  const auto k = static_cast<std::size_t>(topk);
  SideLayout layout{};
  Carver carver{};
  layout.source_token = carver.take(routes ? n * sizeof(std::int32_t) : 0);
  layout.topk_idx = carver.take(routes ? n * k * sizeof(std::int32_t) : 0);
  layout.weights = carver.take(weights ? n * k * sizeof(float) : 0);
  layout.bytes = carver.end;
  return layout;
}

/// What lies in the staging buffer of a rank to which tokens cross: each row, and what is spread
/// with it.
struct StagingShape {
  std::int64_t rows = 0;
  std::size_t row_bytes = 0;
  std::int64_t scale_columns = 0;
  int topk = 1;
  std::size_t route_bytes = 4;  ///< of a row (PackedRoutes)
  bool tokens = false;          ///< the plan's first dispatch
  bool routes = false;          ///< its first hierarchical one
  bool weights = false;
};

struct StagingLayout {
  std::size_t rows_at = 0;       ///< [rows, row_bytes]
  std::size_t scales = 0;        ///< f32 [rows, scale_columns]
  std::size_t source_token = 0;  ///< i32 [rows]
  std::size_t topk_idx = 0;      ///< [rows, route_bytes], global ids, packed
  std::size_t weights = 0;       ///< f32 [rows, K]
  std::size_t bytes = 0;
};

FERRY_FN constexpr StagingLayout make_staging_layout(const StagingShape& shape) {
  const auto n = static_cast<std::size_t>(shape.rows);
  const auto k = static_cast<std::size_t>(shape.topk);
  StagingLayout layout{};
  Carver carver{};
  layout.rows_at = carver.take(n * shape.row_bytes);
  layout.scales = carver.take(n * static_cast<std::size_t>(shape.scale_columns) * sizeof(float));
  layout.source_token = carver.take(shape.tokens ? n * sizeof(std::int32_t) : 0);
  layout.topk_idx = carver.take(shape.routes ? n * shape.route_bytes : 0);
  layout.weights = carver.take(shape.weights ? n * k * sizeof(float) : 0);
  layout.bytes = carver.end;
  return layout;
}

/// Rows that cross as one chunk: about 256 KiB, so that a large exchange has many and a network is
/// not asked for small ones; of small rows 64. A tuner may choose other sizes.
inline constexpr std::size_t kChunkBytes = std::size_t{256} << 10;
FERRY_FN constexpr std::int64_t chunk_rows(std::size_t row_bytes,
                                           std::size_t chunk_bytes = kChunkBytes) {
  const std::size_t rows = chunk_bytes / (row_bytes > 0 ? row_bytes : 1);
  const std::size_t most = chunk_bytes * 64 / kChunkBytes;
  return static_cast<std::int64_t>(rows < 1 ? 1 : rows > most ? most : rows);
}

/// A row of a latency combine in flight, in the formats that change it: codes first.
struct CombineRowLayout {
  std::size_t e4m3_scales = 0;    ///< f32 [ceil(hidden / 128)]
  std::size_t e4m3_bytes = 0;     ///< of the row
  std::size_t logfmt_high = 0;    ///< the codes' high bits; the low ones come first
  std::size_t logfmt_ranges = 0;  ///< LogfmtRange [ceil(hidden / 128)]
  std::size_t logfmt_bytes = 0;   ///< of the row
};

FERRY_FN constexpr CombineRowLayout make_combine_row_layout(std::size_t hidden) {
  const std::size_t blocks = (hidden + 127) / 128;
  CombineRowLayout layout{};
  layout.e4m3_scales = round_up(hidden, 16);
  layout.e4m3_bytes = layout.e4m3_scales + blocks * 4;
  layout.logfmt_high = round_up(hidden, 16);
  layout.logfmt_ranges = layout.logfmt_high + round_up((hidden + 3) / 4, 16);
  layout.logfmt_bytes = layout.logfmt_ranges + blocks * 8;
  return layout;
}

/// What a latency dispatch says of its rows, at the start of each record.
inline constexpr std::size_t kSourceHeaderBytes = 32;

/// A row of a latency dispatch as it crosses to another domain, with all that belongs to it, so
/// that it is one write: the source's header, token, K local ids, K weights; row; scales. Records
/// follow each other without gaps.
struct RecordLayout {
  std::size_t meta = kSourceHeaderBytes;
  std::size_t row = 0;
  std::size_t scales = 0;
  std::size_t bytes = 0;
};

FERRY_FN constexpr RecordLayout make_record_layout(int topk, std::size_t row_bytes,
                                                   std::size_t scale_bytes) {
  const std::size_t words = 1 + 2 * static_cast<std::size_t>(topk);
  RecordLayout layout{};
  layout.row = round_up(layout.meta + words * sizeof(std::int32_t), 16);
  layout.scales = layout.row + round_up(row_bytes, 16);
  layout.bytes = layout.scales + round_up(scale_bytes, 16);
  return layout;
}

/// A flag of a latency exchange lies at the beginning of its block; behind it there is room for
/// what its writer says. All blocks of a source lie together, so that many sources take few pages.
inline constexpr std::size_t kFlagBlock = 64, kBesideFlag = 16;
inline constexpr std::size_t kSourceBytes = 6 * kFlagBlock;

/// Registered memory of one rank's latency exchange. Every part exists twice, for even and odd
/// generations, but for the flags that every generation raises.
struct LatencyLayout {
  // [R, kSourceBytes]: the flags of a source, each in a block of its own, and what it says beside
  // them. Of what is there twice the second is a block behind the first.
  std::size_t arrived = 0;    ///< rows and counts of source are here
  std::size_t released = 0;   ///< receiver has dropped its result of this generation
  std::size_t announced = 0;  ///< [2]: what source says of its combine is here
  std::size_t combined = 0;   ///< [2]: source's rows for my tokens are here
  std::size_t counts = 0;     ///< [2]: rows that source sends
  std::size_t combines = 0;   ///< [2]: how source combines
  std::size_t masks = 0;      ///< [R] lines: source goes without me (protocol/mask.hpp)
  std::size_t heartbeat = 0;  ///< [R] lines: source is in a call (host/latency/heartbeat.hpp)
  std::size_t offers = 0;     ///< [R] lines, and answers: of a rejoin (protocol/rejoin.hpp)
  std::size_t answers = 0;    ///< [R] lines
  std::size_t row_slot = 0;   ///< bytes of one row as it is; quantised with its scales it fits, too
  std::size_t meta_slot = 0;  ///< bytes of one row's header: source token, K local ids, K weights
  std::size_t rows = 0;       ///< [2, R, capacity, row]; quantised: then scales [R, capacity, C]
  std::size_t metas = 0;      ///< [2, R, capacity, meta_slot]
  std::size_t weights = 0;    ///< f32 [2, R, capacity, K]: of source's tokens
  std::size_t sums = 0;       ///< [2, capacity * sum_rows, sum_slot]: rows to be summed
  std::size_t sum_rows = 0;   ///< of a token: one for each slot; with masks for each rank, too
  std::size_t sum_slot = 0;   ///< bytes of one of them, in any format
  std::size_t outputs = 0;    ///< [2, output_bytes]
  std::size_t output_bytes = 0;
  std::size_t records = 0;      ///< [2, R, capacity, record_slot]: rows from other domains
  std::size_t record_slot = 0;  ///< bytes of one record, in any format
  std::size_t bytes = 0;
};

struct LatencyShape {
  int ranks = 1;
  std::int64_t local_experts = 1;  ///< of the rank that has the most
  std::int64_t capacity = 0;
  std::int64_t hidden = 0;
  int topk = 1;
  std::size_t element_bytes = 2;
  bool masks = false;
  bool fans_out = true;  ///< room for expert-major results
  bool crosses = false;  ///< there are several domains
};

FERRY_FN constexpr LatencyLayout make_latency_layout(const LatencyShape& shape) {
  const auto r = static_cast<std::size_t>(shape.ranks);
  const auto capacity = static_cast<std::size_t>(shape.capacity);
  const auto hidden = static_cast<std::size_t>(shape.hidden);
  const auto k = static_cast<std::size_t>(shape.topk);
  const CombineRowLayout combine = make_combine_row_layout(hidden);
  const std::size_t plain = hidden * shape.element_bytes;
  const std::size_t scale_bytes = combine.e4m3_bytes - combine.e4m3_scales;
  const auto most = [](std::size_t a, std::size_t b) { return a > b ? a : b; };
  LatencyLayout layout{};
  Carver carver{};
  layout.arrived = carver.take(r * kSourceBytes);
  layout.released = layout.arrived + kFlagBlock;
  layout.announced = layout.released + kFlagBlock;
  layout.combined = layout.announced + 2 * kFlagBlock;
  layout.counts = layout.arrived + kBesideFlag;
  layout.combines = layout.announced + kBesideFlag;
  const std::size_t mask_lines = (shape.masks ? r : 0) * kLineBytes;
  layout.masks = carver.take(mask_lines);
  layout.heartbeat = carver.take(mask_lines);
  layout.offers = carver.take(mask_lines);
  layout.answers = carver.take(mask_lines);
  layout.row_slot = plain;
  layout.meta_slot = round_up((1 + 2 * k) * sizeof(std::int32_t), 16);
  layout.rows = carver.take(2 * r * capacity * layout.row_slot);
  layout.metas = carver.take(2 * r * capacity * layout.meta_slot);
  layout.weights = carver.take(2 * r * capacity * k * sizeof(float));
  // A rank that is masked may write late: only where no other rank writes.
  layout.sum_rows = shape.masks ? most(r, k) : k;
  layout.sum_slot = round_up(most(plain, most(combine.e4m3_bytes, combine.logfmt_bytes)), 16);
  layout.sums = carver.take(2 * capacity * layout.sum_rows * layout.sum_slot);
  const std::size_t experts = static_cast<std::size_t>(shape.local_experts);
  const std::size_t output_rows = shape.fans_out ? experts * r * capacity : 0;
  layout.output_bytes = round_up(output_rows * layout.row_slot, kLineBytes);
  layout.outputs = carver.take(2 * layout.output_bytes);
  layout.record_slot = most(make_record_layout(shape.topk, plain, 0).bytes,
                            make_record_layout(shape.topk, hidden, scale_bytes).bytes);
  layout.records = carver.take(shape.crosses ? 2 * r * capacity * layout.record_slot : 0);
  layout.bytes = round_up(carver.end, 4096);
  return layout;
}

}  // namespace ferry
