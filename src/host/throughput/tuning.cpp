#include "host/throughput/tuning.hpp"

#include <algorithm>

namespace ferry::host {

CallTuner::CallTuner(const GroupConfig& config, int ranks)
    : on_(config.tune.value_or(false)), fresh_(ranks, config.tuning), tuner_(fresh_) {}

CallSettings CallTuner::next(const TuningKey& key) {
  std::scoped_lock lock(mutex_);
  return tuner_.next(key);
}

void CallTuner::met(const engine::Channel& channel, const TuningKey& key,
                    const CallSettings& settings, std::int64_t tokens) {
  if (!on_) return;
  if (made_) {
    float seconds = 0;
    for (const int peer : channel.ranks()) {
      seconds = std::max(seconds, channel.head(peer).report.seconds);
    }
    std::scoped_lock lock(mutex_);
    tuner_.observe(made_->key, made_->settings, made_->tokens, static_cast<double>(seconds));
  }
  made_ = {key, settings, tokens};
  report_ = {};
  met_ = std::chrono::steady_clock::now();
}

void CallTuner::ended() {
  if (!on_) return;
  const std::chrono::duration<float> took = std::chrono::steady_clock::now() - met_;
  report_.seconds = took.count();
}

void CallTuner::forget() {
  std::scoped_lock lock(mutex_);
  tuner_ = fresh_;
  made_.reset();
  report_ = {};
}

std::vector<TunedCall> CallTuner::tuned() const {
  std::scoped_lock lock(mutex_);
  return on_ ? tuner_.tuned() : std::vector<TunedCall>();
}

}  // namespace ferry::host
