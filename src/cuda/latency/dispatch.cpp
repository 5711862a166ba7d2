// Dispatch of latency mode: what is checked, launched and handed out.
#include <string>

#include "base/claim.hpp"
#include "core/check.hpp"
#include "core/number/quantize.hpp"
#include "cuda/latency/engine.hpp"
#include "cuda/runtime/event.hpp"

namespace ferry::cuda {

namespace {

LatencyFormat format_of(const LatencyDispatchOptions& options) {
  if (options.format == WireFormat::as_is) return LatencyFormat::as_is;
  switch (options.scale_format) {
    case ScaleFormat::f32_pow2: return LatencyFormat::e4m3_pow2;
    case ScaleFormat::ue8m0_packed: return LatencyFormat::e4m3_packed;
    case ScaleFormat::f32: break;
  }
  return LatencyFormat::e4m3;
}

}  // namespace

[[noreturn]] void refuse_second_receive(const char* call) {
  refuse(call, "hook", "a second receive(), or one without hook = true", "one receive()");
}

std::optional<Stream> copy_of(const Stream* stream) {
  return stream == nullptr ? std::nullopt : std::optional<Stream>(*stream);
}

void ReceiveRows::receive() {
  Claim claim(called);
  if (!claim) refuse_second_receive(kLatencyDispatch);
  engine->receive_rows(*round, stream ? &*stream : nullptr, claim);
}

CallSignature CudaLatency::signature(CallKind kind) const {
  CallSignature call;
  call.kind = kind;
  call.dtype = static_cast<std::uint32_t>(config_.dtype);
  call.elements = config_.hidden;
  return call;
}

/// Graphs write to their buffer at every replay, which nobody sees from here: they share one where
/// they can, and eager dispatches take the other.
std::size_t CudaLatency::take_result(const Capture& capture) {
  const unsigned long long here = capture.active ? capture.id : 0;
  std::scoped_lock lock(mutex_);
  const auto suits = [&](const ResultBuffer& buffer) {
    return !buffer.alive && (buffer.graphs > 0) == capture.active;
  };
  std::size_t found = (dispatches_ + 1) % 2;
  const bool other_suits = suits(results_[1 - found]) && !suits(results_[found]);
  if (results_[found].alive || other_suits) found = 1 - found;
  bool taken = results_[found].alive;
  for (const ResultBuffer& buffer : results_) {
    taken |= buffer.alive && buffer.capture == here && buffer.number < dispatches_;
  }
  if (taken) {
    throw Error(ErrorKind::exhausted,
                std::string(kLatencyDispatch) +
                    ": the result of the dispatch before the last is still alive, or both buffers "
                    "of results are in use; drop it (LatencyReceived, its tensors and its "
                    "LatencyCombined) before this dispatch",
                {rank(), rank(), kLatencyDispatch, dispatches_, 0, 0});
  }
  results_[found].alive = true;
  results_[found].number = dispatches_ + 1;
  results_[found].capture = here;
  return found;
}

/// For as long as a graph keeps what is returned.
std::shared_ptr<void> CudaLatency::use_in_graph(std::size_t result) {
  {
    std::scoped_lock lock(mutex_);
    ++results_[result].graphs;
  }
  return {this, [self = shared_from_this(), result](void*) {
            std::scoped_lock lock(self->mutex_);
            --self->results_[result].graphs;
          }};
}

std::shared_ptr<LatencyRound> CudaLatency::begin(const LatencyDispatchOptions& options,
                                                 std::size_t result, std::int64_t tokens,
                                                 int topk) {
  auto round = std::make_shared<LatencyRound>();
  round->lease = std::make_shared<LatencyLease>(shared_from_this(), result);
  round->result = result;
  round->rejoins = rejoins_.load();
  round->wait_ns = options.wait_ns;
  round->weighted = options.topk_weights.has_value();
  round->order = options.order;
  const LatencyResultLayout& layout = memory_.results[result];
  LatencyDispatchParameters& d = round->dispatch;
  d.view = view_;
  d.format = format_of(options);
  d.tokens = static_cast<int>(tokens);
  d.topk = topk;
  d.handle = at<LatencyHandle>(layout.handle);
  d.slots = at<std::int32_t>(layout.slots);
  d.routes = at<std::int32_t>(layout.routes);
  if (round->weighted) {
    d.slot_weights = at<float>(layout.slot_weights);
    d.own_weights = at<float>(layout.weights);
  }
  d.out = at<std::byte>(layout.x);
  d.scales = at<void*>(layout.scales);
  d.counts = at<std::int32_t>(layout.counts);
  d.source_token = at<std::int32_t>(layout.source_token);
  d.ranges = at<std::int64_t>(layout.ranges);
  LatencyCombineParameters& c = round->combine;
  c.view = view_;
  c.handle = d.handle;
  c.slots = d.slots;
  c.topk_idx = d.routes;
  c.wide = false;
  c.tokens = d.tokens;
  c.topk = topk;
  c.slot_weights = d.slot_weights;
  c.blocks = blocks(config_.capacity);
  if (round->order == RowOrder::rank_major) rank_major(*round);
  return round;
}

/// The combine finds one slot for each row, with weight 1.
void CudaLatency::rank_major(LatencyRound& round) const {
  const LatencyResultLayout& layout = memory_.results[round.result];
  round.dispatch.rank_major = true;
  round.dispatch.topk_out = at<std::int32_t>(layout.topk_idx);
  round.dispatch.ones = at<float>(layout.ones);
  round.combine.slot_weights = round.dispatch.ones;
}

LatencyReceived CudaLatency::make_tensors(const std::shared_ptr<LatencyRound>& round,
                                          const LatencyDispatchOptions& options) const {
  const bool ranked = round->order == RowOrder::rank_major;
  const std::int64_t ranks = view_.group.ranks, capacity = config_.capacity;
  const std::int64_t blocks = ranked ? ranks : local_experts();
  const std::int64_t rows = ranked ? capacity : output_rows();
  const Device where = engine_->device();
  const LatencyDispatchParameters& d = round->dispatch;
  const bool quantized = options.format == WireFormat::e4m3;
  const std::shared_ptr<LatencyLease>& lease = round->lease;
  const auto tensor = [&](const TensorView& view) {
    return Tensor{view, std::shared_ptr<void>(lease, view.data)};
  };
  LatencyReceived result;
  result.x = tensor(
      {d.out, quantized ? Dtype::e4m3 : config_.dtype, {blocks, rows, config_.hidden}, where});
  result.counts = tensor({d.counts, Dtype::i32, {blocks}, where});
  result.source_token = tensor({d.source_token, Dtype::i32, {blocks, rows}, where});
  if (ranked) {
    const Extents table{ranks, capacity, config_.topk};
    result.topk_idx = tensor({d.topk_out, Dtype::i32, table, where});
    if (round->weighted) result.topk_weights = tensor({d.slot_weights, Dtype::f32, table, where});
  } else {
    result.ranges = tensor({d.ranges, Dtype::i64, {blocks, ranks}, where});
  }
  if (quantized) {
    const auto scales =
        static_cast<std::int64_t>(scale_count(static_cast<std::size_t>(config_.hidden)));
    const bool packed = options.scale_format == ScaleFormat::ue8m0_packed;
    const std::int64_t columns = packed ? (scales + 3) / 4 : scales;
    result.scales = tensor({d.scales,
                            packed ? Dtype::i32 : Dtype::f32,
                            {blocks, rows, columns},
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

std::uint64_t* CudaLatency::asked(const std::optional<TensorView>& wait_ns) const {
  return wait_ns ? view_.words->wait_ns : nullptr;
}

void CudaLatency::add_waits(Launch& launch, const std::optional<TensorView>& wait_ns) const {
  if (!wait_ns) return;
  launch.run(launch_latency_waits(view_.words, static_cast<std::int64_t*>(wait_ns->data),
                                  view_.group.ranks, launch.stream()),
             "launch_latency_waits");
}

/// The event of a call on a stream; without one the call ends here.
Event CudaLatency::end(Launch& launch, const char* call) {
  launch.outlives(shared_from_this());
  if (alarm_) {
    launch.record()->on_wait = [alarm = alarm_, call, rank = rank()] {
      throw_evicted(*reinterpret_cast<const LatencyAlarm*>(alarm.get()), call, rank);
    };
  }
  if (told_) {
    launch.record()->told_outside = [told = told_, call](const Error& error) {
      return told(call, error);
    };
  }
  const bool blocking = launch.blocking();
  Event event = launch.finish();
  if (!blocking) return event;
  engine_->finish(call, event);
  return {};
}

void CudaLatency::check_dispatch(const ConstTensorView& x, const ConstTensorView& topk_idx,
                                 const LatencyDispatchOptions& options) const {
  const Device where = engine_->device();
  check_latency_dispatch(x, topk_idx, config_, options, where);
  check_routes(kLatencyDispatch, topk_idx, where);
  check_waits(kLatencyDispatch, options.wait_ns, ranks(), where);
  check_stream(kLatencyDispatch, options.stream, where);
  check_evicted(kLatencyDispatch);
}

LatencyReceived CudaLatency::dispatch(const ConstTensorView& x, const ConstTensorView& topk_idx,
                                      const LatencyDispatchOptions& options) {
  return in_group(kLatencyDispatch, [&] { return make_dispatch(x, topk_idx, options); });
}

LatencyReceived CudaLatency::make_dispatch(const ConstTensorView& x,
                                           const ConstTensorView& topk_idx,
                                           const LatencyDispatchOptions& options) {
  check_dispatch(x, topk_idx, options);
  Launch launch(*engine_, kLatencyDispatch, options.stream);
  const std::size_t buffer = take_result(launch.capture());
  const auto round = begin(options, buffer, x.rows(), static_cast<int>(topk_idx.shape[1]));
  if (launch.capture().active) launch.outlives(use_in_graph(buffer));
  LatencyReceived result = make_tensors(round, options);
  auto state = std::make_shared<ReceiveRows>();
  state->engine = shared_from_this();
  state->round = round;
  state->stream = copy_of(options.stream);
  state->called = !options.hook;
  Access::state(result) = state;
  LatencyDispatchParameters& parameters = round->dispatch;
  parameters.failure = launch.record()->failure;
  LatencyDispatchParameters sending = parameters;
  sending.halves = options.hook ? Halves::send : Halves::both;
  sending.blocks = dispatch_blocks(parameters.tokens, sending.halves);
  if (!options.hook) sending.wait_ns = asked(options.wait_ns);
  sending.x = aligned(launch, x);
  if (round->weighted) sending.weights = static_cast<const float*>(options.topk_weights->data);
  sending.topk_idx = topk_idx.data;
  sending.wide = topk_idx.dtype == Dtype::i64;
  sending.token_stride = topk_idx.strides[0];
  sending.slot_stride = topk_idx.strides[1];
  enter_dispatch(launch);
  launch.run(launch_latency_dispatch(sending, launch.stream()), "launch_latency_dispatch");
  if (!options.hook) add_waits(launch, options.wait_ns);
  result.event = end(launch, kLatencyDispatch);
  return result;
}

void CudaLatency::receive_rows(const LatencyRound& round, const Stream* stream, Claim& claim) {
  check_current(kLatencyDispatch, round);
  in_group(kLatencyDispatch, [&] {
    Launch launch(*engine_, kLatencyDispatch, stream);
    LatencyDispatchParameters receiving = round.dispatch;
    receiving.halves = Halves::receive;
    receiving.blocks = dispatch_blocks(receiving.tokens, receiving.halves);
    receiving.wait_ns = asked(round.wait_ns);
    receiving.failure = launch.record()->failure;
    claim.keep();
    launch.enter_apart(signature(CallKind::latency_dispatch));
    launch.run(launch_latency_dispatch(receiving, launch.stream()), "launch_latency_dispatch");
    add_waits(launch, round.wait_ns);
    end(launch, kLatencyDispatch);
  });
}

}  // namespace ferry::cuda
