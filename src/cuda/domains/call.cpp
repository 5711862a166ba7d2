// What every call between domains begins and ends with.
#include <atomic>
#include <utility>

#include "cuda/domains/engine.hpp"
#include "cuda/runtime/event.hpp"

namespace ferry::cuda {
namespace {

/// The end of a call: of its kernels, and of the proxy's part.
class DomainEvent final : public Event::State, public GpuPoint {
 public:
  DomainEvent(std::weak_ptr<DomainEngine> engine, std::shared_ptr<engine::CrossingCall> call,
              Event inside, GpuEvent end, int device)
      : engine_(std::move(engine)),
        call_(std::move(call)),
        inside_(std::move(inside)),
        end_(std::move(end)),
        device_(device) {}

  bool ready() override {
    const OnDevice here(device_);
    return has_ended();
  }
  void wait(std::chrono::nanoseconds deadline, const OnWait& on_wait) override {
    const OnDevice here(device_);
    poll([&] { return has_ended(); }, deadline, on_wait);
    if (const auto engine = engine_.lock()) {
      engine->check_ended(*call_, inside_);
      return;
    }
    inside_.wait(deadline, on_wait);
    if (call_->refused) throw *call_->refused;
    if (call_->crossed.load(std::memory_order_acquire)) return;
    throw Error(ErrorKind::destroyed,
                "event: the call did not end well, and its group, which knows why, is gone");
  }
  GpuEvent gpu_event() const override { return end_; }

 private:
  /// The proxy of a group that has failed may still wait for a peer.
  bool has_ended() {
    if (!is_done(end_)) return false;
    if (call_->ended.load(std::memory_order_acquire)) return true;
    const auto engine = engine_.lock();
    return engine != nullptr && engine->failed();
  }

  std::weak_ptr<DomainEngine> engine_;
  std::shared_ptr<engine::CrossingCall> call_;
  Event inside_;
  GpuEvent end_;
  int device_;
};

}  // namespace

DomainCall::DomainCall(DomainEngine& engine, const char* call, Stream* stream)
    : engine_(engine),
      name_(call),
      turn_(engine.turn_, std::defer_lock),
      blocking_(stream == nullptr),
      stream_(stream == nullptr ? &*engine.own_stream_ : stream) {
  constexpr auto kLook = std::chrono::milliseconds(40);
  engine_.check_usable(call);
  while (!turn_.try_lock_for(kLook)) {
    engine_.check_usable(call);
    if (engine_.config_.on_wait) engine_.config_.on_wait();
  }
  engine_.check_usable(call);
  here_.emplace(engine_.device().index);
  native_ = static_cast<cudaStream_t>(stream_->native());
  if (capture_of(native_).active) {
    throw Error(ErrorKind::unsupported,
                std::string(call) +
                    ": its stream is being captured into a CUDA graph; a group of "
                    "several domains makes its calls with the CPU and cannot be "
                    "captured",
                {engine_.rank(), -1, call, 0, 0, 0});
  }
  id_ = id_of(native_);
  if (engine_.last_ && engine_.last_stream_ != id_) {
    check(cudaStreamWaitEvent(native_, engine_.last_.get(), 0), "cudaStreamWaitEvent");
  }
}

/// Later calls come after what was launched of a plan, or of a call that failed; and after all that
/// the proxy still takes from the stage for it.
DomainCall::~DomainCall() {
  if (finished_ || !here_ || !turn_.owns_lock()) return;
  try {
    if (crossing_ && !received_) receive({});
  } catch (...) {  // the group has failed
  }
  GpuEvent end = engine_.inside().gpu().events()->record(native_);
  uses_->ends_at(end);
  if (!end) return;
  engine_.last_ = std::move(end);
  engine_.last_stream_ = id_;
}

User DomainCall::user() const {
  return {native_, id_, false, &engine_.config_.on_wait, name_, engine_.rank()};
}

Held DomainCall::take(std::size_t bytes) const {
  return engine_.inside().gpu().take_local(bytes, user());
}

void DomainCall::use(const Held& held) const {
  if (held) engine_.inside().gpu().record_use(held.data(), id_, uses_);
}

const float* DomainCall::floats(const std::optional<ConstTensorView>& tensor) const {
  return tensor ? static_cast<const float*>(tensor->data) : nullptr;
}

const std::byte* DomainCall::aligned(const ConstTensorView& rows, Held& copy) const {
  const auto* data = static_cast<const std::byte*>(rows.data);
  if (rows.bytes() == 0 || reinterpret_cast<std::uintptr_t>(data) % 16 == 0) return data;
  copy = take(rows.bytes());
  check(cudaMemcpyAsync(copy.data(), data, rows.bytes(), cudaMemcpyDeviceToDevice, native_),
        "cudaMemcpyAsync");
  return copy.data();
}

Event DomainCall::finish(Event inside) {
  GpuEvent end = engine_.inside().gpu().events()->take();
  check(cudaEventRecord(end.get(), native_), "cudaEventRecord");
  engine_.last_ = end;
  engine_.last_stream_ = id_;
  uses_->ends_at(end);
  finished_ = true;
  const int device = engine_.device().index;
  turn_.unlock();
  Event event(std::make_shared<DomainEvent>(engine_.weak_from_this(), crossing_, std::move(inside),
                                            std::move(end), device));
  if (!blocking_) return event;
  engine_.finish(name_, event);
  return {};
}

}  // namespace ferry::cuda
