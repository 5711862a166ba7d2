// The CUDA engine, or a stub that says how to get it.
#pragma once
#include <memory>

#include "core/engine.hpp"
#include "fabric/fabric.hpp"

namespace ferry::cuda {

/// True when this build has the CUDA engine.
bool available();

/// Throws Error(unsupported) saying how to get it when this build does not have it.
std::shared_ptr<Engine> make_cuda_engine(Bootstrap& bootstrap, const GroupConfig& config,
                                         std::unique_ptr<fabric::Fabric> fabric);

/// What MemoryUse is right after creation.
MemoryUse cuda_memory_hint(const GroupConfig& config, int ranks);
/// Registered bytes of one rank's latency exchange.
std::size_t cuda_latency_memory_hint(const LatencyConfig& config, std::int64_t experts, int ranks);

}  // namespace ferry::cuda
