// Collectives between domains for those whose sums inside a domain are made by others: of the host,
// among all ranks, and on rails.
#pragma once
#include <memory>

#include "api/wires.hpp"
#include "core/engine.hpp"
#include "cuda/engine.hpp"
#include "ferry/bootstrap.hpp"
#include "ferry/group.hpp"

namespace ferry {

/// Collective. `inside`: of several domains. Their waits are a quarter longer than those inside a
/// domain, which then say first who is late; they ask `on_wait` only here.
cuda::CollectiveWires make_rails(Bootstrap& bootstrap, const GroupConfig& config,
                                 const Inside& inside);

}  // namespace ferry
