// The public Group: agrees on the configuration, picks fabric and engine, then forwards.
#include "ferry/group.hpp"

#include <chrono>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "api/domain_bootstrap.hpp"
#include "api/elastic.hpp"
#include "api/old_options.hpp"
#include "api/wires.hpp"
#include "base/log.hpp"
#include "base/process_limits.hpp"
#include "core/check.hpp"
#include "core/engine.hpp"
#include "core/placement.hpp"
#include "cuda/engine.hpp"
#include "engine/membership/arbiter_creation.hpp"
#include "fabric/local/local.hpp"
#include "fabric/ofi/ofi.hpp"
#include "fabric/shm/shm.hpp"
#include "host/throughput/engine.hpp"

namespace ferry {
namespace {

/// Each domain has an engine of its own, within one for all.
std::shared_ptr<Engine> make_cuda_group(Bootstrap& bootstrap, const GroupConfig& config,
                                        const Inside& inside) {
  auto fabric = make_wires(bootstrap, config, inside);
  open_lobby(bootstrap, config, inside, *fabric);
  if (inside.domains.count() == 1 || inside.kind == FabricKind::sim) {  // which it refuses itself
    (void)engine::arbiter_of(config, inside.domains, *fabric);          // refuses one
    return cuda::make_cuda_engine(bootstrap, config, std::move(fabric));
  }
  DomainBootstrap part(bootstrap, inside.domains);
  return cuda::make_cuda_domain_engine(bootstrap, config, inside.domains, std::move(fabric),
                                       wires_inside(part, config, inside));
}

std::shared_ptr<Engine> make_group_engine(Bootstrap& bootstrap, GroupConfig config) {
  if (bootstrap.joins()) return join_group(bootstrap, std::move(config));
  if (bootstrap.begins()) return begin_group(bootstrap, std::move(config));
  const Inside inside = agree_on_wires(bootstrap, config);
  if (config.backend == Backend::cuda) return make_cuda_group(bootstrap, config, inside);
  auto fabric = make_wires(bootstrap, config, inside);
  open_lobby(bootstrap, config, inside, *fabric);
  return host::make_host_engine(bootstrap, config, inside.domains, std::move(fabric));
}

void log_group(const Engine& engine, std::chrono::nanoseconds took) {
  const GroupConfig& config = engine.config();
  const MemoryStats memory = engine.memory();
  log(LogLevel::info, engine.rank(), "group",
      {{"size", engine.size()},
       {"fabric", engine.fabric_name()},
       {"backend", config.backend == Backend::cuda ? "cuda" : "host"},
       {"domains", engine.domains()},
       {"domain", engine.domain_of(engine.rank())},
       {"experts", config.experts},
       {"deadline", log_seconds(config.deadline.count())},
       {"arena_bytes", memory.arena_bytes},
       {"control_bytes", memory.control_bytes},
       {"seconds", log_seconds(took.count())}});
}

Engine& live(const std::shared_ptr<Engine>& engine, const char* call) {
  if (!engine) {
    throw Error(ErrorKind::destroyed, std::string(call) + ": the group was moved from");
  }
  return *engine;
}

/// A call that may run out of memory on the way to its exchange.
template <class Work>
auto call(const std::shared_ptr<Engine>& engine, const char* name, Work work) {
  Engine& there = live(engine, name);
  return in_words(there.rank(), name, [&] { return work(there); });
}

}  // namespace

Group::Group(std::shared_ptr<Bootstrap> bootstrap, GroupConfig config) {
  if (!bootstrap) refuse("Group", "bootstrap", "null", "a bootstrap");
  check_ranks(bootstrap->size());
  const auto start = std::chrono::steady_clock::now();
  engine_ = in_words(bootstrap->rank(), "Group",
                     [&] { return make_group_engine(*bootstrap, std::move(config)); });
  if (logs(LogLevel::info)) {
    log_group(*engine_, std::chrono::steady_clock::now() - start);
  }
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

int Group::domains() const {
  return live(engine_, "domains").domains();
}
int Group::domain_of(int rank) const {
  const Engine& engine = live(engine_, "domain_of");
  if (rank < 0 || rank >= engine.size()) {
    refuse("domain_of", "rank", std::to_string(rank), "0 … " + std::to_string(engine.size() - 1));
  }
  return engine.domain_of(rank);
}

Plan Group::plan(const ConstTensorView& topk_idx, const PlanOptions& options) {
  return call(engine_, "plan", [&](Engine& engine) { return engine.plan(topk_idx, options); });
}
Received Group::dispatch(const ConstTensorView& x, const Plan& plan,
                         const DispatchOptions& options) {
  return call(engine_, "dispatch",
              [&](Engine& engine) { return engine.dispatch(x, plan, with_new_names(options)); });
}
Received Group::dispatch(const ConstTensorView& x, const ConstTensorView& topk_idx,
                         const DispatchOptions& options) {
  return call(engine_, "dispatch", [&](Engine& engine) {
    return engine.plan_and_dispatch(x, topk_idx, with_new_names(options));
  });
}
Combined Group::combine(const ConstTensorView& rows, const Plan& plan,
                        const CombineOptions& options) {
  return call(engine_, "combine",
              [&](Engine& engine) { return engine.combine(rows, plan, with_new_names(options)); });
}
Tensor Group::empty(const Extents& shape, Dtype dtype) {
  return call(engine_, "empty", [&](Engine& engine) { return engine.empty(shape, dtype); });
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
GroupView Group::regroup() {
  return call(engine_, "regroup", [](Engine& engine) { return engine.regroup(); });
}
bool Group::commit(std::uint64_t step) {
  return live(engine_, "commit").commit(step);
}
GroupView Group::view() const {
  return live(engine_, "view").group_view();
}
MemoryStats Group::memory() const {
  return live(engine_, "memory").memory();
}
MemoryStats Group::memory_hint(const GroupConfig& config, int ranks) {
  check_ranks(ranks);
  check_config(config);
  const bool several = config.domain_size > 0 && config.domain_size < ranks;
  if (config.backend == Backend::cuda && several) {
    return cuda::cuda_domain_memory_hint(config, ranks);
  }
  return config.backend == Backend::cuda ? cuda::cuda_memory_hint(config, ranks)
                                         : host::host_memory_hint(config, ranks);
}
TimeStats Group::time() const {
  return live(engine_, "time").time();
}
Metrics Group::metrics() const {
  return live(engine_, "metrics").metrics();
}
void Group::start_trace(std::size_t most) {
  live(engine_, "start_trace").start_trace(most);
}
Trace Group::take_trace() {
  return live(engine_, "take_trace").take_trace();
}
NetworkStats Group::network() const {
  return live(engine_, "network").network();
}
std::vector<TunedCall> Group::tuning() const {
  return live(engine_, "tuning").tuning();
}
std::vector<NicStats> Group::nics() const {
  return live(engine_, "nics").nics();
}
bool Group::has_backend(Backend backend) {
  return backend != Backend::cuda || cuda::available();
}
bool Group::has_fabric(FabricKind kind) {
  return kind != FabricKind::ofi || fabric::ofi_is_built();
}
void Group::destroy() {
  live(engine_, "destroy").destroy();
}
bool Group::destroyed() const {
  return !engine_ || engine_->destroyed();
}

}  // namespace ferry
