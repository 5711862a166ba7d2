#include "cuda/event.hpp"

#include <algorithm>
#include <string>
#include <thread>
#include <utility>

#include "cuda/cuda_engine.hpp"

namespace ferry::cuda {

void poll(const std::function<bool()>& done, std::chrono::nanoseconds deadline,
          const OnWait& on_wait) {
  using Clock = std::chrono::steady_clock;
  // The counts of a plan, and a small call, come within this time.
  constexpr auto kSpin = std::chrono::microseconds(100);
  // Who sleeps wakes up 50 µs late and more, and so late comes what is launched next.
  constexpr auto kYield = std::chrono::milliseconds(2);
  constexpr auto kLook = std::chrono::milliseconds(40);
  const auto start = Clock::now();
  auto looked = start;
  auto pause = std::chrono::microseconds(2);
  while (!done()) {
    const auto now = Clock::now();
    if (now - start < kSpin) continue;
    if (now - start >= deadline) {
      throw Error(ErrorKind::deadline, "event: work on the stream did not end within " +
                                           std::to_string(deadline.count() / 1000000) + " ms");
    }
    if (now - start < kYield) {
      std::this_thread::yield();
      continue;
    }
    if (on_wait && now - looked >= kLook) {
      looked = now;
      on_wait();
    }
    std::this_thread::sleep_for(pause);
    pause = std::min(pause * 2, std::chrono::microseconds(200));
  }
}

namespace {

[[noreturn]] void throw_gone() {
  throw Error(ErrorKind::destroyed,
              "event: the call did not end well, and its group, which knows why, is gone");
}

/// A point of a stream that belongs to no call.
class PointEvent final : public Event::State, public GpuPoint {
 public:
  PointEvent(GpuEvent event, int device) : event_(std::move(event)), device_(device) {}
  bool ready() override {
    const OnDevice here(device_);
    return is_done(event_);
  }
  void wait(std::chrono::nanoseconds deadline, const OnWait& on_wait) override {
    const OnDevice here(device_);
    poll([&] { return is_done(event_); }, deadline, on_wait);
  }
  GpuEvent gpu_event() const override { return event_; }

 private:
  GpuEvent event_;
  int device_;
};

}  // namespace

Event event_of(GpuEvent event, int device) {
  return Event(std::make_shared<PointEvent>(std::move(event), device));
}

GpuEvent gpu_event_of(const Event& event) {
  const auto* point = dynamic_cast<const GpuPoint*>(event.state().get());
  return point == nullptr ? nullptr : point->gpu_event();
}

CallEvent::CallEvent(std::weak_ptr<CudaEngine> engine, std::shared_ptr<CallRecord> record,
                     GroupWords words, int device)
    : engine_(std::move(engine)),
      record_(std::move(record)),
      words_(std::move(words)),
      device_(device) {}

bool CallEvent::ready() {
  const OnDevice here(device_);
  return record_->has_ended();
}

void CallEvent::wait(std::chrono::nanoseconds deadline, const OnWait& on_wait) {
  const OnDevice here(device_);
  poll([&] { return record_->has_ended(); }, deadline, on_wait);
  if (record_->on_wait) record_->on_wait();
  if (record_->ended_well.load(std::memory_order_acquire)) return;
  if (const auto engine = engine_.lock()) {
    try {
      engine->check_ended(*record_);
    } catch (const Error& error) {
      if (!record_->told_outside) throw;
      throw record_->told_outside(error);
    }
  } else if ((words_.failed() && !record_->ended_before(*words_.fatal)) || record_->refused()) {
    throw_gone();
  }
}

CountsEvent::CountsEvent(std::weak_ptr<CudaEngine> engine, std::weak_ptr<CudaPlan> plan,
                         GroupWords words, int device)
    : engine_(std::move(engine)),
      plan_(std::move(plan)),
      words_(std::move(words)),
      device_(device) {}

bool CountsEvent::ready() {
  const auto plan = plan_.lock();
  return !plan || plan->captured || plan->told() || words_.failed();
}

void CountsEvent::wait(std::chrono::nanoseconds deadline, const OnWait& on_wait) {
  const auto plan = plan_.lock();
  if (!plan) return;
  if (plan->captured) {
    throw Error(ErrorKind::unsupported,
                "plan: it was captured into a CUDA graph, so the CPU does not know its counts; "
                "give worst_case_rows");
  }
  const OnDevice here(device_);
  constexpr std::uint32_t kLooksPerQuery = 64;  // which costs the driver's lock
  std::uint32_t looks = 0;
  poll(
      [&] {
        return plan->told() || words_.failed() ||
               (++looks % kLooksPerQuery == 0 && plan->made->has_ended());
      },
      deadline, on_wait);
  if (plan->counts_known()) return;
  if (const auto engine = engine_.lock()) {
    engine->check_ended(*plan->made);
    throw engine->refusal(*plan->made, plan->counts->failure);
  }
  throw_gone();
}

}  // namespace ferry::cuda
