// The tuner of a group's calls: what a rank saw of a call goes out with the messages of the next,
// so that all know the same and decide alike. Nothing is swapped for it.
#pragma once
#include <chrono>
#include <cstdint>
#include <mutex>
#include <optional>
#include <vector>

#include "core/choice/exchange_tuner.hpp"
#include "engine/channel.hpp"

namespace ferry::host {

/// Used by the call whose turn it is; `tuned` by anyone.
class CallTuner {
 public:
  CallTuner(const GroupConfig& config, int ranks);

  bool on() const { return on_; }
  /// How such a call is to be made.
  CallSettings next(const TuningKey& key);
  /// Goes out with the message of the next call.
  CallReport report() const { return report_; }
  /// The ranks have swapped the messages of a call that is made so: takes what they report of the
  /// last one. `tokens`: of the rank that has most.
  void met(const engine::Channel& channel, const TuningKey& key, const CallSettings& settings,
           std::int64_t tokens);
  /// That call has ended here.
  void ended();
  /// The ranks are others, or may have seen different calls.
  void forget();
  std::vector<TunedCall> tuned() const;

 private:
  struct Made {
    TuningKey key{};
    CallSettings settings{};
    std::int64_t tokens = 0;
  };
  bool on_;
  ExchangeTuner fresh_;
  mutable std::mutex mutex_{};
  ExchangeTuner tuner_;  // under the mutex
  std::optional<Made> made_{};
  CallReport report_{};
  std::chrono::steady_clock::time_point met_{};
};

}  // namespace ferry::host
