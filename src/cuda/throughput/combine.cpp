// Combine, phase by phase: rows are put where peers can read them; the owners' GPUs pull and sum
// them.
#include <algorithm>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "core/check.hpp"
#include "core/exchange_signature.hpp"
#include "cuda/runtime/event.hpp"
#include "cuda/throughput/engine.hpp"
#include "cuda/throughput/exchange.hpp"
#include "cuda/throughput/plan.hpp"
#include "engine/regions.hpp"

namespace ferry::cuda {
namespace {

/// What was asked, and what follows from that alone.
struct CombineCall {
  CudaEngine& engine;
  Launch& launch;
  const ConstTensorView rows;
  const std::shared_ptr<CudaPlan> plan;
  const CombineOptions& options;
  const SplitCombine* split = nullptr;  ///< or one call
  const int num_sms = engine.tuned_sms(launch, options.num_sms, plan->tokens, split != nullptr,
                                       {.call = CallKind::combine,
                                        .dtype = rows.dtype,
                                        .order = options.order,
                                        .hidden = rows.columns()});

  bool expert_major() const { return options.order == RowOrder::expert_major; }
  bool has_weights() const { return options.topk_weights.has_value(); }
  PlanView view() const { return expert_major() ? plan->routed() : plan->view; }
};

/// The memory of a combine.
struct CombineBuffers {
  bool room = false;  ///< else there is none, which every rank must learn
  std::int64_t need_bytes = 0;
  std::int64_t brought = 0;   ///< rank-major rows that peers may read
  fabric::Address at{};       ///< of these
  fabric::Address side_at{};  ///< of their weights
  /// The kernel beside the combine: it sums expert-major rows, or copies ordinary ones. num_sms 0:
  /// not needed.
  SumSlotsParameters sum{};
  Tensor slots{};  ///< in use until the call is launched
  const std::byte* bias0 = nullptr;
  const std::byte* bias1 = nullptr;
  std::byte* out = nullptr;  ///< aligned
  int num_sms = 1;
  Combined result{};
};

bool is_aligned(const void* data) {
  return reinterpret_cast<std::uintptr_t>(data) % 16 == 0;
}

/// Rows that peers may read: known from the counts, else those of a worst case.
std::int64_t checked_rows(const CombineCall& call) {
  CudaPlan& plan = *call.plan;
  const CombineOptions& options = call.options;
  const std::int64_t rows = call.rows.rows();
  const auto dispatched = plan.layouts.all();
  const auto of_worst_case = [&](const RowLayout& used) {
    return used.max_recv_rows > 0 && used.order == options.order &&
           used.alignment == options.alignment && used.max_recv_rows == rows;
  };
  const bool like_weights =
      !call.has_weights() || weights_of_rows(options) || options.topk_weights->shape[0] == rows;
  const bool worst_case = std::any_of(dispatched.begin(), dispatched.end(), of_worst_case);
  if (!plan.counts_known() && !(worst_case && like_weights)) {
    if (plan.captured || call.launch.capture().active) {
      refuse(kCombine, worst_case ? "topk_weights" : "rows",
             std::to_string(worst_case ? options.topk_weights->shape[0] : rows) + " rows",
             "the max_recv_rows of a dispatch of this plan, whose counts the CPU does not know "
             "while its stream is captured");
    }
    plan.ready.wait(kUntilItEnds, call.engine.config().on_wait);
  }
  if (!plan.counts_known()) return rows;  // of expert-major rows at most as many
  check_combine_rows(plan.exchange, dispatched, rows, {options.order, options.alignment});
  if (call.has_weights()) {
    check_combine_weights(plan.exchange, dispatched, options.topk_weights->shape, plan.topk);
  }
  return plan.exchange.recv_rows();
}

Held copied(const CombineCall& call, const void* from, std::size_t bytes, Held to) {
  if (bytes > 0) {
    check(cudaMemcpyAsync(to.data(), from, bytes, cudaMemcpyDeviceToDevice, call.launch.stream()),
          "cudaMemcpyAsync");
  }
  call.launch.temporary(to);
  return to;
}

const std::byte* aligned(const CombineCall& call, const std::optional<ConstTensorView>& tensor) {
  if (!tensor) return nullptr;
  const auto* data = static_cast<const std::byte*>(tensor->data);
  const std::size_t bytes = tensor->bytes();
  if (is_aligned(data) || bytes == 0) return data;
  return copied(call, data, bytes, call.engine.gpu().take_local(bytes, call.launch.user())).data();
}

/// i64 [brought, K]: made by a dispatch of this alignment, or now.
Tensor slot_rows(const CombineCall& call, std::int64_t brought) {
  CudaEngine& engine = call.engine;
  Launch& launch = call.launch;
  CudaPlan& plan = *call.plan;
  for (const auto& known : plan.slot_rows) {
    if (known.maker->refused()) continue;
    if (known.alignment == call.options.alignment && known.rows.rows() >= brought) {
      if (!plan.captured) launch.record()->needs.push_back(known.maker);
      launch.use(known.rows.data(), known.rows.owner());
      return known.rows;
    }
  }
  const std::int64_t local = engine.placement().local_experts(engine.rank());
  const Tensor rows = engine.local_tensor(launch, {brought, plan.topk}, Dtype::i64);
  const Tensor offsets = engine.local_tensor(launch, {local + 1}, Dtype::i64);
  FanOutParameters parameters;
  parameters.group = engine.view();
  parameters.plan = plan.routed();
  parameters.after_dispatch = false;
  parameters.ids = plan.gpu_routes.ids;
  // Only the places are wanted: the rows are as short as can be, and nobody reads them.
  constexpr std::size_t kLeastRow = 16;
  const auto scratch = [&](std::int64_t count) {
    return launch.temporary(
        engine.gpu().take_local(static_cast<std::size_t>(count) * kLeastRow, launch.user()));
  };
  parameters.row_bytes = kLeastRow;
  parameters.rows = scratch(brought);
  parameters.out = scratch(call.rows.rows());
  parameters.capacity = brought;
  parameters.alignment = call.options.alignment;
  parameters.out_capacity = call.rows.rows();
  parameters.slot_rows = rows.as<std::int64_t>();
  parameters.expert_offsets = offsets.as<std::int64_t>();
  parameters.scratch = reinterpret_cast<std::int32_t*>(launch.temporary(
      engine.gpu().take_local(fan_out_scratch_bytes(brought, local), launch.user())));
  parameters.num_sms = engine.local_sms();
  launch.run(launch_fan_out(parameters, launch.stream()), "launch_fan_out");
  return rows;
}

/// All that the sums need, or the copies of ordinary rows, before the call is entered. Sums and
/// combine use this rank's SMs side by side.
void prepare_sums(const CombineCall& call, std::byte* out, CombineBuffers& to) {
  SumSlotsParameters& sum = to.sum;
  sum.group = call.engine.view();
  sum.plan = call.view();
  if (call.expert_major()) {
    to.slots = slot_rows(call, to.brought);
    sum.slot_rows = to.slots.as<std::int64_t>();
  }
  sum.rows = aligned(call, call.rows);
  sum.input_rows = call.rows.rows();
  if (call.options.apply_weights && !weights_of_rows(call.options)) {
    sum.weights = static_cast<const float*>(call.options.topk_weights->data);
  }
  sum.dtype = call.rows.dtype;
  sum.columns = call.rows.columns();
  sum.capacity = to.brought;
  sum.out = out;
  constexpr int kEnough = 48;  // more only crowd out those who read the rows
  const int share = call.engine.local_sms(), least = std::clamp(share / 4, 1, kEnough);
  sum.num_sms = std::clamp(share - call.num_sms, least, kEnough);
  to.num_sms = std::min(call.num_sms, std::max(1, share - sum.num_sms));
}

/// Weights of expert-major rows as those of slots.
void place_slot_weights(const CombineCall& call, float* to, CombineBuffers& buffers) {
  WeightsParameters parameters;
  parameters.slot_rows = buffers.slots.as<std::int64_t>();
  parameters.slots = buffers.brought * call.plan->topk;
  parameters.rows = call.rows.rows();
  parameters.from = static_cast<const float*>(call.options.topk_weights->data);
  parameters.to = to;
  parameters.num_sms = call.engine.local_sms();
  call.launch.run(launch_slot_weights(parameters, call.launch.stream()), "launch_slot_weights");
  if (call.options.apply_weights) buffers.sum.weights = to;
}

/// False: there is no registered memory for them.
bool place_rows(const CombineCall& call, CombineBuffers& to) {
  const auto brought = static_cast<std::size_t>(to.brought);
  const std::size_t row_bytes = brought * call.rows.row_bytes();
  const std::size_t weight_bytes =
      call.has_weights() ? brought * static_cast<std::size_t>(call.plan->topk) * sizeof(float) : 0;
  auto& arena = call.engine.gpu().registered();
  const auto in_place = [&](const void* data, std::size_t bytes) {
    auto found = is_aligned(data) ? arena.find(data, bytes) : std::nullopt;
    if (found) call.launch.use(data, {});  // the caller holds it
    return found;
  };
  const void* given = call.has_weights() ? call.options.topk_weights->data : nullptr;
  const auto rows = call.expert_major() ? std::nullopt : in_place(call.rows.data, row_bytes);
  const bool of_rows = weights_of_rows(call.options);
  const auto weights =
      call.has_weights() && !of_rows ? in_place(given, weight_bytes) : std::nullopt;
  std::vector<std::size_t> sizes;
  if (!rows) sizes.push_back(row_bytes);
  if (!weights) sizes.push_back(weight_bytes);
  to.need_bytes = static_cast<std::int64_t>(engine::Regions::total(sizes));
  auto taken = call.engine.take_registered(call.launch, sizes);
  if (!taken) return false;
  if (rows) {
    to.at = *rows;
  } else if (call.expert_major() || is_aligned(call.rows.data)) {
    to.at = taken->front().region.address;
    call.launch.temporary(taken->front());
    prepare_sums(call, taken->front().data(), to);
  } else {
    to.at = copied(call, call.rows.data, row_bytes, taken->front()).region.address;
  }
  if (of_rows) {
    to.side_at = taken->back().region.address;
    call.launch.temporary(taken->back());
    place_slot_weights(call, reinterpret_cast<float*>(taken->back().data()), to);
  } else {
    to.side_at =
        weights ? *weights : copied(call, given, weight_bytes, taken->back()).region.address;
  }
  return true;
}

/// All memory of the call, before it is entered.
CombineBuffers reserve(const CombineCall& call, std::int64_t brought) {
  CudaEngine& engine = call.engine;
  Launch& launch = call.launch;
  const std::int64_t tokens = call.plan->tokens;
  CombineBuffers buffers;
  buffers.brought = brought;
  buffers.num_sms = call.num_sms;
  Combined& result = buffers.result;
  try {
    if (call.options.out) {
      result.x = {*call.options.out, std::shared_ptr<void>(call.options.out->data, [](void*) {})};
    } else {
      result.x = engine.local_tensor(launch, {tokens, call.rows.columns()}, call.rows.dtype);
    }
    if (call.has_weights()) {
      result.topk_weights = engine.local_tensor(launch, {tokens, call.plan->topk}, Dtype::f32);
    }
    buffers.bias0 = aligned(call, call.options.bias0);
    buffers.bias1 = aligned(call, call.options.bias1);
    buffers.out = static_cast<std::byte*>(result.x.data());
    const std::size_t bytes = result.x.view().bytes();
    if (!is_aligned(buffers.out) && bytes > 0) {
      buffers.out = launch.temporary(engine.gpu().take_local(bytes, launch.user()));
    }
    buffers.room = place_rows(call, buffers);
  } catch (const Error& error) {
    if (error.kind() != ErrorKind::exhausted) throw;
  }
  return buffers;
}

/// Tokens [begin, end). `sums`: first launches the kernel that makes the sums of the slots; without
/// it they are made already, or none are needed.
void pull_tokens(const CombineCall& call, const CombineBuffers& buffers, bool sums,
                 std::int64_t begin, std::int64_t end) {
  const auto at = [&](auto* data, std::int64_t each) {
    return data == nullptr ? data : data + begin * each;
  };
  const ConstTensorView& rows = call.rows;
  const auto row_bytes = static_cast<std::int64_t>(rows.row_bytes());
  const bool room = buffers.room;
  CombineParameters parameters;
  parameters.group = call.engine.view();
  parameters.plan = some_tokens(call.view(), call.engine.size(), begin, end);
  parameters.call = combine_signature(rows, call.plan->topk, call.options, call.plan->number);
  parameters.segment = buffers.at.segment;
  parameters.offset = buffers.at.offset;
  parameters.side_segment = buffers.side_at.segment;
  parameters.side_offset = buffers.side_at.offset;
  parameters.rows = buffers.brought;
  parameters.status = room ? StepStatus::ok : StepStatus::no_room;
  parameters.need_bytes = buffers.need_bytes;
  parameters.has_weights = call.has_weights();
  parameters.dtype = rows.dtype;
  parameters.columns = rows.columns();
  parameters.bias0 = at(buffers.bias0, row_bytes);
  parameters.bias1 = at(buffers.bias1, row_bytes);
  parameters.out = room ? at(buffers.out, row_bytes) : nullptr;
  parameters.out_weights = room && call.has_weights()
                               ? at(buffers.result.topk_weights.as<float>(), call.plan->topk)
                               : nullptr;
  parameters.failure = call.launch.record()->failure;
  parameters.num_sms = buffers.num_sms;
  parameters.after_sums = sums && !call.plan->scattered;  // else it begins when they have ended
  call.launch.enter(parameters.call);
  call.launch.begin_timing();
  const cudaStream_t stream = call.launch.stream();
  if (sums) call.launch.run(launch_sum_slots(buffers.sum, stream), "launch_sum_slots");
  call.launch.run(launch_combine(parameters, stream), "launch_combine");
}

void pull(const CombineCall& call, const CombineBuffers& buffers) {
  const std::int64_t tokens = call.plan->tokens;
  const bool sums = buffers.room && buffers.sum.num_sms > 0;
  if (call.split == nullptr) {
    pull_tokens(call, buffers, sums, 0, tokens);
  } else {
    pull_tokens(call, buffers, sums, call.split->last, tokens);
    if (buffers.room) call.split->between(buffers.result);
    pull_tokens(call, buffers, false, 0, call.split->last);
  }
  const TensorView out = buffers.result.x.view();
  if (buffers.room && buffers.out != out.data) {
    check(cudaMemcpyAsync(out.data, buffers.out, out.bytes(), cudaMemcpyDeviceToDevice,
                          call.launch.stream()),
          "cudaMemcpyAsync");
  }
}

Combined run(const CombineCall& call) {
  Launch& launch = call.launch;
  const CudaPlan& plan = *call.plan;
  const std::int64_t brought = checked_rows(call);
  launch.outlives(plan.slot);
  launch.use(plan.memory.data(), plan.memory.owner);
  launch.use(plan.gpu_routes.side.data(), plan.gpu_routes.side.owner);
  if (call.expert_major() && !plan.captured && plan.gpu_routes.carrier) {
    launch.record()->needs.push_back(plan.gpu_routes.carrier);
  }
  CombineBuffers buffers = reserve(call, brought);
  pull(call, buffers);
  const bool blocking = launch.blocking();
  Combined& result = buffers.result;
  result.event = launch.finish();
  if (blocking || !buffers.room) {
    call.engine.finish(kCombine, result.event);
    result.event = {};
  }
  return result;
}

}  // namespace

Combined combine(CudaEngine& engine, const ConstTensorView& rows, const Plan& plan,
                 const CombineOptions& options) {
  engine.check_usable(kCombine);
  auto state = plan_of(engine, plan, kCombine);
  check_combine(rows, state->tokens, state->topk, options, engine.device());
  Launch launch(engine, kCombine, options.stream);
  if (options.order == RowOrder::expert_major && !state->routes_sent.load()) {
    refuse(kCombine, "plan", "a plan that no dispatch has used yet",
           "a dispatch first: it brings the routes that expert-major rows need");
  }
  return run({engine, launch, rows, std::move(state), options});
}

Combined combine_split(CudaEngine& engine, const ConstTensorView& rows, const Plan& plan,
                       const CombineOptions& options, const SplitCombine& split) {
  engine.check_usable(kCombine);
  Launch launch(engine, kCombine, options.stream);
  return run({engine, launch, rows, plan_of(engine, plan, kCombine), options, &split});
}

}  // namespace ferry::cuda
