// The fabric between threads of one process.
#pragma once
#include <chrono>
#include <ferry/bootstrap.hpp>
#include <memory>

#include "fabric/fabric.hpp"

namespace ferry::fabric {

/// Collective; all ranks are threads of this process. A rank may leave (destroy its fabric) first:
/// its segments stay as long as a peer has them attached. Throws Error(unsupported) naming a rank
/// of another process, or what the bootstrap throws.
std::unique_ptr<Fabric> make_local_fabric(Bootstrap& bootstrap, std::chrono::nanoseconds deadline,
                                          const OnWait& on_wait = {});

}  // namespace ferry::fabric
