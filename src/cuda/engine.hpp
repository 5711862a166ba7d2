// The CUDA engine, or a stub that says how to get it.
#pragma once
#include <functional>
#include <memory>
#include <optional>
#include <string>

#include "core/domains.hpp"
#include "core/engine.hpp"
#include "core/experts/batch_plan_shape.hpp"
#include "core/experts/gpu_balancing.hpp"
#include "fabric/fabric.hpp"

namespace ferry::cuda {

/// True when this build has the CUDA engine.
bool available();

/// "0000:17:00.0", of a CUDA ordinal; −1: of the current device. Empty if there is none.
std::string pci_bus_id(int device);

/// Throws Error(unsupported) saying how to get it when this build does not have it.
std::shared_ptr<Engine> make_cuda_engine(Bootstrap& bootstrap, const GroupConfig& config,
                                         std::unique_ptr<fabric::Fabric> fabric);

/// Of a process that takes the place of a lost rank: not collective. Waits until the ranks take it
/// in. `ticket`: 0: it begins the group alone.
std::shared_ptr<Engine> make_lone_cuda_engine(const GroupConfig& config,
                                              std::unique_ptr<fabric::Fabric> fabric,
                                              std::uint64_t ticket);

/// How the ranks of one domain meet: collective among them, whatever those of the others do
/// meanwhile.
struct DomainWires {
  Bootstrap& bootstrap;
  /// Between the CPUs of the domain.
  std::function<std::unique_ptr<fabric::Fabric>()> make_fabric;
  /// Collective among all ranks, at the end; throws when some rank's domain could not be made.
  std::function<void(const std::optional<Error>& failed)> finish;
};
/// The engine over several domains. `fabric`: between the CPUs of all ranks.
std::shared_ptr<Engine> make_cuda_domain_engine(Bootstrap& bootstrap, const GroupConfig& config,
                                                const Domains& domains,
                                                std::unique_ptr<fabric::Fabric> fabric,
                                                const DomainWires& inside);
/// Collective: collectives over tensors in GPU memory, among the ranks of one domain.
std::shared_ptr<CollectivesEngine> make_cuda_collectives(Bootstrap& bootstrap, GroupConfig config,
                                                         std::unique_ptr<fabric::Fabric> fabric);

/// Of several domains. `calls`, `all`, `rail`: of the host; the first two among all ranks, to
/// compare calls and to move data; the third among those of this rank's rail, one of each domain in
/// their order; null: it is on none. `thread`: of nobody else.
struct CollectiveWires {
  std::shared_ptr<CollectivesEngine> calls{};
  std::shared_ptr<CollectivesEngine> all{};
  std::shared_ptr<CollectivesEngine> rail{};
  Stream thread;
};
std::shared_ptr<CollectivesEngine> make_cuda_domain_collectives(Bootstrap& bootstrap,
                                                                GroupConfig config,
                                                                const Domains& domains,
                                                                CollectiveWires wires,
                                                                const DomainWires& inside);

/// Plans of copies on the GPU that has `memory`. Throws Error(unsupported) without CUDA.
std::shared_ptr<GpuBalancing> make_gpu_balancing(const BatchPlanShape& shape,
                                                 const TensorView& memory, const Stream& stream);

/// What MemoryStats is right after creation of a group in virtual domains.
MemoryStats cuda_domain_memory_hint(const GroupConfig& config, int ranks);

/// What MemoryStats is right after creation.
MemoryStats cuda_memory_hint(const GroupConfig& config, int ranks);
/// Registered bytes of one rank's latency exchange.
std::size_t cuda_latency_memory_hint(const LatencyConfig& config, std::int64_t experts, int ranks,
                                     int domains);

}  // namespace ferry::cuda
