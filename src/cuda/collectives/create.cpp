// Creation of collectives on GPUs.
#include <algorithm>
#include <cstring>
#include <span>
#include <utility>

#include "cuda/collectives/engine.hpp"
#include "cuda/engine.hpp"
#include "cuda/throughput/create.hpp"
#include "engine/create.hpp"

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
  engine.add_latency_memory(memory, 0);
  return {memory.id, std::min(engine.local_sms(), kMaxBlocks)};
}

}  // namespace

std::shared_ptr<CollectivesEngine> make_cuda_collectives(Bootstrap& bootstrap, GroupConfig config,
                                                         std::unique_ptr<fabric::Fabric> fabric) {
  config.experts = 1;
  const std::shared_ptr<CudaEngine> engine =
      make_engine(bootstrap, config, std::move(fabric), 1, collective_body_bytes(bootstrap.size()));
  fabric::Segment memory;
  const auto all = engine::together(bootstrap, config, "Collectives: memory", [&] {
    const Told told = prepare(*engine, memory);
    const auto bytes = std::as_bytes(std::span(&told, 1));
    return std::vector<std::byte>(bytes.begin(), bytes.end());
  });
  const OnDevice here(engine->device().index);  // for its pinned memory
  int blocks = kMaxBlocks;
  for (const auto& one : all) {
    Told told;
    std::memcpy(&told, one.data(), std::min(one.size(), sizeof told));
    if (told.segment != memory.id) {
      throw Error(ErrorKind::mismatch, "Collectives: the ranks' inboxes have different numbers",
                  {engine->rank(), -1, "Collectives", 0, 0, 0});
    }
    blocks = std::min<int>(blocks, told.blocks);
  }
  return std::make_shared<CudaCollectives>(engine, memory, blocks);
}

}  // namespace ferry::cuda
