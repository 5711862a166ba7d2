// Measures the ways between the ranks of a group.
#pragma once
#include "ferry/links.hpp"
#include "host/throughput/engine.hpp"

namespace ferry::host {

/// Collective; see ferry::measure_links.
Links measure_links(HostEngine& engine, const std::function<void(int, int)>& progress);

}  // namespace ferry::host
