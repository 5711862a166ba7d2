// The public Collectives: checks arguments, then forwards to the engine.
#include "ferry/collectives.hpp"

#include <string>
#include <utility>

#include "api/domain_bootstrap.hpp"
#include "api/rails.hpp"
#include "api/wires.hpp"
#include "base/process_limits.hpp"
#include "core/check.hpp"
#include "core/check_collectives.hpp"
#include "core/engine.hpp"
#include "cuda/engine.hpp"
#include "host/collectives/engine.hpp"

namespace ferry {
namespace {

/// Each domain has collectives of its own, within those of all.
std::shared_ptr<CollectivesEngine> make_cuda_collectives(Bootstrap& bootstrap,
                                                         const GroupConfig& config,
                                                         const Inside& inside) {
  if (inside.domains.count() == 1 || !cuda::available()) {  // which it refuses itself
    return cuda::make_cuda_collectives(bootstrap, config, make_wires(bootstrap, config, inside));
  }
  cuda::CollectiveWires rails = make_rails(bootstrap, config, inside);
  DomainBootstrap part(bootstrap, inside.domains);
  return cuda::make_cuda_domain_collectives(bootstrap, config, inside.domains, std::move(rails),
                                            wires_inside(part, config, inside));
}

std::shared_ptr<CollectivesEngine> make_collectives(Bootstrap& bootstrap, GroupConfig config) {
  config.experts = 1;
  if (!config.elastic.empty()) {
    refuse("Collectives", "elastic", "a name", "none: make them anew of the ranks that are there");
  }
  const Inside inside = agree_on_wires(bootstrap, config);
  if (config.backend == Backend::cuda) return make_cuda_collectives(bootstrap, config, inside);
  return host::make_host_collectives(bootstrap, config, inside.domains,
                                     make_wires(bootstrap, config, inside));
}

CollectivesEngine& live(const std::shared_ptr<CollectivesEngine>& engine, const char* call) {
  if (!engine) {
    throw Error(ErrorKind::destroyed, std::string(call) + ": the collectives were moved from");
  }
  return *engine;
}

/// A call that may run out of memory on the way to its exchange.
template <class Work>
auto call(const std::shared_ptr<CollectivesEngine>& engine, const char* name, Work work) {
  CollectivesEngine& there = live(engine, name);
  return in_words(there.engine().rank(), name, [&] { return work(there); });
}

}  // namespace

Collectives::Collectives(std::shared_ptr<Bootstrap> bootstrap, GroupConfig config) {
  if (!bootstrap) refuse("Collectives", "bootstrap", "null", "a bootstrap");
  check_ranks(bootstrap->size());
  engine_ = in_words(bootstrap->rank(), "Collectives",
                     [&] { return make_collectives(*bootstrap, std::move(config)); });
}

Collectives::~Collectives() {
  if (engine_) engine_->engine().destroy();
}

Collectives::Collectives(Collectives&&) noexcept = default;

Collectives& Collectives::operator=(Collectives&& other) noexcept {
  if (this != &other) {
    if (engine_) engine_->engine().destroy();
    engine_ = std::move(other.engine_);
  }
  return *this;
}

int Collectives::rank() const {
  return live(engine_, "rank").engine().rank();
}
int Collectives::size() const {
  return live(engine_, "size").engine().size();
}
int Collectives::domains() const {
  return live(engine_, "domains").engine().domains();
}
std::string Collectives::fabric_name() const {
  return live(engine_, "fabric_name").engine().fabric_name();
}

Event Collectives::all_reduce(const TensorView& x, const ReduceOptions& options) {
  return call(engine_, "all_reduce", [&](CollectivesEngine& engine) {
    check_dense("all_reduce", "x", x, engine.device());
    check_reduction("all_reduce", x, options);
    check_stream("all_reduce", options.stream, engine.device());
    return engine.all_reduce(x, options);
  });
}

Choice Collectives::choice(std::size_t bytes, bool any_order) const {
  return live(engine_, "choice").choice(bytes, any_order);
}

Event Collectives::reduce_scatter(const ConstTensorView& x, const TensorView& out,
                                  const ReduceOptions& options) {
  return call(engine_, "reduce_scatter", [&](CollectivesEngine& engine) {
    check_blocks("reduce_scatter", "x", x, "out", out, rank(), size(), engine.device());
    check_reduction("reduce_scatter", x, options);
    check_stream("reduce_scatter", options.stream, engine.device());
    return engine.reduce_scatter(x, out, options);
  });
}

Event Collectives::all_gather(const ConstTensorView& x, const TensorView& out,
                              const CollectiveOptions& options) {
  return call(engine_, "all_gather", [&](CollectivesEngine& engine) {
    check_blocks("all_gather", "out", out, "x", x, rank(), size(), engine.device());
    check_stream("all_gather", options.stream, engine.device());
    return engine.all_gather(x, out, options);
  });
}

Event Collectives::broadcast(const TensorView& x, int root, const CollectiveOptions& options) {
  return call(engine_, "broadcast", [&](CollectivesEngine& engine) {
    check_dense("broadcast", "x", x, engine.device());
    if (root < 0 || root >= size()) {
      refuse("broadcast", "root", std::to_string(root), "0 … " + std::to_string(size() - 1));
    }
    check_stream("broadcast", options.stream, engine.device());
    return engine.broadcast(x, root, options);
  });
}

Event Collectives::all_to_all(const ConstTensorView& x, const TensorView& out,
                              const CollectiveOptions& options) {
  return call(engine_, "all_to_all", [&](CollectivesEngine& engine) {
    check_stream("all_to_all", options.stream, engine.device());
    return engine.all_to_all(x, out, equal_counts(x, out, size(), engine.device()), options);
  });
}

Event Collectives::all_to_all(const ConstTensorView& x, std::span<const std::int64_t> send_counts,
                              const TensorView& out, std::span<const std::int64_t> recv_counts,
                              const CollectiveOptions& options) {
  return call(engine_, "all_to_all", [&](CollectivesEngine& engine) {
    check_stream("all_to_all", options.stream, engine.device());
    return engine.all_to_all(
        x, out, checked_counts(x, send_counts, out, recv_counts, size(), engine.device()), options);
  });
}

Event Collectives::copy_rows(const ConstTensorView& x, const TensorView& out,
                             std::span<const std::int32_t> table,
                             const CollectiveOptions& options) {
  return call(engine_, "copy_rows", [&](CollectivesEngine& engine) {
    check_stream("copy_rows", options.stream, engine.device());
    return engine.move_rows(x, out, checked_table(false, x, out, table, size(), engine.device()),
                            options);
  });
}

Event Collectives::add_rows(const ConstTensorView& x, const TensorView& out,
                            std::span<const std::int32_t> table, const CollectiveOptions& options) {
  return call(engine_, "add_rows", [&](CollectivesEngine& engine) {
    check_stream("add_rows", options.stream, engine.device());
    return engine.move_rows(x, out, checked_table(true, x, out, table, size(), engine.device()),
                            options);
  });
}

Event Collectives::copy_rows(const ConstTensorView& x, const TensorView& out,
                             const ConstTensorView& table, const CollectiveOptions& options) {
  return call(engine_, "copy_rows", [&](CollectivesEngine& engine) {
    check_stream("copy_rows", options.stream, engine.device());
    return engine.move_rows(
        x, out, checked_gpu_table(false, x, out, table, size(), engine.device()), options);
  });
}

Event Collectives::add_rows(const ConstTensorView& x, const TensorView& out,
                            const ConstTensorView& table, const CollectiveOptions& options) {
  return call(engine_, "add_rows", [&](CollectivesEngine& engine) {
    check_stream("add_rows", options.stream, engine.device());
    return engine.move_rows(x, out, checked_gpu_table(true, x, out, table, size(), engine.device()),
                            options);
  });
}

Event Collectives::send(const ConstTensorView& x, int peer, int tag,
                        const CollectiveOptions& options) {
  return call(engine_, "send", [&](CollectivesEngine& engine) {
    check_dense("send", "x", x, engine.device());
    check_peer("send", peer, rank(), size());
    check_stream("send", options.stream, engine.device());
    return engine.send(x, peer, tag, options);
  });
}

Event Collectives::recv(const TensorView& x, int peer, int tag, const CollectiveOptions& options) {
  return call(engine_, "recv", [&](CollectivesEngine& engine) {
    check_dense("recv", "x", x, engine.device());
    check_peer("recv", peer, rank(), size());
    check_stream("recv", options.stream, engine.device());
    return engine.recv(x, peer, tag, options);
  });
}

Window Collectives::window(std::int64_t rows, std::int64_t columns, Dtype dtype) {
  return call(engine_, "window", [&](CollectivesEngine& engine) {
    if (rows < 0 || rows > kMaxRows) {
      refuse("window", "rows", std::to_string(rows), "0 … " + std::to_string(kMaxRows));
    }
    if (columns < 1) refuse("window", "columns", std::to_string(columns), "at least 1");
    if (columns > static_cast<std::int64_t>(kMaxRowBytes / size_of(dtype))) {
      refuse("window", "columns", std::to_string(columns), "rows of at most 1 GiB");
    }
    return Window(engine.window(rows, columns, dtype));
  });
}

void Collectives::barrier() {
  call(engine_, "barrier", [](CollectivesEngine& engine) { engine.engine().barrier(); });
}

Tensor Collectives::empty(const Extents& shape, Dtype dtype) {
  return call(engine_, "empty",
              [&](CollectivesEngine& engine) { return engine.engine().empty(shape, dtype); });
}
bool Collectives::is_registered(const void* pointer) const {
  return live(engine_, "is_registered").engine().is_registered(pointer);
}
MemoryStats Collectives::memory() const {
  return live(engine_, "memory").engine().memory();
}
TimeStats Collectives::time() const {
  return live(engine_, "time").engine().time();
}
NetworkStats Collectives::network() const {
  return live(engine_, "network").engine().network();
}
CompressionStats Collectives::compression() const {
  return live(engine_, "compression").compression();
}
void Collectives::destroy() {
  live(engine_, "destroy").engine().destroy();
}
bool Collectives::destroyed() const {
  return !engine_ || engine_->engine().destroyed();
}

}  // namespace ferry
