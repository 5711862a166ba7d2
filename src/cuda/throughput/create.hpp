// Creation of the engine of one domain.
#pragma once
#include <memory>

#include "cuda/throughput/engine.hpp"
#include "cuda/throughput/gpu_page.hpp"
#include "fabric/fabric.hpp"
#include "ferry/bootstrap.hpp"

namespace ferry::cuda {

/// The page in a control segment of the CPUs, where processes join; otherwise null.
GpuPage* page_in(const GroupConfig& config, std::byte* control, int ranks);

/// Of the table of segments, behind the flags and mailboxes of a control segment.
std::size_t table_bytes(int ranks);

/// Collective: how many of these ranks use this rank's GPU.
int ranks_on_gpu(Bootstrap& bootstrap, const GroupConfig& config);

/// Collective among the ranks of a domain. `sharing`: ranks on this GPU, in all domains.
/// `body_bytes`: of a message, at least.
std::shared_ptr<CudaEngine> make_engine(Bootstrap& bootstrap, const GroupConfig& config,
                                        std::unique_ptr<fabric::Fabric> fabric, int sharing,
                                        std::size_t body_bytes = 0);

}  // namespace ferry::cuda
