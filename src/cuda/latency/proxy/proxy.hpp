// The thread that carries what latency exchanges of a group send to other domains
// (crossing.hpp). One for all of them, which live as long as the group.
#pragma once
#include <atomic>
#include <functional>
#include <memory>
#include <mutex>
#include <thread>
#include <vector>

#include "cuda/latency/proxy/crossing.hpp"
#include "fabric/fabric.hpp"

namespace ferry::cuda {

class LatencyProxy {
 public:
  /// `on_failure`: called once, on the thread, which does nothing any more then.
  LatencyProxy(fabric::Fabric& fabric, std::function<void(const std::exception&)> on_failure);
  ~LatencyProxy();
  LatencyProxy(const LatencyProxy&) = delete;
  LatencyProxy& operator=(const LatencyProxy&) = delete;

  void add(std::unique_ptr<LatencyCrossing> crossing);
  /// Carries what is there, for a second at most, and ends the thread. Kernels must have ended.
  void stop();

 private:
  void serve();
  bool poll_all();
  void rest(std::chrono::nanoseconds idle) const;

  fabric::Fabric& fabric_;
  std::function<void(const std::exception&)> on_failure_;
  std::mutex mutex_;  // of what follows
  std::vector<std::unique_ptr<LatencyCrossing>> crossings_{};
  std::chrono::steady_clock::time_point polled_{};
  std::atomic<bool> stopping_{false};
  std::thread thread_;
};

}  // namespace ferry::cuda
