// Masks of a latency exchange on GPUs: whom this rank goes on without. The kernels find out; here
// are the caller's wishes, and what the caller learns without asking the GPU.
#include <atomic>
#include <string>

#include "core/check.hpp"
#include "cuda/latency/engine.hpp"
#include "cuda/runtime/event.hpp"

namespace ferry::cuda {

using std::to_string;

namespace {

constexpr const char* kRejoin = "latency rejoin";

/// Kernels write it meanwhile. Acquire: who sees it sees what was written before.
template <class T>
T load(const T& word) {
  return std::atomic_ref(const_cast<T&>(word)).load(std::memory_order_acquire);
}

}  // namespace

void throw_evicted(const LatencyAlarm& alarm, const char* call, int rank) {
  const std::uint32_t behind = load(alarm.behind);
  if (behind == 0) return;
  const int peer = static_cast<int>(behind) - 1;
  throw Error(ErrorKind::evicted,
              "rank " + to_string(rank) + ": " + call + ": rank " + to_string(peer) +
                  " has masked this rank and goes on without it: evicted; its results since "
                  "may lack rows. Call rejoin on all ranks to come back",
              {rank, peer, call, 0, 0, 0});
}

LatencyAlarm& CudaLatency::alarm() const {
  if (!alarm_) {
    throw Error(ErrorKind::invalid_argument,
                "latency masks: the exchange was made without masks; expected "
                "LatencyConfig::masks = true");
  }
  return *reinterpret_cast<LatencyAlarm*>(alarm_.get());
}

void CudaLatency::check_evicted(const char* call) const {
  if (!alarm_) return;
  if (must_rejoin_.load()) {
    throw Error(ErrorKind::evicted,
                "rank " + to_string(rank()) + ": " + call +
                    ": the last rejoin of this exchange failed on this rank; rejoin again",
                {rank(), rank(), call, 0, 0, 0});
  }
  throw_evicted(alarm(), call, rank());
}

void CudaLatency::check_current(const char* call, const LatencyRound& round) const {
  if (round.rejoins == rejoins_.load()) return;
  throw Error(ErrorKind::evicted,
              "rank " + to_string(rank()) + ": " + call +
                  ": this result is of a dispatch before the last rejoin; its rows may still be "
                  "read, but neither received nor combined",
              {rank(), rank(), call, 0, 0, 0});
}

std::vector<bool> CudaLatency::masked() const {
  const LatencyAlarm& told = alarm();
  std::vector<bool> masked;
  for (int r = 0; r < ranks(); ++r) masked.push_back(load(told.ranks[r]) != 0);
  return masked;
}

const std::uint64_t* CudaLatency::mask_count() const {
  return &alarm().masked;
}

/// Behind all earlier calls; on return it is done.
void CudaLatency::change_mask(const char* call, int rank, bool masked) {
  in_group(call, [&] {
    Launch launch(*engine_, call, nullptr);
    launch.enter_apart(signature(CallKind::latency));
    launch.run(launch_latency_mask(view_, rank, masked, launch.stream()), "launch_latency_mask");
    engine_->finish(call, launch.finish());
  });
}

void CudaLatency::set_mask(int rank, bool masked) {
  (void)alarm();
  if (rank < 0 || rank >= ranks() || rank == view_.group.rank) {
    refuse("set_mask", "rank", to_string(rank),
           "another rank of the group, 0 … " + to_string(ranks() - 1));
  }
  change_mask("set_mask", rank, masked);
}

void CudaLatency::clear_masks() {
  (void)alarm();
  change_mask("clear_masks", -1, false);
}

void CudaLatency::rejoin() {
  (void)alarm();
  in_group(kRejoin, [&] { launch_rejoin(); });
}

void CudaLatency::launch_rejoin() {
  Launch launch(*engine_, kRejoin, nullptr);
  LatencyRejoinParameters parameters;
  parameters.view = view_;
  parameters.failure = launch.record()->failure;
  // From here on the other ranks may have gone on to generations that this one does not know.
  must_rejoin_.store(true);
  rejoins_.fetch_add(1);
  launch.enter_apart(signature(CallKind::latency));
  launch.run(launch_latency_rejoin(parameters, launch.stream()), "launch_latency_rejoin");
  engine_->finish(kRejoin, launch.finish());
  must_rejoin_.store(false);
}

}  // namespace ferry::cuda
