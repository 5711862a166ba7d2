// Random cases on fleets in several virtual domains, as many of them as the time allows: what the
// parts of throughput and of latency mode share.
#pragma once
#include <span>

#include "case.hpp"
#include "cuda_parts.hpp"

namespace ferry::conformance {

struct DomainShape {
  int ranks, domain_size;
  bool threads;  ///< with a GPU each, over the simulated network; else processes, over copies
  Crossing crossing = Crossing::automatic;
};

struct DomainCells {
  const char* name;  ///< of the lines that are printed
  Mode mode;
  std::span<const DomainShape> shapes{};
  int cases;           ///< dealt to the shapes; the time decides how many of them run
  std::uint64_t salt;  ///< of the seeds: this number and the next
};

struct DomainRun {
  bool ok = true;  ///< nothing went wrong, and each shape ran some
  std::int64_t cases = 0;
};
DomainRun run_domain_cells(const CudaOptions& options, const DomainCells& cells);

/// Ranks of that shape on the GPUs, without the cases' checks.
inline Fleet in_domains(const CudaOptions& options, const DomainShape& shape) {
  Fleet fleet;
  fleet.wires = Wires(FabricKind::shm, shape.domain_size, options.network, shape.crossing);
  fleet.ranks = shape.ranks;
  fleet.gpus = options.gpus;
  return fleet;
}

}  // namespace ferry::conformance
