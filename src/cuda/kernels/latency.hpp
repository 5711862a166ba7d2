// The kernels of latency mode as the engine launches them: parameters, memory, launchers. Nothing
// here needs nvcc.
//
// One dispatch is one generation. Each (token, destination rank) is one row, written straight into
// the slot [generation % 2][source][token] of its receiver, in parts, each of which one warp moves
// and one 32-bit tag announces. Ahead of the rows goes a header for each destination: how many rows
// each local expert gets and where each row goes among them, so that the receiver knows the places
// while the data is in flight. Nobody waits for counts, and a slot has one writer for ever, so what
// a late rank writes can only spoil what it would have sent itself; the sums of a combine by slots
// have several, and there nobody may be late.
//
// Tags are the low 32 bits of the generation. One that was written exactly 2^32 generations ago and
// never since, or never (then it is 0), would be taken for new: only by a receiver that looks in
// that one generation and before the row that it was told of is here.
#pragma once
#include <cuda_runtime_api.h>

#include <cstdint>

#include "core/placement.hpp"
#include "cuda/kernels/group_view.hpp"
#include "ferry/dtype.hpp"

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

/// Place of a slot's row: local expert and ordinal among the source's rows for it.
FERRY_FN constexpr std::uint32_t make_place(std::uint32_t expert, std::uint32_t ordinal) {
  return expert << 16 | ordinal;
}
inline constexpr std::uint32_t kNoPlace = 0xffffffff;
inline constexpr std::int64_t kMostLatencyExperts = 8192;  ///< local ones, counted in shared memory
inline constexpr std::int64_t kMostLatencyTokens = 65535;  ///< 16 bits of a head and a place

/// So few tokens of a source, at most, cross with their generation beside the data
/// (latency_few.cuh).
inline constexpr int kFewTokens = 8;

struct LatencyDeviceShape {
  int ranks = 1;
  std::int64_t local_experts = 1;  ///< of the rank that has the most
  std::int64_t capacity = 0;
  std::int64_t hidden = 0;
  int topk = 1;
  std::size_t element_bytes = 2;
};

/// One rank's registered memory of a latency exchange. Everything is there twice, for even and odd
/// generations, but for what comes before `headers`. All before `rows` is zero before the first
/// call.
struct DeviceLatencyLayout {
  std::size_t released = 0;  ///< [R] lines: the receiver has read all up to this generation
  std::size_t gone = 0;      ///< u32 [R], of Gone
  std::size_t offers = 0;    ///< [R] lines: latency_masks.cu
  std::size_t answers = 0;   ///< [R] lines
  std::size_t headers = 0;   ///< [2, R, header_bytes]
  std::size_t header_bytes = 0;
  std::size_t places_at = 0;   ///< inside a header
  std::size_t weights_at = 0;  ///< inside a header
  std::size_t weights = 0;     ///< u64 [2, R, capacity, topk], pushed by combine; with generation
  std::size_t row_tags = 0;    ///< u32 [2, R, capacity, kMaxParts]
  std::size_t sum_tags = 0;    ///< u32 [2, S, capacity, kMaxParts]
  std::size_t few_rows = 0;    ///< [2, R, kFewTokens, few_row_slot]
  std::size_t few_row_slot = 0;
  std::size_t few_scale_at = 0;  ///< inside such a row; and the bytes of one of few_sums
  std::size_t few_sums = 0;      ///< [2, R, kFewTokens, few_scale_at]
  std::size_t rows = 0;          ///< [2, R, capacity, row_slot]
  std::size_t row_slot = 0;
  std::size_t scale_at = 0;   ///< inside a quantised row's slot
  std::size_t sums = 0;       ///< [2, S, capacity, hidden]: S is the source rank or the slot
  std::size_t sum_slots = 0;  ///< max(R, topk)
  std::size_t bytes = 0;
};

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
  layout.row_tags = carver.take(2 * r * capacity * kMaxParts * 4);
  layout.sum_tags = carver.take(2 * layout.sum_slots * capacity * kMaxParts * 4);
  layout.few_scale_at = 2 * round_up(plain, 512);
  layout.few_row_slot = round_up(layout.few_scale_at + (hidden + 127) / 128 * 8, kLineBytes);
  layout.few_rows = carver.take(2 * r * kFewTokens * layout.few_row_slot);
  layout.few_sums = carver.take(2 * r * kFewTokens * layout.few_scale_at);
  layout.scale_at = round_up(hidden, 16);
  layout.row_slot = round_up(plain > quantized ? plain : quantized, 32);
  layout.rows = carver.take(2 * r * capacity * layout.row_slot);
  layout.sums = carver.take(2 * layout.sum_slots * capacity * plain);
  layout.bytes = round_up(carver.end, 4096);
  return layout;
}

/// Parts of a row: the same on all ranks.
FERRY_FN constexpr int latency_parts(std::int64_t hidden) {
  const std::int64_t pieces = (hidden + kPartChannels - 1) / kPartChannels;
  const std::int64_t each = (pieces + kMaxParts - 1) / kMaxParts;
  return static_cast<int>((pieces + each - 1) / each);
}

/// Words of this rank alone, in its GPU's memory; zero at first. Of the counters of blocks each
/// knows what it was when the call began, so none is ever set back.
struct LatencyWords {
  std::uint64_t generation;     ///< of the last dispatch that was sent
  std::uint64_t received[2];    ///< the last generation of each parity that was received
  std::uint64_t released;       ///< what the peers were told
  std::uint32_t calls;          ///< kernel calls so far
  std::uint32_t came_before;    ///< `came` at the end of the last call
  std::uint32_t passed_before;  ///< `passed` then
  std::uint32_t unused[19];     ///< what follows lies in other lines
  std::uint32_t came;           ///< blocks that have read the words above
  std::uint32_t left;           ///< blocks that have ended
  std::uint32_t passed;         ///< blocks that have found all headers
  std::uint32_t halted;         ///< blocks that wait for the verdict on a header; 0 between calls
  std::uint32_t lost;  ///< number of the last call in which something of a rank was missing
  std::uint32_t masked[kMaxDomain];  ///< number of the call in which it was; 0: it is not
  std::uint64_t judged;              ///< generation of the last verdict
  /// Generation in which this rank's header was over its deadline, and what became of it:
  /// generation * 2, + 1: it is there.
  std::uint64_t suspected[kMaxDomain];
  std::uint64_t verdict[kMaxDomain];
  std::uint64_t rounds;             ///< of rejoining
  std::uint64_t waits[kMaxDomain];  ///< ns, of the running call, if asked for; 0 between calls
};

/// What one dispatch leaves for its combine; GPU memory of this rank, together with `slots` (i32
/// [R, capacity, topk]: row of the expert-major output, −1: none) and the weights that came with it
/// (f32, of the same shape).
struct LatencyHandle {
  std::uint64_t generation;
  std::int32_t tokens[kMaxDomain];  ///< of each source; 0: it is masked or refused
  std::uint32_t sent[kMaxDomain];   ///< not 0: the rank got rows and was not masked: sums come back
};

/// What the host sees of masks without asking the GPU, and tells running kernels; pinned.
struct LatencyAlarm {
  std::uint64_t masked;             ///< times that a rank was masked by a deadline
  std::uint32_t ranks[kMaxDomain];  ///< not 0: the rank is masked; written before `masked`
  std::uint32_t behind;             ///< a rank, + 1, that goes on without this one; 0: none
};

/// Why a rank is not waited for until the deadline: a word in this rank's memory that others write.
enum class Gone : std::uint32_t {
  no,
  without_us,  ///< it has masked this rank, and says so itself
  dead,        ///< its process has ended, or it left, says this rank's CPU
};

struct LatencyView {
  GroupView group{};
  Placement placement{};
  DeviceLatencyLayout layout{};
  std::int64_t capacity = 0;
  std::int64_t hidden = 0;
  int topk = 1;   ///< of the configuration
  int parts = 1;  ///< latency_parts(hidden)
  int few = 0;    ///< most tokens that cross as tagged words; at most kFewTokens, 0: none
  Dtype dtype = Dtype::bf16;
  LatencyWords* words = nullptr;
  /// Null: who misses a deadline ends the group. Else combines are per_rank.
  LatencyAlarm* alarm = nullptr;
  std::byte* peers[kMaxDomain]{};  ///< the registered memory of each rank
};

/// Whether a source of so many tokens of so wide elements has few (kFewTokens). Wider elements, and
/// more ranks, have no registers left for it.
FERRY_FN constexpr bool is_few_of(const LatencyView& view, int tokens, std::size_t element_bytes) {
  return element_bytes == 2 && tokens <= view.few && view.hidden % 16 == 0 &&
         view.group.ranks <= 32;
}

/// Which halves of a call a kernel does.
enum class Halves : std::uint32_t { both, send, receive };

enum class LatencyFormat : std::uint32_t { as_is, e4m3, e4m3_pow2, e4m3_packed };

struct LatencyDispatchParameters {
  LatencyView view{};
  Halves halves = Halves::both;
  LatencyFormat format = LatencyFormat::as_is;
  const std::byte* x = nullptr;    ///< [tokens, hidden], 16-byte aligned
  const void* topk_idx = nullptr;  ///< [tokens, topk]
  const float* weights = nullptr;  ///< f32 [tokens, topk]; null: they come with combine
  bool wide = true;                ///< ids are i64, else i32
  std::int64_t token_stride = 0;   ///< of the ids, in elements
  std::int64_t slot_stride = 1;
  std::int32_t* routes = nullptr;  ///< [tokens, topk]: a copy for the combine; null: none is made
  float* own_weights = nullptr;    ///< the same of the weights
  int tokens = 0;
  int topk = 1;
  LatencyHandle* handle = nullptr;
  std::int32_t* slots = nullptr;         ///< of the handle
  float* slot_weights = nullptr;         ///< of the handle; null: not kept
  std::byte* out = nullptr;              ///< [local experts, R · capacity, hidden]
  void* scales = nullptr;                ///< [local experts, C, R · capacity]: f32, or i32 packed
  std::int32_t* counts = nullptr;        ///< [local experts]
  std::int32_t* source_token = nullptr;  ///< [local experts, R · capacity]
  std::int64_t* ranges = nullptr;        ///< [local experts, R]
  std::uint64_t* waits = nullptr;        ///< [R]: the words' waits; null: nobody asks
  Failure* failure = nullptr;            ///< pinned, of this call: a rank's routes were refused
  int blocks = 0;
};
cudaError_t launch_latency_dispatch(const LatencyDispatchParameters& parameters,
                                    cudaStream_t stream);

/// `per_slot`: one row for each slot, summed by the owner in ascending k. `per_rank`: the rank of
/// the experts sums its slots in ascending k, rounds to the dtype, and the owner sums the ranks in
/// ascending order.
enum class CombinePath : std::uint32_t { per_slot, per_rank };

struct LatencyCombineParameters {
  LatencyView view{};
  Halves halves = Halves::both;
  CombinePath path = CombinePath::per_rank;
  const LatencyHandle* handle = nullptr;
  const std::int32_t* slots = nullptr;
  /// per_rank: the weights that came with dispatch; null: `weights` are pushed ahead of the rows.
  const float* slot_weights = nullptr;
  const std::byte* rows = nullptr;  ///< [local experts, R · capacity, hidden]
  const void* topk_idx = nullptr;   ///< the routes of the dispatch
  bool wide = true;
  const float* weights = nullptr;  ///< f32 [tokens, topk] of this rank's own tokens
  /// The sending half alone: a copy of the weights for the receiving one, dense; null: none.
  float* kept_weights = nullptr;
  int tokens = 0;
  int topk = 1;
  std::byte* out = nullptr;        ///< [tokens, hidden]
  std::uint64_t* waits = nullptr;  ///< as in dispatch
  int blocks = 0;
};
cudaError_t launch_latency_combine(const LatencyCombineParameters& parameters, cudaStream_t stream);

/// Where a peer's registered memory of the exchange is; pinned.
struct LatencyPlace {
  std::uint32_t segment = 0;
};
struct LatencyOpenParameters {
  GroupView group{};
  CallSignature call{};  ///< with the configuration
  StepStatus status = StepStatus::ok;
  std::uint32_t segment = 0;
  std::int64_t need_bytes = 0;     ///< no_room
  LatencyPlace* places = nullptr;  ///< [R], pinned
  Failure* failure = nullptr;
};
/// The making of an exchange, a call of the group: every rank learns where the others' memory is.
cudaError_t launch_latency_open(const LatencyOpenParameters& parameters, cudaStream_t stream);

/// Adds what the call before in the stream has waited for each source to `out` (i64 [R], ns), and
/// makes the words ready for the next.
cudaError_t launch_latency_waits(LatencyWords* words, std::int64_t* out, int ranks,
                                 cudaStream_t stream);

/// Sets or clears the mask of a rank; −1: of all. It counts for the calls after it.
cudaError_t launch_latency_mask(const LatencyView& view, int rank, bool masked,
                                cudaStream_t stream);

struct LatencyRejoinParameters {
  LatencyView view{};
  Failure* failure = nullptr;  ///< pinned: a rank did not come, or saw others
};
/// All ranks but those that are gone go on after the newest generation that any of them used,
/// without masks. No latency call of this rank may run.
cudaError_t launch_latency_rejoin(const LatencyRejoinParameters& parameters, cudaStream_t stream);

/// Blocks of these kernels that one SM holds: all of a call must run at once.
inline constexpr int kLatencyBlocksPerSm = 2;
inline constexpr int kLatencyThreads = 384;

/// Whether the kernels can serve this exchange.
bool fits_latency(const LatencyView& view);

/// Loads every kernel of latency mode on the current device.
cudaError_t load_latency_kernels();
cudaError_t load_latency_dispatch_kernels();
cudaError_t load_latency_open_kernels();
cudaError_t load_latency_mask_kernels();
cudaError_t load_latency_waits_kernels();

}  // namespace ferry::cuda
