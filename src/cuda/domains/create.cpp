// Creation of a CUDA engine over several domains.
#include <algorithm>
#include <optional>
#include <utility>

#include "core/crossing_plan.hpp"
#include "cuda/domains/engine.hpp"
#include "cuda/engine.hpp"
#include "cuda/throughput/create.hpp"
#include "engine/create.hpp"
#include "engine/membership/arbiter_creation.hpp"

namespace ferry::cuda {
namespace {

constexpr std::size_t kPage = 4096;

/// The largest message holds the counts of a plan, or the handle of a segment.
ControlLayout crossing_layout(const GroupConfig& config, int ranks, int domains) {
  const std::size_t counts =
      (static_cast<std::size_t>(ranks) + static_cast<std::size_t>(config.experts) +
       static_cast<std::size_t>(domains)) *
      sizeof(std::int32_t);
  return make_control_layout(ranks,
                             sizeof(StepMessage) + std::max(counts, fabric::kMaxHandleBytes));
}

/// Of the ranks of one domain alone: its experts lie on them as they do in the group.
GroupConfig config_inside(const GroupConfig& config, const Domains& domains, int rank) {
  GroupConfig inside = config;
  inside.domain_size = 0;
  inside.arbiter.clear();
  inside.experts = 0;
  const Placement placement{config.experts, domains.ranks()};
  for (const int member : domains.members(domains.of(rank))) {
    inside.experts += placement.local_experts(member);
  }
  return inside;
}

}  // namespace

MemoryStats cuda_domain_memory_hint(const GroupConfig& config, int ranks) {
  const Domains domains = Domains::blocks(ranks, config.domain_size);
  MemoryStats use = cuda_memory_hint(config_inside(config, domains, 0),
                                     static_cast<int>(domains.members(0).size()));
  use.control_bytes += crossing_layout(config, ranks, domains.count()).bytes + kPage;
  return use;
}

std::shared_ptr<Engine> make_cuda_domain_engine(Bootstrap& bootstrap, const GroupConfig& config,
                                                const Domains& domains,
                                                std::unique_ptr<fabric::Fabric> fabric,
                                                const DomainWires& inside) {
  const int rank = bootstrap.rank();
  DomainParts parts;
  parts.domains = domains;
  parts.memory = std::make_shared<engine::Memory>(std::move(fabric));
  parts.layout = crossing_layout(config, domains.ranks(), domains.count());
  fabric::Fabric& wire = *parts.memory->fabric;
  fabric::Segment spare;  // as many segments as cards; of the least size
  engine::ArbiterCreation arbiter(config, domains, wire, rank == 0);
  const auto cards = engine::together(bootstrap, config, "Group: memory", [&] {
    arbiter.create();
    parts.control = wire.register_memory(parts.layout.bytes);
    spare = wire.register_memory(kPage);
    return engine::bytes_of({engine::card_of(parts.control), engine::card_of(spare)});
  });
  engine::together(bootstrap, config, "Group: attach", [&] {
    engine::attach_all(wire, cards, {engine::card_of(parts.control), engine::card_of(spare)});
    arbiter.check();
    return std::vector<std::byte>();
  });
  arbiter.keep();
  wire.seal(parts.control.id);
  wire.seal(spare.id);
  const int sharing = ranks_on_gpu(bootstrap, config);
  std::optional<Error> failed;
  std::shared_ptr<DomainEngine> made;
  try {
    parts.inside = make_engine(inside.bootstrap, config_inside(config, domains, rank),
                               inside.make_fabric(), sharing);
    made = std::make_shared<DomainEngine>(config, std::move(parts));
  } catch (const Error& error) {
    failed = error;
  }
  inside.finish(failed);
  return made;
}

}  // namespace ferry::cuda
