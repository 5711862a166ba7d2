// Creation of collectives on GPUs.
#include <algorithm>
#include <cstring>
#include <optional>
#include <span>
#include <thread>
#include <utility>

#include "cuda/collectives/device_gpus.hpp"
#include "cuda/collectives/domains.hpp"
#include "cuda/collectives/engine.hpp"
#include "cuda/engine.hpp"
#include "cuda/throughput/create.hpp"
#include "engine/create.hpp"
#include "engine/regions.hpp"

namespace ferry::cuda {
namespace {

/// What ranks tell each other of their collectives; plain bytes.
struct Told {
  std::uint32_t segment = 0;
  std::int32_t blocks = 0;  ///< that run at once
};

Told prepare(CudaEngine& engine, fabric::Segment& memory) {
  const OnDevice here(engine.device().index);
  check(load_collective_kernels(), "load_collective_kernels");
  const std::size_t bytes = make_collective_layout(engine.size()).bytes;
  memory = engine.add_segment("Collectives", bytes);
  if (memory.bytes == 0) {
    throw Error(ErrorKind::exhausted,
                "Collectives: the GPU has no " + std::to_string(bytes) +
                    " bytes left for inboxes; free some of its memory",
                {engine.rank(), engine.rank(), "Collectives", 0, 0, 0});
  }
  engine.add_latency_memory({.memory = memory});
  return {memory.id, std::min(engine.local_sms(), kMaxBlocks)};
}

/// The collectives of one domain, and their engine.
struct Made {
  std::shared_ptr<CudaEngine> engine{};
  std::shared_ptr<CudaCollectives> collectives{};
};

Made make(Bootstrap& bootstrap, GroupConfig config, std::unique_ptr<fabric::Fabric> fabric,
          int sharing) {
  config.experts = 1;
  Made made;
  made.engine = make_engine(bootstrap, config, std::move(fabric), sharing,
                            collective_body_bytes(bootstrap.size()));
  fabric::Segment memory;
  const auto all = engine::together(bootstrap, config, "Collectives: memory", [&] {
    const Told told = prepare(*made.engine, memory);
    const auto bytes = std::as_bytes(std::span(&told, 1));
    return std::vector<std::byte>(bytes.begin(), bytes.end());
  });
  const OnDevice here(made.engine->device().index);  // for its pinned memory
  int blocks = kMaxBlocks;
  for (const auto& one : all) {
    Told told;
    std::memcpy(&told, one.data(), std::min(one.size(), sizeof told));
    if (told.segment != memory.id) {
      throw Error(ErrorKind::mismatch, "Collectives: the ranks' inboxes have different numbers",
                  {made.engine->rank(), -1, "Collectives", 0, 0, 0});
    }
    blocks = std::min<int>(blocks, told.blocks);
  }
  made.collectives = std::make_shared<CudaCollectives>(made.engine, memory, blocks);
  return made;
}

/// Of the ranks of one domain: calls are made by a thread that asks no caller.
GroupConfig config_inside(GroupConfig config, int rails) {
  config.domain_size = 0;
  config.memory_bytes += DeviceGpus::scratch_bytes(rails) + engine::kRegionAlignment;
  if (config.on_wait) {
    config.on_wait = [caller = std::this_thread::get_id(), ask = std::move(config.on_wait)] {
      if (std::this_thread::get_id() == caller) ask();
    };
  }
  return config;
}

}  // namespace

std::shared_ptr<CollectivesEngine> make_cuda_collectives(Bootstrap& bootstrap, GroupConfig config,
                                                         std::unique_ptr<fabric::Fabric> fabric) {
  return make(bootstrap, std::move(config), std::move(fabric), 1).collectives;
}

std::shared_ptr<CollectivesEngine> make_cuda_domain_collectives(Bootstrap& bootstrap,
                                                                GroupConfig config,
                                                                const Domains& domains,
                                                                CollectiveWires wires,
                                                                const DomainWires& inside) {
  const int sharing = ranks_on_gpu(bootstrap, config);
  const int rails = domains.full_rails();
  std::optional<Error> failed;
  std::shared_ptr<CollectivesEngine> made;
  try {
    const Made here =
        make(inside.bootstrap, config_inside(config, rails), inside.make_fabric(), sharing);
    made = std::make_shared<DomainCollectives>(DomainCollectivesParts{
        std::move(config), domains, std::move(wires.calls), std::move(wires.all),
        std::move(wires.rail), std::make_unique<DeviceGpus>(here.engine, here.collectives, rails),
        std::move(wires.thread)});
  } catch (const Error& error) {
    failed = error;
  }
  inside.finish(failed);
  return made;
}

}  // namespace ferry::cuda
