// The CUDA engine. Until it exists, a stub that says so.
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

}  // namespace ferry::cuda
