// The public latency mode: forwards to the group's engine.
#include "ferry/latency.hpp"

#include "core/check.hpp"
#include "core/engine.hpp"
#include "host/latency.hpp"

namespace ferry {

LatencyExchange::LatencyExchange(Group& group, const LatencyConfig& config) {
  if (group.destroyed()) {
    throw Error(ErrorKind::destroyed, "LatencyExchange: the group is destroyed");
  }
  engine_ = group.engine()->make_latency(config);
}

LatencyReceived LatencyExchange::dispatch(const ConstTensorView& x,
                                          const ConstTensorView& topk_idx,
                                          const LatencyDispatchOptions& options) {
  return engine_->dispatch(x, topk_idx, options);
}

LatencyCombined LatencyExchange::combine(const ConstTensorView& rows,
                                         const LatencyReceived& received,
                                         const ConstTensorView& topk_weights,
                                         const LatencyCombineOptions& options) {
  return engine_->combine(rows, received, topk_weights, options);
}

const LatencyConfig& LatencyExchange::config() const { return engine_->config(); }

std::size_t LatencyExchange::memory_hint(const LatencyConfig& config, std::int64_t experts,
                                         int ranks) {
  check_config(config);
  return host::latency_memory_hint(config, experts, ranks);
}

void LatencyReceived::receive() {
  if (!state) refuse("latency dispatch", "received", "an empty result", "a dispatch's");
  state->receive();
}

void LatencyCombined::receive() {
  if (!state) refuse("latency combine", "combined", "an empty result", "a combine's");
  state->receive();
}

}  // namespace ferry
