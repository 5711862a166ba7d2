// The calls of latency mode: what is checked, launched and handed out.
#include <string>
#include <utility>

#include "core/check.hpp"
#include "core/claim.hpp"
#include "core/number/quantize.hpp"
#include "cuda/event.hpp"
#include "cuda/latency_engine.hpp"

namespace ferry::cuda {

namespace {

[[noreturn]] void refuse_second_receive(const char* call) {
  refuse(call, "hook", "a second receive(), or one without hook = true", "one receive()");
}

LatencyFormat format_of(const LatencyDispatchOptions& options) {
  if (options.format == WireFormat::as_is) return LatencyFormat::as_is;
  switch (options.scale_format) {
    case ScaleFormat::f32_pow2: return LatencyFormat::e4m3_pow2;
    case ScaleFormat::ue8m0_packed: return LatencyFormat::e4m3_packed;
    case ScaleFormat::f32: break;
  }
  return LatencyFormat::e4m3;
}

/// The second half of a dispatch. One that could not begin may be called again.
struct ReceiveRows final : LatencyState {
  std::shared_ptr<CudaLatency> engine{};
  std::shared_ptr<LatencyRound> round{};
  std::optional<Stream> stream{};
  std::atomic<bool> called{false};
  void receive() override {
    Claim claim(called);
    if (!claim) refuse_second_receive(kLatencyDispatch);
    engine->receive_rows(*round, stream ? &*stream : nullptr, claim);
  }
};

/// The second half of a combine.
struct ReceiveSums final : LatencyState {
  std::shared_ptr<CudaLatency> engine{};
  std::shared_ptr<LatencyRound> round{};
  Tensor out{};
  std::optional<Stream> stream{};
  std::atomic<bool> called{false};
  void receive() override {
    Claim claim(called);
    if (!claim) refuse_second_receive(kLatencyCombine);
    engine->receive_sums(*round, stream ? &*stream : nullptr, claim);
    round.reset();  // the result may go back now
  }
};

std::optional<Stream> copy_of(const Stream* stream) {
  return stream == nullptr ? std::nullopt : std::optional<Stream>(*stream);
}

}  // namespace

CallSignature CudaLatency::signature(CallKind kind) const {
  CallSignature call;
  call.kind = kind;
  call.dtype = static_cast<std::uint32_t>(config_.dtype);
  call.columns = config_.hidden;
  return call;
}

/// It takes its turn of the two results when the dispatch enters.
std::shared_ptr<LatencyRound> CudaLatency::begin(const LatencyDispatchOptions& options,
                                                 std::int64_t tokens, int topk) {
  auto round = std::make_shared<LatencyRound>();
  std::size_t result = 0;
  {
    std::scoped_lock lock(mutex_);
    result = (dispatches_ + 1) % 2;
    if (alive_[result]) {
      throw Error(ErrorKind::exhausted,
                  std::string(kLatencyDispatch) +
                      ": the result of the dispatch before the last is still alive, and the two "
                      "buffers are used in turn; drop it (LatencyReceived, its tensors and its "
                      "LatencyCombined) before this dispatch",
                  {engine_->rank(), engine_->rank(), kLatencyDispatch, dispatches_, 0, 0});
    }
    alive_[result] = true;
  }
  round->lease = std::make_shared<LatencyLease>(shared_from_this(), result);
  const LatencyResultLayout& layout = memory_.results[result];
  LatencyDispatchParameters& d = round->dispatch;
  d.view = view_;
  d.format = format_of(options);
  d.tokens = static_cast<int>(tokens);
  d.topk = topk;
  d.handle = at<LatencyHandle>(layout.handle);
  d.slots = at<std::int32_t>(layout.slots);
  d.routes = at<std::int32_t>(layout.routes);
  d.out = at<std::byte>(layout.x);
  d.scales = at<void*>(layout.scales);
  d.counts = at<std::int32_t>(layout.counts);
  d.source_token = at<std::int32_t>(layout.source_token);
  d.ranges = at<std::int64_t>(layout.ranges);
  d.blocks = blocks();
  LatencyCombineParameters& c = round->combine;
  c.view = view_;
  c.path = CombinePath::per_slot;  // the same bits as on the host
  c.handle = d.handle;
  c.slots = d.slots;
  c.topk_idx = d.routes;
  c.wide = false;
  c.kept_weights = at<float>(layout.weights);
  c.tokens = d.tokens;
  c.topk = topk;
  c.blocks = d.blocks;
  return round;
}

LatencyReceived CudaLatency::make_tensors(const std::shared_ptr<LatencyRound>& round,
                                          const LatencyDispatchOptions& options) const {
  const std::int64_t experts = local_experts(), rows = output_rows();
  const Device where = engine_->device();
  const LatencyDispatchParameters& d = round->dispatch;
  const bool quantized = options.format == WireFormat::e4m3;
  const std::shared_ptr<LatencyLease>& lease = round->lease;
  const auto tensor = [&](const TensorView& view) {
    return Tensor{view, std::shared_ptr<void>(lease, view.data)};
  };
  LatencyReceived result;
  result.x = tensor(
      {d.out, quantized ? Dtype::e4m3 : config_.dtype, {experts, rows, config_.hidden}, where});
  result.counts = tensor({d.counts, Dtype::i32, {experts}, where});
  result.source_token = tensor({d.source_token, Dtype::i32, {experts, rows}, where});
  result.ranges = tensor({d.ranges, Dtype::i64, {experts, view_.group.ranks}, where});
  if (quantized) {
    const auto scales =
        static_cast<std::int64_t>(scale_count(static_cast<std::size_t>(config_.hidden)));
    const bool packed = options.scale_format == ScaleFormat::ue8m0_packed;
    const std::int64_t columns = packed ? (scales + 3) / 4 : scales;
    result.scales = tensor({d.scales,
                            packed ? Dtype::i32 : Dtype::f32,
                            {experts, rows, columns},
                            {columns * rows, 1, rows},
                            where});
  }
  return result;
}

/// From here on the dispatch takes place.
void CudaLatency::enter_dispatch(Launch& launch) {
  launch.enter_apart(signature(CallKind::latency_dispatch));
  std::scoped_lock lock(mutex_);
  ++dispatches_;
}

/// Rows at a multiple of 16 bytes: the caller's own, or a copy.
const std::byte* CudaLatency::aligned(Launch& launch, const ConstTensorView& tensor) const {
  const auto* data = static_cast<const std::byte*>(tensor.data);
  if (tensor.bytes() == 0 || reinterpret_cast<std::uintptr_t>(data) % 16 == 0) return data;
  std::byte* copy = launch.temporary(engine_->gpu().take_local(tensor.bytes(), launch.user()));
  check(cudaMemcpyAsync(copy, data, tensor.bytes(), cudaMemcpyDeviceToDevice, launch.stream()),
        "cudaMemcpyAsync");
  return copy;
}

/// The event of a call on a stream; without one the call ends here.
Event CudaLatency::end(Launch& launch, const char* call) {
  launch.outlives(shared_from_this());
  const bool blocking = launch.blocking();
  Event event = launch.finish();
  if (!blocking) return event;
  engine_->finish(call, event);
  return {};
}

LatencyReceived CudaLatency::dispatch(const ConstTensorView& x, const ConstTensorView& topk_idx,
                                      const LatencyDispatchOptions& options) {
  const Device where = engine_->device();
  check_latency_dispatch(x, topk_idx, config_, options, where);
  if (options.waits) refuse(kLatencyDispatch, "waits", "a tensor", "none: not there yet on GPUs");
  if (options.order != RowOrder::expert_major || options.topk_weights) {
    refuse(kLatencyDispatch, "order, topk_weights", "one of them", "none: not there yet on GPUs");
  }
  check_routes(kLatencyDispatch, topk_idx, where);
  check_stream(kLatencyDispatch, options.stream, where);
  Launch launch(*engine_, kLatencyDispatch, options.stream);
  const auto round = begin(options, x.rows(), static_cast<int>(topk_idx.shape[1]));
  LatencyReceived result = make_tensors(round, options);
  auto state = std::make_shared<ReceiveRows>();
  state->engine = shared_from_this();
  state->round = round;
  state->stream = copy_of(options.stream);
  state->called = !options.hook;
  result.state = state;
  LatencyDispatchParameters& parameters = round->dispatch;
  parameters.failure = launch.record()->failure;
  LatencyDispatchParameters sending = parameters;
  sending.halves = options.hook ? Halves::send : Halves::both;
  sending.x = aligned(launch, x);
  sending.topk_idx = topk_idx.data;
  sending.wide = topk_idx.dtype == Dtype::i64;
  sending.token_stride = topk_idx.strides[0];
  sending.slot_stride = topk_idx.strides[1];
  enter_dispatch(launch);
  launch.run(launch_latency_dispatch(sending, launch.stream()), "launch_latency_dispatch");
  result.event = end(launch, kLatencyDispatch);
  return result;
}

void CudaLatency::receive_rows(const LatencyRound& round, const Stream* stream, Claim& claim) {
  Launch launch(*engine_, kLatencyDispatch, stream);
  LatencyDispatchParameters receiving = round.dispatch;
  receiving.halves = Halves::receive;
  receiving.failure = launch.record()->failure;
  claim.keep();
  launch.enter_apart(signature(CallKind::latency_dispatch));
  launch.run(launch_latency_dispatch(receiving, launch.stream()), "launch_latency_dispatch");
  end(launch, kLatencyDispatch);
}

LatencyCombined CudaLatency::combine(const ConstTensorView& rows, const LatencyReceived& received,
                                     const std::optional<ConstTensorView>& topk_weights,
                                     const LatencyCombineOptions& options) {
  const Device where = engine_->device();
  const auto* state = dynamic_cast<const ReceiveRows*>(received.state.get());
  if (state == nullptr || state->engine.get() != this) {
    refuse(kLatencyCombine, "received", "a result of another exchange, or none",
           "what dispatch of this latency exchange returned");
  }
  if (!state->called.load()) {
    refuse(kLatencyCombine, "received", "a result whose hook was not called",
           "receive() before combine");
  }
  const std::shared_ptr<LatencyRound> round = state->round;
  const std::int64_t tokens = round->combine.tokens;
  LatencyDispatched dispatched;
  dispatched.tokens = tokens;
  dispatched.topk = static_cast<int>(round->combine.topk);
  dispatched.ranks = engine_->size();
  dispatched.local_experts = local_experts();
  check_latency_combine(rows, topk_weights, config_, dispatched, options, where);
  if (options.waits) refuse(kLatencyCombine, "waits", "a tensor", "none: not there yet on GPUs");
  if (options.path != ferry::CombinePath::per_slot || options.format != CombineFormat::as_is) {
    refuse(kLatencyCombine, "path, format", "one of them", "none: not there yet on GPUs");
  }
  const Extents shape{tokens, config_.hidden};
  check_stream(kLatencyCombine, options.stream, where);
  Launch launch(*engine_, kLatencyCombine, options.stream);
  Claim claim(round->combined);
  if (!claim) {
    refuse(kLatencyCombine, "received", "a result that was combined already",
           "one not combined yet");
  }
  auto later = std::make_shared<ReceiveSums>();
  later->engine = shared_from_this();
  later->round = round;
  later->stream = copy_of(options.stream);
  later->called = !options.hook;
  later->out = options.out
                   ? Tensor{*options.out, std::shared_ptr<void>(options.out->data, [](void*) {})}
                   : engine_->local_tensor(launch, shape, config_.dtype);
  LatencyCombined result;
  result.x = later->out;
  result.state = later;
  LatencyCombineParameters& parameters = round->combine;
  parameters.out = later->out.as<std::byte>();
  LatencyCombineParameters sending = parameters;
  sending.halves = options.hook ? Halves::send : Halves::both;
  sending.rows = aligned(launch, rows);
  sending.weights = static_cast<const float*>(topk_weights->data);
  if (!options.hook) sending.kept_weights = nullptr;
  claim.keep();
  launch.enter_apart(signature(CallKind::latency_combine));
  launch.run(launch_latency_combine(sending, launch.stream()), "launch_latency_combine");
  if (!options.hook) later->round.reset();  // the result may go back now
  result.event = end(launch, kLatencyCombine);
  return result;
}

void CudaLatency::receive_sums(const LatencyRound& round, const Stream* stream, Claim& claim) {
  Launch launch(*engine_, kLatencyCombine, stream);
  LatencyCombineParameters receiving = round.combine;
  receiving.halves = Halves::receive;
  receiving.weights = receiving.kept_weights;
  receiving.kept_weights = nullptr;
  claim.keep();
  launch.enter_apart(signature(CallKind::latency_combine));
  launch.run(launch_latency_combine(receiving, launch.stream()), "launch_latency_combine");
  end(launch, kLatencyCombine);
}

}  // namespace ferry::cuda
