#include "cuda/runtime/event.hpp"

#include <algorithm>
#include <memory>
#include <string>
#include <thread>
#include <utility>

namespace ferry::cuda {

void poll(const std::function<bool()>& done, std::chrono::nanoseconds deadline,
          const OnWait& on_wait) {
  using Clock = std::chrono::steady_clock;
  // The counts of a plan, and a small call, come within this time.
  constexpr auto kSpin = std::chrono::microseconds(100);
  // Who sleeps wakes up 50 µs late and more, and so late comes what is launched next.
  constexpr auto kYield = std::chrono::milliseconds(2);
  constexpr auto kPollPeriod = std::chrono::milliseconds(40);
  const auto start = Clock::now();
  auto polled = start;
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
    if (on_wait && now - polled >= kPollPeriod) {
      polled = now;
      on_wait();
    }
    std::this_thread::sleep_for(pause);
    pause = std::min(pause * 2, std::chrono::microseconds(200));
  }
}

namespace {

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

}  // namespace ferry::cuda
