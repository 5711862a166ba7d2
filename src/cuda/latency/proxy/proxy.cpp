#include "cuda/latency/proxy/proxy.hpp"

#include <algorithm>
#include <chrono>
#include <exception>
#include <utility>

#include "platform/threads.hpp"

namespace ferry::cuda {
namespace {

using namespace std::chrono_literals;
using Clock = std::chrono::steady_clock;

}  // namespace

LatencyProxy::LatencyProxy(fabric::Fabric& fabric,
                           std::function<void(const std::exception&)> on_failure)
    : fabric_(fabric), on_failure_(std::move(on_failure)), thread_([this] { serve(); }) {
  name_thread(thread_, "ferry-latency");
}

LatencyProxy::~LatencyProxy() {
  stop();
}

void LatencyProxy::add(std::unique_ptr<LatencyCrossing> crossing) {
  std::scoped_lock lock(mutex_);
  crossings_.push_back(std::move(crossing));
}

void LatencyProxy::stop() {
  stopping_.store(true, std::memory_order_release);
  if (thread_.joinable() && thread_.get_id() != std::this_thread::get_id()) thread_.join();
}

bool LatencyProxy::poll_all() {
  constexpr auto kPollPeriod = 20ms;
  std::scoped_lock lock(mutex_);
  bool active = false;
  for (const auto& crossing : crossings_) active |= crossing->poll();
  if (Clock::now() - polled_ < kPollPeriod) return active;
  polled_ = Clock::now();
  for (const auto& crossing : crossings_) crossing->look_after_peers();
  return active;
}

/// Kernels write without waking anybody, so the thread polls again and again: at once as long as a
/// message may be on its way, then less and less often.
void LatencyProxy::rest(std::chrono::nanoseconds idle) const {
  constexpr auto kLongIdle = 10ms;
  if (idle < std::min<std::chrono::nanoseconds>(fabric_.spin_time(), 20us)) {
    fabric_.progress();
    return;
  }
  fabric_.hand_over();
  std::this_thread::sleep_for(idle < kLongIdle ? 50us : 200us);
}

void LatencyProxy::serve() {
  constexpr auto kMost = 1s;
  auto active = Clock::now();
  try {
    while (!stopping_.load(std::memory_order_acquire)) {
      if (poll_all()) {
        active = Clock::now();
      } else {
        rest(Clock::now() - active);
      }
    }
    // Kernels of this rank have ended: peers still wait for what is left of them.
    const auto start = Clock::now();
    while (poll_all() && Clock::now() - start < kMost) {
    }
  } catch (const std::exception& error) {
    on_failure_(error);
  }
}

}  // namespace ferry::cuda
