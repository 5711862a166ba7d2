// The fan-out of a dispatch to expert-major order: beside it while the rows come, or after it.
#include <algorithm>

#include "cuda/kernels/base/load.hpp"
#include "cuda/throughput/dispatch_call.hpp"

namespace ferry::cuda {
namespace {

/// Of the current device.
bool has_bulk_copies() {
  KernelLimits limits;
  return kernel_limits(limits) == cudaSuccess && limits.bulk_copies;
}

/// SMs that push rows, of those of a call, when its fan-out is beside it: they nearly fill the
/// links of an H200. More of them are slower together with a fan-out (docs/experiments).
constexpr int kMostPushers = 10;
/// SMs for a fan-out beside its dispatch: what keeps pace with the rows that four GPUs push. Where
/// fewer are left it takes these; with less than the least, one after the other is faster.
constexpr int kLeastFollowerSms = 48, kMostFollowerSms = 80, kFollowersOfPusher = 8;

int follower_sms(const DispatchCall& call, int pushers) {
  const int wanted = std::clamp(kFollowersOfPusher * pushers, kLeastFollowerSms, kMostFollowerSms);
  return std::min(call.engine.local_sms() - pushers, wanted + call.num_sms - pushers);
}

/// Whether the fan-out copies the rows while they come. Ranks that share a GPU take turns.
bool runs_beside(const DispatchCall& call, std::int64_t rows) {
  constexpr std::size_t kLeast = std::size_t{32} << 20;
  const CudaEngine& engine = call.engine;
  return !call.plan->scattered && !engine.shares_gpu() && has_bulk_copies() &&
         engine.local_sms() >= call.num_sms + kLeastFollowerSms &&
         static_cast<std::size_t>(rows) * call.row.bytes() >= kLeast;
}

/// Takes the slots of an earlier dispatch, if they lie alike: nothing has to be placed before rows
/// can be copied as they come.
bool take_known_slots(const DispatchCall& call, std::int64_t rows, FanOut& fan_out) {
  if (call.carries_routes || !fan_out.beside) return false;
  for (const auto& known : call.plan->slot_rows) {
    if (known.maker->refused() || known.made == nullptr) continue;
    if (known.alignment != call.options.alignment || known.rows.rows() != rows) continue;
    call.launch.use(known.rows.data(), known.rows.owner());
    call.launch.use(known.offsets.data(), known.offsets.owner());
    fan_out.slot_rows = known.rows;
    fan_out.expert_offsets = known.offsets;
    fan_out.made = known.made;
    fan_out.may_be_made = true;
    return true;
  }
  return false;
}

}  // namespace

int pushing_sms(const DispatchCall& call, const FanOut& fan_out) {
  return fan_out.beside ? std::min(call.num_sms, kMostPushers) : call.num_sms;
}

FanOut take_fan_out(const DispatchCall& call, std::int64_t rows) {
  CudaEngine& engine = call.engine;
  const std::int64_t local = engine.placement().local_experts(engine.rank());
  FanOut fan_out;
  fan_out.beside = runs_beside(call, rows);
  fan_out.scratch = call.launch.temporary(
      engine.gpu().take_local(fan_out_scratch_bytes(rows, local), call.launch.user()));
  if (take_known_slots(call, rows, fan_out)) return fan_out;
  fan_out.slot_rows = engine.local_tensor(call.launch, {rows, call.plan->topk}, Dtype::i64);
  const Tensor offsets = engine.local_tensor(call.launch, {local + 2}, Dtype::i64);
  fan_out.made = reinterpret_cast<std::uint64_t*>(offsets.as<std::int64_t>() + local + 1);
  fan_out.expert_offsets = {TensorView(offsets.data(), Dtype::i64, {local + 1}, engine.device()),
                            offsets.owner()};
  return fan_out;
}

void launch_fan_out(const DispatchCall& call, const DispatchBuffers& buffers) {
  const FanOut& fan_out = buffers.fan_out;
  const auto from = call.receive_layout(buffers.rows.rank);
  const auto to = call.receive_layout(buffers.rows.out);
  FanOutParameters parameters;
  parameters.group = call.engine.view();
  parameters.plan = call.plan->view;
  parameters.ids = buffers.routes.ids;
  parameters.rows = buffers.rank.data() + from.rows;
  parameters.row_bytes = static_cast<std::int64_t>(call.row.bytes());
  parameters.scale_columns = call.row.scale_columns;
  parameters.capacity = buffers.rows.rank;
  parameters.alignment = call.options.alignment;
  parameters.out_capacity = buffers.rows.out;
  parameters.out = buffers.expert.data() + to.rows;
  if (call.row.scale_columns > 0) {
    parameters.scales = reinterpret_cast<const float*>(buffers.rank.data() + from.scales);
    parameters.out_scales = reinterpret_cast<float*>(buffers.expert.data() + to.scales);
  }
  parameters.slot_rows = fan_out.slot_rows.as<std::int64_t>();
  parameters.expert_offsets = fan_out.expert_offsets.as<std::int64_t>();
  parameters.scratch = reinterpret_cast<std::int32_t*>(fan_out.scratch);
  parameters.made = fan_out.made;
  parameters.may_be_made = fan_out.may_be_made;
  parameters.awaits_routes = call.carries_routes;
  parameters.num_sms =
      fan_out.beside ? follower_sms(call, pushing_sms(call, fan_out)) : call.engine.local_sms();
  const cudaStream_t stream = call.launch.stream();
  if (fan_out.beside) {
    call.launch.run(launch_fan_out_beside(parameters, stream), "launch_fan_out_beside");
  } else {
    call.launch.run(launch_fan_out(parameters, stream), "launch_fan_out");
  }
}

}  // namespace ferry::cuda
