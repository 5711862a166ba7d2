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
// Tags are the low 32 bits of the generation. A receiver could take an old tag for a new one only
// if it was written exactly 2^32 generations ago and never since (0 where nothing was ever
// written), and only if it polls in that one generation before the row that it was told of has
// arrived.
#pragma once
#include <cuda_runtime_api.h>

#include <cstdint>

#include "cuda/kernels/latency/launch_sizes.hpp"
#include "cuda/kernels/latency/view.hpp"

namespace ferry::cuda {

/// Which halves of a call a kernel does.
enum class Halves : std::uint32_t { both, send, receive };

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
  std::uint64_t* wait_ns = nullptr;      ///< [R]: the words' waits; null: nobody asks
  Failure* failure = nullptr;            ///< pinned, of this call: a rank's routes were refused
  int blocks = 0;
  /// Rank-major: out [R, capacity, hidden], scales [R, C, capacity], counts [R], source_token and
  /// slots [R, capacity]; no ranges. slot_weights, if weights come, are those of each row.
  bool rank_major = false;
  std::int32_t* topk_out = nullptr;  ///< then: local experts of each row, [R, capacity, topk]
  float* ones = nullptr;             ///< then: of the handle, the slot weights of the combine
};
/// What the header of a dispatch says that all ranks must have given alike.
FERRY_FN constexpr std::uint32_t agreed_format(const LatencyDispatchParameters& p) {
  return static_cast<std::uint32_t>(p.format) | (p.slot_weights != nullptr ? kWithWeights : 0u);
}

cudaError_t launch_latency_dispatch(const LatencyDispatchParameters& parameters,
                                    cudaStream_t stream);

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
  std::byte* out = nullptr;          ///< [tokens, hidden]
  std::uint64_t* wait_ns = nullptr;  ///< as in dispatch
  int blocks = 0;
  CombineFormat format = CombineFormat::as_is;
  Failure* failure = nullptr;  ///< pinned, of this call: the result is stale
};
cudaError_t launch_latency_combine(const LatencyCombineParameters& parameters, cudaStream_t stream);

/// What a rank says of an exchange that is made: the segment of its registered memory, and whether
/// LL128 rows come through from it to all ranks.
inline constexpr std::uint32_t kCarriesLL128 = 1u << 31;
struct LatencyPlace {
  std::uint32_t word = 0;
  std::uint32_t segment() const { return word & ~kCarriesLL128; }
  bool carries_ll128() const { return (word & kCarriesLL128) != 0; }
};
struct LatencyOpenParameters {
  GroupView group{};
  CallSignature call{};  ///< with the configuration
  StepStatus status = StepStatus::ok;
  LatencyPlace place{};            ///< this rank's
  std::int64_t need_bytes = 0;     ///< no_room
  LatencyPlace* places = nullptr;  ///< [R], pinned; of holes nothing is written
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

/// Before the group's next epoch: the newest generation that this rank knows of, to pinned memory.
/// No kernel of the group runs here.
cudaError_t launch_latency_newest(const LatencyView& view, std::uint64_t* newest,
                                  cudaStream_t stream);
struct LatencyEpochParameters {
  LatencyView view{};
  std::uint64_t generation = 0;                  ///< above all that any rank of the epoch knows of
  std::uint32_t epoch = 0;                       ///< its number, or the low bits of that
  std::uint32_t lost[(kMaxDomain + 31) / 32]{};  ///< a bit for each rank
};
/// As a rejoin of the ranks that are not lost, of which nobody waits for another: they go on after
/// `generation`. No kernel runs at any of them, or only those of the same epoch.
cudaError_t launch_latency_epoch(const LatencyEpochParameters& parameters, cudaStream_t stream);

/// Whether the kernels can serve this exchange.
bool fits_latency(const LatencyView& view);

// One for each file of kernels, called by load_latency_kernels (base/load.hpp).
cudaError_t load_latency_dispatch_kernels();
cudaError_t load_latency_open_kernels();
cudaError_t load_latency_mask_kernels();
cudaError_t load_latency_rejoin_kernels();
cudaError_t load_latency_waits_kernels();

}  // namespace ferry::cuda
