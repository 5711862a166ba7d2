// The public latency mode: forwards to the group's engine.
#include "ferry/latency.hpp"

#include <string>

#include "api/old_options.hpp"
#include "base/process_limits.hpp"
#include "core/check.hpp"
#include "core/engine.hpp"
#include "cuda/engine.hpp"
#include "host/latency/create.hpp"

namespace ferry {
namespace {

LatencyEngine& live(const std::shared_ptr<LatencyEngine>& engine, const char* call) {
  if (!engine) {
    throw Error(ErrorKind::destroyed, std::string(call) + ": the exchange was moved from");
  }
  return *engine;
}

}  // namespace

LatencyExchange::LatencyExchange(Group& group, const LatencyConfig& config) {
  if (group.destroyed()) {
    throw Error(ErrorKind::destroyed, "LatencyExchange: the group is destroyed");
  }
  engine_ = in_words(group.rank(), "LatencyExchange",
                     [&] { return Access::engine(group)->make_latency(config); });
}

LatencyReceived LatencyExchange::dispatch(const ConstTensorView& x, const ConstTensorView& topk_idx,
                                          const LatencyDispatchOptions& options) {
  return live(engine_, "latency dispatch").dispatch(x, topk_idx, with_new_names(options));
}

LatencyCombined LatencyExchange::combine(const ConstTensorView& rows,
                                         const LatencyReceived& received,
                                         const ConstTensorView& topk_weights,
                                         const LatencyCombineOptions& options) {
  return live(engine_, "latency combine")
      .combine(rows, received, topk_weights, with_new_names(options));
}

LatencyCombined LatencyExchange::combine(const ConstTensorView& rows,
                                         const LatencyReceived& received,
                                         const LatencyCombineOptions& options) {
  return live(engine_, "latency combine")
      .combine(rows, received, std::nullopt, with_new_names(options));
}

std::vector<bool> LatencyExchange::masked() const {
  return live(engine_, "masked").masked();
}
void LatencyExchange::set_mask(int rank, bool masked) {
  live(engine_, "set_mask").set_mask(rank, masked);
}
void LatencyExchange::clear_masks() {
  live(engine_, "clear_masks").clear_masks();
}
const std::uint64_t* LatencyExchange::mask_count() const {
  return live(engine_, "mask_count").mask_count();
}
void LatencyExchange::rejoin() {
  live(engine_, "rejoin").rejoin();
}

const LatencyConfig& LatencyExchange::config() const {
  return live(engine_, "config").config();
}

std::size_t LatencyExchange::memory_hint(const LatencyConfig& config, std::int64_t experts,
                                         int ranks, DeviceKind device, int domains) {
  check_config(config);
  if (experts < 1 || experts > (1 << 20) || ranks < 1 || ranks > kMaxRanks) {
    refuse("LatencyExchange::memory_hint", "experts, ranks",
           std::to_string(experts) + ", " + std::to_string(ranks),
           "1 … 1048576 experts, 1 … " + std::to_string(kMaxRanks) + " ranks");
  }
  if (domains < 1 || domains > ranks) {
    refuse("LatencyExchange::memory_hint", "domains", std::to_string(domains),
           "1 … " + std::to_string(ranks) + ", the ranks");
  }
  if (device == DeviceKind::cuda) {
    return cuda::cuda_latency_memory_hint(config, experts, ranks, domains);
  }
  return host::latency_memory_hint(config, experts, ranks, domains);
}

void LatencyReceived::receive() {
  if (!state_) refuse("latency dispatch", "received", "an empty result", "a dispatch's");
  state_->receive();
}

void LatencyCombined::receive() {
  if (!state_) refuse("latency combine", "combined", "an empty result", "a combine's");
  state_->receive();
}

}  // namespace ferry
