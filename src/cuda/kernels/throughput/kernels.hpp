// The kernels of throughput mode as the engine launches them: parameters and launchers. Nothing
// here needs nvcc.
//
// Every call is one generation: entry swap (heads to all, heads from all), its work, and at its end
// LocalWords::generation = this generation. What a call needs the CPU for is none of it.
#pragma once
#include <cuda_runtime_api.h>

#include <cstdint>

#include "core/placement.hpp"
#include "cuda/kernels/base/group_view.hpp"
#include "ferry/dtype.hpp"

namespace ferry::cuda {

/// Destination j of a token is the j-th rank, ascending, that the token goes to; rank −1 ends the
/// list.
struct alignas(8) DeviceDestination {
  std::int32_t rank;
  std::int32_t row;  ///< ordinal among the rows that this rank sends there
};

/// A plan in device memory (one region of the arena; `layout` says where).
struct PlanLayout {
  std::size_t destinations = 0;  ///< DeviceDestination [T, L], L = min(K, R)
  std::size_t ids = 0;           ///< i32 [T, K]: routes, global ids, −1 = unused
  std::size_t rank_tokens = 0;   ///< i32 [R, R]: row s, column d: tokens that s sends to d
  std::size_t expert_slots = 0;  ///< i32 [R, local experts]: slots of s for my experts
  std::size_t peer_row = 0;      ///< i64 [R]: at rank d, my rows begin at this row
  std::size_t peer_rows = 0;     ///< i64 [R]: rows that arrive at rank d, from all
  std::size_t recv_offset = 0;   ///< i64 [R + 1]: rows of source s at my rank; the end = recv rows
  std::size_t placed = 0;        ///< [R] of 16 bytes: peer_row, peer_rows, once they are known
  std::size_t state = 0;         ///< u64: the generation that made the counts, 0 when it failed
  std::size_t bytes = 0;
};

FERRY_FN constexpr int destinations_of(int topk, int ranks) {
  return topk < ranks ? topk : ranks;
}

FERRY_FN constexpr PlanLayout make_plan_layout(std::int64_t tokens, int topk, int ranks,
                                               std::int64_t local_experts) {
  const auto t = static_cast<std::size_t>(tokens);
  const auto r = static_cast<std::size_t>(ranks);
  PlanLayout layout{};
  Carver carver{};
  layout.destinations = carver.take(t * static_cast<std::size_t>(destinations_of(topk, ranks)) * 8);
  layout.ids = carver.take(t * static_cast<std::size_t>(topk) * 4);
  layout.rank_tokens = carver.take(r * r * 4);
  layout.expert_slots = carver.take(r * static_cast<std::size_t>(local_experts) * 4);
  layout.peer_row = carver.take(r * 8);
  layout.peer_rows = carver.take(r * 8);
  layout.recv_offset = carver.take((r + 1) * 8);
  layout.placed = carver.take(r * 16);
  layout.state = carver.take(8);
  layout.bytes = carver.end;
  return layout;
}

struct PlanView {
  std::byte* data = nullptr;
  PlanLayout layout{};
  std::int64_t tokens = 0;
  int topk = 1;
  Placement placement{};
};

/// The plan as seen by a call that carries tokens [begin, end) alone: what lies by token is theirs,
/// all else that of the whole plan.
constexpr PlanView some_tokens(PlanView plan, int ranks, std::int64_t begin, std::int64_t end) {
  const auto first = static_cast<std::size_t>(begin);
  plan.layout.destinations += first * static_cast<std::size_t>(destinations_of(plan.topk, ranks)) *
                              sizeof(DeviceDestination);
  plan.layout.ids += first * static_cast<std::size_t>(plan.topk) * sizeof(std::int32_t);
  plan.tokens = end - begin;
  return plan;
}

/// What the CPU learns from a plan; pinned host memory, [1 + R*R + R*local experts] words after it.
/// `done` is stored last: the generation. Then rank_tokens, then expert_slots.
struct HostCounts {
  std::uint64_t done = 0;
  Failure failure{};  ///< reason none: the counts are there
};

struct PlanParameters {
  GroupView group{};
  const void* topk_idx = nullptr;  ///< [T, K]
  bool wide = true;                ///< i64, else i32
  std::int64_t token_stride = 0;   ///< in elements
  std::int64_t slot_stride = 1;
  PlanView plan{};
  CallSignature call{};
  HostCounts* counts = nullptr;
  std::int32_t* count_words = nullptr;  ///< rank_tokens [R,R], expert_slots [R, local experts]
  std::int32_t* scratch = nullptr;      ///< plan_scratch_bytes(), of the call alone
};
/// 0 when the slots of all experts are counted in shared memory.
std::size_t plan_scratch_bytes(std::int64_t experts);

/// Count, swap, place. One block.
cudaError_t launch_plan(const PlanParameters& parameters, cudaStream_t stream);

/// What travels beside the rows, on GPUs: what core says, and with routes the ids once more, as the
/// caller is given them.
struct WideSideLayout : SideLayout {
  std::size_t wide_ids = 0;  ///< i64 [rows, K]
};
FERRY_FN constexpr WideSideLayout make_wide_side_layout(std::int64_t rows, int topk, bool routes,
                                                        bool weights) {
  WideSideLayout layout{make_side_layout(rows, topk, routes, weights)};
  Carver carver{layout.bytes};
  const std::int64_t slots = routes ? rows * topk : 0;
  layout.wide_ids = carver.take(static_cast<std::size_t>(slots) * sizeof(std::int64_t));
  layout.bytes = carver.end;
  return layout;
}

struct DispatchParameters {
  GroupView group{};
  PlanView plan{};
  CallSignature call{};
  const std::byte* x = nullptr;  ///< [T, row_bytes] dense, 16-byte aligned
  std::int64_t row_bytes = 0;    ///< as it arrives; a multiple of 16
  /// Rows are quantised on the way: `x` is [T, row_bytes] elements of x_dtype (f32, bf16 or f16),
  /// `scales` is null, `scale_columns` says how many are made.
  bool quantize = false;
  bool round_scale = false;  ///< then: scales are powers of two
  Dtype x_dtype = Dtype::bf16;
  const float* scales = nullptr;  ///< [T, C], any strides; null: none
  std::int64_t scale_columns = 0;
  std::int64_t scale_token_stride = 0;
  std::int64_t scale_column_stride = 1;
  bool has_weights = false;        ///< the same on all ranks
  const float* weights = nullptr;  ///< [T, K] dense; an empty one may lie nowhere
  bool carries_routes = false;     ///< write source_token and local ids into the side region
  /// [T]: what source_token says of each token; null: its number.
  const std::int32_t* token_names = nullptr;
  /// Not null: becomes its generation when this dispatch has brought the routes, 0 when it has not.
  /// Calls that use them take it for the plan's state.
  std::uint64_t* came = nullptr;
  /// The call before is the plan's, on this stream, and nobody has used the granted memory since it
  /// was made: the head may be posted while the plan still runs.
  bool early = false;
  /// Early, and the plan's kernel is directly before this one in the stream: what the plan says is
  /// waited for word by word, and the first rows are brought meanwhile.
  bool glued = false;
  /// Of a graph, which grants the same memory in each replay: it waits until no lost rank can write
  /// there any more.
  bool fixed = false;
  // The grant: where peers write. capacity rows; layouts by make_receive_layout and
  // make_wide_side_layout of this capacity. Routes and weights of rows past the last: -1 and 0.
  StepStatus status = StepStatus::ok;  ///< no_room: nothing is granted
  std::int64_t need_bytes = 0;         ///< then
  std::uint32_t segment = 0;
  std::uint64_t offset = 0;
  std::uint32_t side_segment = 0;
  std::uint64_t side_offset = 0;
  std::int64_t capacity = 0;
  const SecondGrant* second = nullptr;  ///< not null: capacity is a guess; else the CPU stores here
  /// Expert-major output of a worst case: its rows, every expert's padded to `out_alignment`, must
  /// fit, too. 0: they do.
  std::int64_t out_capacity = 0;
  std::int64_t out_alignment = 1;
  /// Peers learn on the way which of so many parts of this rank's tokens have come, at most
  /// kProgressParts; 0: at the end only.
  int parts = 0;
  bool followed = false;       ///< launch_fan_out_beside comes directly after it in the stream
  Failure* failure = nullptr;  ///< pinned, of this call: reasons that are not fatal
  int num_sms = 0;             ///< blocks, one for each SM
};

/// Entry swap, push of every row to its final place, delivery. Ends when all rows are here.
cudaError_t launch_dispatch(const DispatchParameters& parameters, cudaStream_t stream);

/// The routes that an earlier dispatch brought, once more with more rows. Local work only.
struct RoutesParameters {
  GroupView group{};
  PlanView plan{};                       ///< its state says whether the routes have come
  std::int64_t brought = 0;              ///< rows of the dispatch that brought them
  std::int64_t capacity = 0;             ///< rows of the outputs; rows past the last: -1
  const std::int32_t* ids = nullptr;     ///< [brought, K] local ids
  const std::int32_t* tokens = nullptr;  ///< [brought]
  std::int64_t* topk_idx = nullptr;      ///< i64 [capacity, K]
  std::int32_t* source_token = nullptr;  ///< i32 [capacity]
  int num_sms = 0;
};
cudaError_t launch_routes(const RoutesParameters& parameters, cudaStream_t stream);

/// Expert-major output from the rank-major rows that launch_dispatch brought. Local work only.
struct FanOutParameters {
  GroupView group{};
  PlanView plan{};
  const std::int32_t* ids = nullptr;  ///< [capacity, K] local ids of received rows
  const std::byte* rows = nullptr;    ///< [capacity, row_bytes] rank-major
  const float* scales = nullptr;      ///< [capacity, C] or null
  std::int64_t row_bytes = 0;
  std::int64_t scale_columns = 0;
  std::int64_t capacity = 0;  ///< of the rank-major rows
  std::int64_t alignment = 1;
  std::int64_t out_capacity = 0;           ///< rows of `out`
  std::byte* out = nullptr;                ///< [out_capacity, row_bytes]; padding and tail are zero
  float* out_scales = nullptr;             ///< [out_capacity, C]
  std::int64_t* slot_rows = nullptr;       ///< [capacity, K]: row of `out` of each slot, −1 = none
  std::int64_t* expert_offsets = nullptr;  ///< [local experts + 1]
  std::int32_t* scratch = nullptr;         ///< fan_out_scratch_bytes()
  /// Not null: becomes 1 when slot_rows and expert_offsets have been made, 0 when not.
  std::uint64_t* made = nullptr;
  bool may_be_made = false;    ///< beside its dispatch: `made` is an earlier fan-out's; look there
  bool awaits_routes = false;  ///< beside its dispatch, which brings them
  bool after_dispatch = true;  ///< only if the call before it moved its rows
  int num_sms = 0;
};
std::size_t fan_out_scratch_bytes(std::int64_t capacity, std::int64_t local_experts);
cudaError_t launch_fan_out(const FanOutParameters& parameters, cudaStream_t stream);

/// The same directly after a followed dispatch in the stream: runs beside it, copies the rows while
/// they come, and ends after it. Needs the paths of sm_90.
cudaError_t launch_fan_out_beside(const FanOutParameters& parameters, cudaStream_t stream);

/// Weights of slots, as expert-major rows have them, or the other way round. Local work only.
struct WeightsParameters {
  const std::int64_t* slot_rows = nullptr;  ///< [slots]: row of each, −1 = none
  std::int64_t slots = 0;
  std::int64_t rows = 0;  ///< a slot's row that is not below it is none
  const float* from = nullptr;
  float* to = nullptr;  ///< 0 where there is none
  int num_sms = 0;
};
/// from: [slots], to: [rows].
cudaError_t launch_row_weights(const WeightsParameters& parameters, cudaStream_t stream);
/// from: [rows], to: [slots].
cudaError_t launch_slot_weights(const WeightsParameters& parameters, cudaStream_t stream);

/// Each received row's slots summed, before a combine from expert-major rows: `acc = fma(w, x,
/// acc)` (or acc + x without weights) from +0 in ascending k, one rounding. Local work only. All
/// sources' rows are made side by side, each source's in their order; peers see how far it is, so
/// that the combine may run at the same time.
struct SumSlotsParameters {
  GroupView group{};
  PlanView plan{};
  /// [capacity, K]; null: the rows are rank-major already, each is "the sum" of itself.
  const std::int64_t* slot_rows = nullptr;
  const std::byte* rows = nullptr;  ///< [M, H]
  std::int64_t input_rows = 0;      ///< M: a slot's row that is not below it is not read
  const float* weights = nullptr;   ///< f32 [capacity, K]; null: unweighted
  Dtype dtype = Dtype::bf16;        ///< f32, bf16, f16
  std::int64_t columns = 0;         ///< H
  std::int64_t capacity = 0;
  std::byte* out = nullptr;  ///< [capacity, H]: the first recv rows are written
  int num_sms = 0;
};
cudaError_t launch_sum_slots(const SumSlotsParameters& parameters, cudaStream_t stream);

struct CombineParameters {
  GroupView group{};
  PlanView plan{};
  CallSignature call{};
  // Where this rank's rows are: registered memory, rank-major, `rows` of them.
  std::uint32_t segment = 0;
  std::uint64_t offset = 0;
  std::uint32_t side_segment = 0;  ///< weights f32 [rows, K], registered too
  std::uint64_t side_offset = 0;
  std::int64_t rows = 0;
  StepStatus status = StepStatus::ok;
  std::int64_t need_bytes = 0;
  bool has_weights = false;
  Dtype dtype = Dtype::bf16;         ///< f32, bf16, f16
  std::int64_t columns = 0;          ///< H; row bytes are a multiple of 16
  const std::byte* bias0 = nullptr;  ///< [T, H] or null
  const std::byte* bias1 = nullptr;
  /// launch_sum_slots has come just before it in the stream, with this rank's rows as its `out`:
  /// peers read them when it says that they are summed. Each rank says for itself.
  bool after_sums = false;
  std::byte* out = nullptr;      ///< [T, H], 16-byte aligned
  float* out_weights = nullptr;  ///< f32 [T, K] when has_weights, aligned alike
  Failure* failure = nullptr;
  int num_sms = 0;
};

/// Entry swap, the owner pulls the rows of each of its tokens in ascending rank order, sums in fp32
/// from +0, adds bias0 then bias1, rounds once; then tells the owners of the rows. Ends when all
/// peers have read this rank's rows.
cudaError_t launch_combine(const CombineParameters& parameters, cudaStream_t stream);

}  // namespace ferry::cuda
