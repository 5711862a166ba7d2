#include "cuda_parts.hpp"

#include <algorithm>
#include <cstdio>

namespace ferry::conformance {

std::string to_string(const Layout& layout) {
  return std::to_string(layout.ranks) + (layout.threads ? " threads" : " processes");
}

std::vector<Layout> layouts(const CudaOptions& options) {
  std::vector<Layout> all;
  for (const int ranks : options.ranks) {
    all.push_back({ranks, false});
    if (may_be_threads(options, ranks)) all.push_back({ranks, true});
  }
  return all;
}

Layout processes(const CudaOptions& options, int least) {
  return {std::max(least, options.gpus), false};
}

bool passes(const CudaOptions& options, const Layout& layout, const std::string& what,
            const std::function<void(Rank&)>& body, int victim) {
  Fleet fleet;
  fleet.wires = layout.threads ? FabricKind::local : FabricKind::shm;
  fleet.ranks = layout.ranks;
  fleet.gpus = options.gpus;
  fleet.victim = victim;
  fleet.deadline = std::chrono::seconds(80);
  return report(what + ", " + to_string(layout), run_fleet(fleet, body));
}

bool report(const std::string& what, const std::vector<std::string>& failures) {
  if (failures.empty()) return true;
  std::printf("FAILED %s:\n%s", what.c_str(), joined(failures).c_str());
  std::fflush(stdout);
  return false;
}

bool conclude(const char* part, bool ok, const std::string& what, std::int64_t since_ns) {
  std::printf("%s %s: %s, %.1f s\n", ok ? "PASSED" : "FAILED", part, what.c_str(),
              static_cast<double>(now_ns() - since_ns) * 1e-9);
  std::fflush(stdout);
  return ok;
}

}  // namespace ferry::conformance
