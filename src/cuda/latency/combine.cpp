// Combine of latency mode: what is checked, launched and handed out. Its number of blocks:
// engine.cpp.

#include "base/claim.hpp"
#include "core/check.hpp"
#include "cuda/latency/engine.hpp"
#include "cuda/runtime/event.hpp"

namespace ferry::cuda {

namespace {

/// The second half of a combine.
struct ReceiveSums final : LatencyState {
  std::shared_ptr<CudaLatency> engine{};
  std::shared_ptr<LatencyRound> round{};
  Tensor out{};
  std::optional<TensorView> wait_ns{};
  std::optional<Stream> stream{};
  std::atomic<bool> called{false};
  void receive() override {
    Claim claim(called);
    if (!claim) refuse_second_receive(kLatencyCombine);
    engine->receive_sums(*round, wait_ns, stream ? &*stream : nullptr, claim);
    round.reset();  // the result may go back now
  }
};

CombinePath path_of(ferry::CombinePath path, RowOrder order) {
  const bool slots = path == ferry::CombinePath::per_slot && order == RowOrder::expert_major;
  return slots ? CombinePath::per_slot : CombinePath::per_rank;
}

CombineFormat format_of(ferry::CombineFormat format) {
  switch (format) {
    case ferry::CombineFormat::e4m3: return CombineFormat::e4m3;
    case ferry::CombineFormat::logfmt10: return CombineFormat::logfmt10;
    case ferry::CombineFormat::as_is: break;
  }
  return CombineFormat::as_is;
}

}  // namespace

/// Where the kernel writes the sums: at a multiple of 16 bytes, so not always the caller's memory.
std::byte* CudaLatency::aligned_out(Launch& launch, const LatencyCombineParameters& p) const {
  const std::size_t bytes = out_bytes(p);
  const auto address = reinterpret_cast<std::uintptr_t>(p.out);
  if (p.halves == Halves::send || bytes == 0 || address % 16 == 0) return p.out;
  return launch.temporary(engine_->gpu().take_local(bytes, launch.user()));
}

std::size_t CudaLatency::out_bytes(const LatencyCombineParameters& p) const {
  return static_cast<std::size_t>(p.tokens) * static_cast<std::size_t>(config_.hidden) *
         size_of(config_.dtype);
}

/// `out`: the caller's; the parameters have an aligned one.
void CudaLatency::run_combine(Launch& launch, const LatencyCombineParameters& p,
                              std::byte* out) const {
  launch.enter_apart(signature(CallKind::latency_combine));
  launch.run(launch_latency_combine(p, launch.stream()), "launch_latency_combine");
  if (p.out == out) return;
  launch.run(cudaMemcpyAsync(out, p.out, out_bytes(p), cudaMemcpyDeviceToDevice, launch.stream()),
             "cudaMemcpyAsync");
}

void CudaLatency::check_combine(const ConstTensorView& rows, const LatencyRound& round,
                                const std::optional<ConstTensorView>& topk_weights,
                                const LatencyCombineOptions& options) const {
  const Device where = engine_->device();
  LatencyDispatched dispatched;
  dispatched.order = round.order;
  dispatched.weights = round.weighted;
  dispatched.tokens = round.combine.tokens;
  dispatched.topk = round.combine.topk;
  dispatched.ranks = ranks();
  dispatched.local_experts = local_experts();
  check_latency_combine(rows, topk_weights, config_, dispatched, options, where);
  check_stream(kLatencyCombine, options.stream, where);
  check_evicted(kLatencyCombine);
  check_current(kLatencyCombine, round);
}

LatencyCombined CudaLatency::combine(const ConstTensorView& rows, const LatencyReceived& received,
                                     const std::optional<ConstTensorView>& topk_weights,
                                     const LatencyCombineOptions& options) {
  return in_group(kLatencyCombine,
                  [&] { return make_combine(rows, received, topk_weights, options); });
}

LatencyCombined CudaLatency::make_combine(const ConstTensorView& rows,
                                          const LatencyReceived& received,
                                          const std::optional<ConstTensorView>& topk_weights,
                                          const LatencyCombineOptions& options) {
  const auto* state = dynamic_cast<const ReceiveRows*>(Access::state(received).get());
  if (state == nullptr || state->engine.get() != this) {
    refuse(kLatencyCombine, "received", "a result of another exchange, or none",
           "what dispatch of this latency exchange returned");
  }
  if (!state->called.load()) {
    refuse(kLatencyCombine, "received", "a result whose hook was not called",
           "receive() before combine");
  }
  const std::shared_ptr<LatencyRound> round = state->round;
  check_combine(rows, *round, topk_weights, options);
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
  later->wait_ns = options.wait_ns;
  const Extents shape{round->combine.tokens, config_.hidden};
  later->out = options.out
                   ? Tensor{*options.out, std::shared_ptr<void>(options.out->data, [](void*) {})}
                   : engine_->local_tensor(launch, shape, config_.dtype);
  LatencyCombined result;
  result.x = later->out;
  Access::state(result) = later;
  LatencyCombineParameters& parameters = round->combine;
  parameters.out = later->out.as<std::byte>();
  parameters.path = path_of(options.path, round->order);
  parameters.format = format_of(options.format);
  auto* kept = at<float>(memory_.results[round->result].weights);
  parameters.weights = kept;  // of a dispatch that brought them, or of a hook
  LatencyCombineParameters sending = parameters;
  sending.halves = options.hook ? Halves::send : Halves::both;
  sending.failure = launch.record()->failure;
  sending.rows = aligned(launch, rows);
  sending.out = aligned_out(launch, sending);
  if (topk_weights) sending.weights = static_cast<const float*>(topk_weights->data);
  if (topk_weights && options.hook) sending.kept_weights = kept;
  if (!options.hook) sending.wait_ns = asked(options.wait_ns);
  claim.keep();
  run_combine(launch, sending, parameters.out);
  if (!options.hook) add_waits(launch, options.wait_ns);
  if (!options.hook) later->round.reset();  // the result may go back now
  result.event = end(launch, kLatencyCombine);
  return result;
}

void CudaLatency::receive_sums(const LatencyRound& round, const std::optional<TensorView>& wait_ns,
                               const Stream* stream, Claim& claim) {
  check_current(kLatencyCombine, round);
  in_group(kLatencyCombine, [&] {
    Launch launch(*engine_, kLatencyCombine, stream);
    LatencyCombineParameters receiving = round.combine;
    receiving.halves = Halves::receive;
    receiving.failure = launch.record()->failure;
    receiving.wait_ns = asked(wait_ns);
    receiving.out = aligned_out(launch, receiving);
    claim.keep();
    run_combine(launch, receiving, round.combine.out);
    add_waits(launch, wait_ns);
    end(launch, kLatencyCombine);
  });
}

}  // namespace ferry::cuda
