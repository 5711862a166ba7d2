// The public Group: agrees on the configuration, picks fabric and engine, then forwards.
#include "ferry/group.hpp"

#include <utility>

#include "api/agreement.hpp"
#include "core/check.hpp"
#include "core/engine.hpp"
#include "core/placement.hpp"
#include "cuda/engine.hpp"
#include "fabric/identity.hpp"
#include "fabric/local/local.hpp"
#include "fabric/shm/shm.hpp"
#include "fabric/sim/sim.hpp"
#include "host/engine.hpp"

namespace ferry {
namespace {

FabricKind choose_fabric(Bootstrap& bootstrap, const GroupConfig& config) {
  if (config.fabric != FabricKind::automatic) return config.fabric;
  const auto mine = fabric::to_bytes(fabric::this_identity());
  const auto all = bootstrap.all_gather(mine, config.deadline, config.on_wait);
  std::vector<fabric::Identity> identities;
  for (int peer = 0; peer < bootstrap.size(); ++peer) {
    identities.push_back(
        fabric::identity_from(all[static_cast<std::size_t>(peer)], bootstrap.rank(), peer));
  }
  const fabric::Choice choice = fabric::choose(identities);
  switch (choice.by) {
    case fabric::Reachable::local: return FabricKind::local;
    case fabric::Reachable::shm: return FabricKind::shm;
    case fabric::Reachable::nothing: break;
  }
  throw Error(choice.kind, "Group: " + choice.problem,
              {bootstrap.rank(), choice.peer, "Group: fabric", 0, 0, 0});
}

std::unique_ptr<fabric::Fabric> make_fabric(Bootstrap& bootstrap, const GroupConfig& config) {
  switch (choose_fabric(bootstrap, config)) {
    case FabricKind::shm:
      return fabric::make_shm_fabric(bootstrap, config.deadline, config.on_wait);
    case FabricKind::sim: {
      fabric::SimOptions options;
      options.seed = config.sim_seed;
      return fabric::make_sim_fabric(bootstrap, options, config.deadline, config.on_wait);
    }
    default: return fabric::make_local_fabric(bootstrap, config.deadline, config.on_wait);
  }
}

Engine& live(const std::shared_ptr<Engine>& engine, const char* call) {
  if (!engine) {
    throw Error(ErrorKind::destroyed, std::string(call) + ": the group was moved from");
  }
  return *engine;
}

}  // namespace

Group::Group(std::shared_ptr<Bootstrap> bootstrap, GroupConfig config) {
  if (!bootstrap) refuse("Group", "bootstrap", "null", "a bootstrap");
  check_ranks(bootstrap->size());
  std::optional<Error> invalid;
  try {
    check_config(config);
  } catch (const Error& error) {
    invalid = error;
  }
  agree_on(*bootstrap, config, invalid);
  auto fabric = make_fabric(*bootstrap, config);
  engine_ = config.backend == Backend::cuda
                ? cuda::make_cuda_engine(*bootstrap, config, std::move(fabric))
                : host::make_host_engine(*bootstrap, config, std::move(fabric));
}

Group::~Group() {
  if (engine_) engine_->destroy();
}

Group::Group(Group&&) noexcept = default;

Group& Group::operator=(Group&& other) noexcept {
  if (this != &other) {
    if (engine_) engine_->destroy();
    engine_ = std::move(other.engine_);
  }
  return *this;
}

int Group::rank() const {
  return live(engine_, "rank").rank();
}
int Group::size() const {
  return live(engine_, "size").size();
}
std::int64_t Group::experts() const {
  return config().experts;
}
std::int64_t Group::local_experts() const {
  return Placement{experts(), size()}.local_experts(rank());
}
const GroupConfig& Group::config() const {
  return live(engine_, "config").config();
}
std::string Group::fabric_name() const {
  return live(engine_, "fabric_name").fabric_name();
}

Plan Group::plan(const ConstTensorView& topk_idx, const PlanOptions& options) {
  return live(engine_, "plan").plan(topk_idx, options);
}
Received Group::dispatch(const ConstTensorView& x, const Plan& plan,
                         const DispatchOptions& options) {
  return live(engine_, "dispatch").dispatch(x, plan, options);
}
Received Group::dispatch(const ConstTensorView& x, const ConstTensorView& topk_idx,
                         const DispatchOptions& options) {
  return live(engine_, "dispatch").plan_and_dispatch(x, topk_idx, options);
}
Combined Group::combine(const ConstTensorView& rows, const Plan& plan,
                        const CombineOptions& options) {
  return live(engine_, "combine").combine(rows, plan, options);
}
Tensor Group::empty(const Extents& shape, Dtype dtype) {
  return live(engine_, "empty").empty(shape, dtype);
}
bool Group::is_registered(const void* pointer) const {
  return live(engine_, "is_registered").is_registered(pointer);
}
void Group::record_stream(const void* pointer, const Stream& stream) {
  live(engine_, "record_stream").record_stream(pointer, stream);
}
void Group::barrier() {
  live(engine_, "barrier").barrier();
}
MemoryUse Group::memory() const {
  return live(engine_, "memory").memory();
}
MemoryUse Group::memory_hint(const GroupConfig& config, int ranks) {
  check_ranks(ranks);
  check_config(config);
  return config.backend == Backend::cuda ? cuda::cuda_memory_hint(config, ranks)
                                         : host::host_memory_hint(config, ranks);
}
TimeUse Group::time() const {
  return live(engine_, "time").time();
}
bool Group::has_backend(Backend backend) {
  return backend != Backend::cuda || cuda::available();
}
void Group::destroy() {
  live(engine_, "destroy").destroy();
}
bool Group::destroyed() const {
  return !engine_ || engine_->destroyed();
}

}  // namespace ferry
