// Latency mode: the memory of an exchange, how it is made and its results given back.
#include "cuda/latency_engine.hpp"

#include <algorithm>
#include <optional>
#include <string>
#include <utility>

#include "core/check.hpp"
#include "cuda/engine.hpp"
#include "cuda/event.hpp"

namespace ferry::cuda {

using std::to_string;

namespace {

constexpr const char* kMake = "LatencyExchange";
constexpr std::int64_t kFewSlots = 32;  // tokens of all ranks

CallSignature signature_of(const LatencyConfig& config, bool valid) {
  CallSignature call;
  call.kind = CallKind::latency;
  call.dtype = static_cast<std::uint32_t>(config.dtype);
  call.columns = valid ? config.hidden : -1;  // peers are told that this rank's cannot be
  call.scale_columns = config.capacity;
  call.topk = static_cast<std::uint32_t>(config.topk);
  call.weights = config.masks ? 1 : 0;
  call.order = static_cast<std::uint32_t>(config.order);
  return call;
}

/// What the kernels need of every rank's segment.
void find_peers(CudaEngine& engine, const LatencyPlace* places, std::size_t bytes,
                LatencyView& view) {
  fabric::DeviceMemory& wire = engine.gpu().wire();
  for (int peer = 0; peer < engine.size(); ++peer) {
    const fabric::SegmentId segment = places[peer].segment;
    view.peers[peer] = wire.pointer(peer, segment);
    if (view.peers[peer] == nullptr || wire.bytes(peer, segment) < bytes) {
      engine.channel().distrust("LatencyExchange: buffers", peer,
                                "named segment " + to_string(segment) + " of " +
                                    to_string(wire.bytes(peer, segment)) +
                                    " bytes, expected at least " + to_string(bytes));
    }
  }
}

}  // namespace

CudaLatency::CudaLatency(std::shared_ptr<CudaEngine> engine, const LatencyConfig& config,
                         const LatencyMemory& memory, const fabric::Segment& segment,
                         const LatencyView& view, std::shared_ptr<std::byte> alarm)
    : engine_(std::move(engine)),
      config_(config),
      memory_(memory),
      segment_(segment),
      view_(view),
      alarm_(std::move(alarm)) {}

LatencyLease::~LatencyLease() {
  engine_->drop(result_);
}

void CudaLatency::drop(std::size_t result) {
  std::scoped_lock lock(mutex_);
  results_[result].alive = false;
}

int CudaLatency::blocks() const {
  // All of a call must run at once; beside another rank's, whose next kernel may come early, too.
  const int sms = engine_->local_sms();
  // Where there is little to do, blocks that have nothing to do cost more than they save.
  if (config_.capacity * engine_->size() <= kFewSlots) return std::max(1, sms / 4);
  return engine_->shares_gpu() ? sms : kLatencyBlocksPerSm * sms;
}

std::shared_ptr<LatencyEngine> make_cuda_latency(std::shared_ptr<CudaEngine> engine,
                                                 const LatencyConfig& config) {
  LatencyMemory memory{};
  std::optional<Error> invalid;
  try {
    memory = make_latency_memory(config, engine->placement().experts, engine->size());
  } catch (const Error& error) {
    invalid = error;
  }
  Launch launch(*engine, kMake, nullptr);
  LatencyOpenParameters open;
  open.group = engine->view();
  open.call = signature_of(config, !invalid);
  open.failure = launch.record()->failure;
  fabric::Segment segment{};
  if (!invalid) segment = engine->add_segment(kMake, memory.bytes);
  if (!invalid && segment.bytes == 0) {
    open.status = StepStatus::no_room;
    open.need_bytes = static_cast<std::int64_t>(memory.bytes);
  }
  open.segment = segment.id;
  static_assert(sizeof(LatencyPlace) == 4);
  const std::shared_ptr<std::byte> slot = engine->pinned_words();
  open.places = reinterpret_cast<LatencyPlace*>(slot.get());
  launch.keep(slot);
  launch.enter(open.call);
  launch.run(launch_latency_open(open, launch.stream()), "launch_latency_open");
  const Event event = launch.finish();
  try {
    engine->finish(kMake, event);
  } catch (const Error&) {
    if (invalid) throw *invalid;
    throw;
  }
  if (invalid) throw *invalid;
  LatencyView view;
  view.group = engine->view();
  view.placement = engine->placement();
  view.layout = memory.wire;
  view.capacity = config.capacity;
  view.hidden = config.hidden;
  view.topk = config.topk;
  view.parts = latency_parts(config.hidden);
  view.few = kFewTokens;
  view.dtype = config.dtype;
  view.words = reinterpret_cast<LatencyWords*>(segment.data + memory.words);
  find_peers(*engine, open.places, memory.bytes, view);
  join_domain(view);
  std::shared_ptr<std::byte> alarm;
  if (config.masks) {
    alarm = engine->take_alarm();
    view.alarm = reinterpret_cast<LatencyAlarm*>(alarm.get());
  }
  engine->add_latency_memory(segment, config.masks ? view.layout.gone : 0);
  return std::make_shared<CudaLatency>(std::move(engine), config, memory, segment, view,
                                       std::move(alarm));
}

}  // namespace ferry::cuda
