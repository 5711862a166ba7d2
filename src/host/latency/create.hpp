// Latency mode of the host engine: fixed buffers, credits, hooks.
#pragma once
#include <memory>

#include "core/engine.hpp"
#include "core/layout.hpp"

namespace ferry::host {

class HostEngine;

/// Collective: registers the buffers on every rank of the group.
std::shared_ptr<LatencyEngine> make_host_latency(std::shared_ptr<HostEngine> engine,
                                                 const LatencyConfig& config);

LatencyLayout latency_layout(const LatencyConfig& config, std::int64_t experts, int ranks,
                             int domains);

/// Registered bytes of one rank.
std::size_t latency_memory_hint(const LatencyConfig& config, std::int64_t experts, int ranks,
                                int domains);

}  // namespace ferry::host
