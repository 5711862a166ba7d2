#include "cuda/latency/memory.hpp"

#include <algorithm>
#include <limits>
#include <string>

#include "core/check.hpp"
#include "core/number/quantize.hpp"
#include "cuda/engine.hpp"
#include "cuda/kernels/latency/view.hpp"
#include "engine/growth.hpp"

namespace ferry::cuda {

using std::to_string;

namespace {

constexpr const char* kMake = "LatencyExchange";

/// What the kernels cannot do.
void check_served(const LatencyConfig& config, std::int64_t local_experts, int ranks) {
  check_config(config);
  check_size(config, local_experts, ranks);
  const auto most = [](const char* what, std::int64_t got, std::int64_t limit) {
    if (got <= limit) return;
    throw Error(ErrorKind::unsupported, std::string(kMake) + ": " + what + ": got " +
                                            to_string(got) + "; the CUDA engine serves at most " +
                                            to_string(limit));
  };
  most("topk", config.topk, kMaxLatencyTopk);
  most("capacity", config.capacity, kMostLatencyTokens);
  most("experts of a rank", local_experts, kMostLatencyExperts);
  most("rows of a result (experts of a rank x ranks x capacity)",
       local_experts * ranks * config.capacity, std::numeric_limits<std::int32_t>::max());
}

LatencyResultLayout make_result_layout(Carver& carver, const LatencyConfig& config,
                                       std::int64_t local_experts, int ranks) {
  const auto r = static_cast<std::size_t>(ranks);
  const auto capacity = static_cast<std::size_t>(config.capacity);
  const auto experts = static_cast<std::size_t>(local_experts);
  const auto hidden = static_cast<std::size_t>(config.hidden);
  const auto k = static_cast<std::size_t>(config.topk);
  // Blocks of experts hold rank-major results, too.
  const bool fans_out = config.order == RowOrder::expert_major;
  const std::size_t rows = (fans_out ? experts : 1) * r * capacity;
  LatencyResultLayout layout;
  layout.handle = carver.take(sizeof(LatencyHandle));
  layout.slots = carver.take(r * capacity * k * sizeof(std::int32_t));
  layout.slot_weights = carver.take(r * capacity * k * sizeof(float));
  layout.ones = carver.take(r * capacity * k * sizeof(float));
  layout.routes = carver.take(capacity * k * sizeof(std::int32_t));
  layout.weights = carver.take(capacity * k * sizeof(float));
  layout.x = carver.take(rows * hidden * size_of(config.dtype));
  layout.scales = carver.take(rows * scale_count(hidden) * sizeof(float));
  layout.counts = carver.take(std::max(experts, r) * sizeof(std::int32_t));
  layout.source_token = carver.take(rows * sizeof(std::int32_t));
  layout.ranges = carver.take((fans_out ? experts * r : 0) * sizeof(std::int64_t));
  layout.topk_idx = carver.take(r * capacity * k * sizeof(std::int32_t));
  return layout;
}

CrossingMemory make_crossing_memory(const DeviceLatencyLayout& wire, const LatencyConfig& config,
                                    int ranks) {
  const auto r = static_cast<std::size_t>(ranks);
  const auto slots = static_cast<std::size_t>(config.capacity * config.topk);
  Carver carver{};
  CrossingMemory memory;
  // Where kernels poll whether a peer is held up nobody writes: beyond the domain it never is.
  memory.outbox = carver.take(std::max(wire.outbox_bytes, wire.words + sizeof(LatencyWords)));
  memory.inbox = carver.take(wire.bytes);
  memory.flags = carver.take(2 * kCrossingKinds * r * kLineBytes);
  memory.acknowledged = carver.take(2 * kCrossingKinds * r * kLineBytes);
  memory.masks = carver.take(r * kLineBytes);
  memory.weights = carver.take(2 * r * slots * sizeof(float));
  memory.bytes = engine::segment_bytes(carver.end);
  return memory;
}

}  // namespace

LatencyMemory make_latency_memory(const LatencyConfig& config, std::int64_t experts, int ranks,
                                  int domains) {
  const std::int64_t local = Placement{experts, ranks}.local_experts(0);  // rank 0 has the most
  check_served(config, local, ranks);
  LatencyMemory memory;
  memory.wire =
      make_device_latency_layout({ranks, local, config.capacity, config.hidden, config.topk,
                                  size_of(config.dtype), domains > 1, config.masks});
  Carver carver{memory.wire.bytes};
  memory.words = carver.take(sizeof(LatencyWords));
  memory.wire.words = memory.words;
  for (auto& result : memory.results) result = make_result_layout(carver, config, local, ranks);
  memory.bytes = engine::segment_bytes(carver.end);
  if (domains > 1) memory.crossing = make_crossing_memory(memory.wire, config, ranks);
  return memory;
}

std::size_t cuda_latency_memory_hint(const LatencyConfig& config, std::int64_t experts, int ranks,
                                     int domains) {
  const LatencyMemory memory = make_latency_memory(config, experts, ranks, domains);
  return memory.bytes + memory.crossing.bytes;
}

}  // namespace ferry::cuda
