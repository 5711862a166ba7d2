#include "cuda/engine.hpp"
#include "ferry/error.hpp"

#include <utility>

namespace ferry::cuda {

bool available() {
  return false;
}

std::string pci_bus_id(int /*device*/) {
  return {};
}

namespace {
[[noreturn]] void refuse_backend(int rank, const char* made) {
  throw Error(ErrorKind::unsupported,
              std::string(made) +
                  ": backend: got cuda; this build of Ferry has the host engine only; expected "
                  "host or automatic, or a build with FERRY_CUDA=ON",
              {rank, -1, std::string(made) + ": backend", 0, 0, 0});
}
}  // namespace

std::shared_ptr<Engine> make_cuda_engine(Bootstrap& bootstrap, const GroupConfig&,
                                         std::unique_ptr<fabric::Fabric>) {
  refuse_backend(bootstrap.rank(), "Group");
}

std::shared_ptr<Engine> make_lone_cuda_engine(const GroupConfig&,
                                              std::unique_ptr<fabric::Fabric> fabric,
                                              std::uint64_t) {
  refuse_backend(fabric->rank(), "Group");
}

std::shared_ptr<CollectivesEngine> make_cuda_collectives(Bootstrap& bootstrap, GroupConfig,
                                                         std::unique_ptr<fabric::Fabric>) {
  refuse_backend(bootstrap.rank(), "Collectives");
}

std::shared_ptr<CollectivesEngine> make_cuda_domain_collectives(Bootstrap& bootstrap, GroupConfig,
                                                                const Domains&, CollectiveWires,
                                                                const DomainWires&) {
  refuse_backend(bootstrap.rank(), "Collectives");
}

std::shared_ptr<Engine> make_cuda_domain_engine(Bootstrap& bootstrap, const GroupConfig& config,
                                                const Domains&,
                                                std::unique_ptr<fabric::Fabric> fabric,
                                                const DomainWires&) {
  return make_cuda_engine(bootstrap, config, std::move(fabric));
}

std::shared_ptr<GpuBalancing> make_gpu_balancing(const BatchPlanShape&, const TensorView&,
                                                 const Stream&) {
  throw Error(ErrorKind::unsupported,
              "GpuBalancer: this build of Ferry has the host engine only; expected a build with "
              "FERRY_CUDA=ON, or a BatchBalancer");
}

MemoryStats cuda_domain_memory_hint(const GroupConfig& config, int ranks) {
  return cuda_memory_hint(config, ranks);
}

MemoryStats cuda_memory_hint(const GroupConfig& config, int /*ranks*/) {
  return {0, config.memory_bytes, 0, 0};
}

}  // namespace ferry::cuda

namespace ferry {

Stream Stream::of_cuda(void* /*cuda_stream*/, int /*device*/) {
  throw Error(ErrorKind::unsupported,
              "Stream::of_cuda: this build of Ferry has the host engine only; configure it with "
              "FERRY_CUDA=ON");
}

}  // namespace ferry
