#include "host/collectives/engine.hpp"

#include <algorithm>
#include <string>
#include <thread>
#include <utility>

#include "core/check.hpp"
#include "host/collectives/point_to_point.hpp"
#include "host/kernels/kernels.hpp"

namespace ferry::host {

namespace {

using Clock = std::chrono::steady_clock;

// Of a link that nothing is known about.
constexpr double kFirstLatency = 50e-6, kFirstRate = 1e9;

}  // namespace

std::size_t eager_bytes(int ranks) {
  constexpr std::size_t kMost = std::size_t{16} << 10;
  constexpr std::size_t kTogether = std::size_t{1} << 20;  // of the mailboxes of a rank
  const auto r = static_cast<std::size_t>(ranks);
  // The counts of all_to_all always fit.
  return std::max(std::min(kMost, kTogether / r / 2), 2 * r * sizeof(std::int64_t));
}

CollectiveStaging CollectiveStaging::of(const Domains& domains) {
  // So that a round has a unit of elements, of at most 8 bytes, of every rank.
  const std::size_t unit = kShareUnit * sizeof(std::int64_t);
  CollectiveStaging staging;
  // Inside a domain a window is read while it is in the caches; what crosses is better long: each
  // round costs the ranks of several hosts a few turns on their cores.
  const std::size_t room = std::size_t{domains.count() == 1 ? 512u : 4096u} << 10;
  staging.window_bytes = std::max(room, static_cast<std::size_t>(domains.ranks()) * unit);
  if (domains.count() == 1) return staging;
  // Partial results of 4 bytes of a window of 2-byte elements, and what the shortest rounds need.
  staging.inbox_bytes =
      2 * staging.window_bytes + kInboxes * index(smallest_inbox(domains)) * sizeof(std::int64_t);
  return staging;
}

std::shared_ptr<CollectivesEngine> make_host_collectives(Bootstrap& bootstrap, GroupConfig config,
                                                         const Domains& domains,
                                                         std::unique_ptr<fabric::Fabric> fabric,
                                                         int mean_ranks) {
  config.experts = 1;
  config.memory_bytes += CollectiveStaging::of(domains).all_bytes() +
                         PacketLayout::of(domains.ranks()).bytes + 2 * engine::kRegionAlignment;
  auto made = std::make_shared<HostCollectives>(
      make_host_engine(bootstrap, config, domains, std::move(fabric), eager_bytes(domains.ranks())),
      mean_ranks);
  if (domains.count() > 1) made->measure_links();
  return made;
}

HostCollectives::HostCollectives(std::shared_ptr<HostEngine> engine, int mean_ranks)
    : engine_(std::move(engine)),
      mean_ranks_(mean_ranks > 0 ? mean_ranks : engine_->size()),
      staging_(CollectiveStaging::of(domains())),
      choice_(domains(), {kFirstLatency, kFirstRate}) {
  const auto& memory = engine_->shared_memory();
  const Region region = memory->arena.allocate(staging_.all_bytes()).value();
  staging_memory_ = engine::lease(memory, region);
  staging_address_ = region.address;
  transfers_ = std::make_shared<PointToPoint>(
      engine_, memory->arena.allocate(PacketLayout::of(size()).bytes).value());
}

HostCollectives::~HostCollectives() {
  transfers_->stop();  // also where somebody still waits for one
}

void HostCollectives::meet(const char* call, StepMessage head, std::span<const std::byte> body) {
  come(head);
  channel().swap(call, head, body);
  end_meeting(call, head);
}

void HostCollectives::meet(const char* call, StepMessage head, const Channel::WriteBody& write) {
  come(head);
  channel().swap(call, head, write);
  end_meeting(call, head);
}

void HostCollectives::come(StepMessage& head) {
  head.report = report_;
  stores_.before_s = std::chrono::duration<double>(Clock::now() - stores_.begin).count();
  fence_stores();
}

void HostCollectives::end_meeting(const char* call, const StepMessage& head) {
  engine::check_same_call(channel(), call, head.call);
  take_reports();  // on all ranks or none: whoever differs from one has thrown everywhere
  met_ = Clock::now();
}

void HostCollectives::meet_members(const char* call) {
  fence_stores();
  for (const int member : members()) {
    if (member != rank()) tell(member);
  }
  for (const int member : members()) {
    if (member != rank()) hear(call, member);
  }
}

Error HostCollectives::fail(const char* call, const Error& error) {
  using namespace std::chrono_literals;
  constexpr auto kHearsay =
      200ms;  // what others say of it, and the kernel of a death, comes by then
  const int culprit = error.peer();
  const auto hear = [&] {
    if (culprit >= 0)
      (void)channel().poll(
          call, [] { return engine::Channel::kUnknownEnd; },
          [culprit](int peer) { return peer == culprit; });
    return channel().dead().has_value();
  };
  const bool of_peer = culprit >= 0 && (error.kind() == ErrorKind::peer_failed ||
                                        error.kind() == ErrorKind::peer_left);
  const auto end = Clock::now() + (of_peer ? kHearsay : 0ms);
  while (!hear() && Clock::now() < end) std::this_thread::sleep_for(1ms);
  const ErrorContext& context = error.context();
  if (!channel().dead() && error.kind() == ErrorKind::deadline && culprit >= 0) {
    (void)channel().late(call, culprit, context.expected, context.seen);
  }
  if (!channel().dead()) channel().fail(call, error.what(), error.kind());
  const auto dead = channel().dead();  // none where this rank has left
  return dead ? *dead : error;
}

void copy_result(std::size_t whole, void* to, const void* from, std::size_t bytes) {
  if (whole < kStreamBytes || bytes == 0 || to == from) return copy_bytes(to, from, bytes);
  kernels().copy_stream(to, from, bytes);
  kernels().stream_fence();  // before anything tells that it is there
}

Event HostCollectives::enter(const char* call, Stream* stream,
                             std::function<void(HostCollectives&)> run) {
  HostEngine::Call entered(*engine_, call);
  return engine_->enter(
      call, stream,
      [self = shared_from_this(), run = std::move(run)] {
        self->stores_.used = false;
        run(*self);
        self->end_windows();
      },
      &entered);
}

ReduceFormat usable_format(const ReduceOptions& options, Dtype dtype) {
  const bool adds = options.op == ReduceOp::sum || options.op == ReduceOp::mean;
  return adds && dtype == Dtype::f32 ? options.format : ReduceFormat::exact;
}

Event HostCollectives::all_reduce(const TensorView& x, const ReduceOptions& options) {
  const std::size_t bytes = static_cast<std::size_t>(x.shape.product()) * size_of(x.dtype);
  if (options.algorithm == Algorithm::one_shot && bytes > eager_bytes(size())) {
    refuse("all_reduce", "algorithm", "one_shot for " + std::to_string(bytes) + " bytes",
           "at most " + std::to_string(eager_bytes(size())) + " bytes, or another algorithm");
  }
  if (!options.shares.empty() && std::ssize(options.shares) != domains().count()) {
    refuse("all_reduce", "shares", std::to_string(options.shares.size()) + " numbers",
           std::to_string(domains().count()) + ", one for each domain");
  }
  return enter("all_reduce", options.stream,
               [x, options](HostCollectives& all) { run_all_reduce(all, x, options); });
}

Event HostCollectives::reduce_scatter(const ConstTensorView& x, const TensorView& out,
                                      const ReduceOptions& options) {
  return enter("reduce_scatter", options.stream,
               [x, out, op = options.op, format = usable_format(options, x.dtype)](
                   HostCollectives& all) { run_reduce_scatter(all, x, out, op, format); });
}

Event HostCollectives::all_gather(const ConstTensorView& x, const TensorView& out,
                                  const CollectiveOptions& options) {
  return enter("all_gather", options.stream,
               [x, out](HostCollectives& all) { run_all_gather(all, x, out); });
}

Event HostCollectives::broadcast(const TensorView& x, int root, const CollectiveOptions& options) {
  return enter("broadcast", options.stream,
               [x, root](HostCollectives& all) { run_broadcast(all, x, root); });
}

Event HostCollectives::all_to_all(const ConstTensorView& x, const TensorView& out,
                                  BlockCounts counts, const CollectiveOptions& options) {
  return enter("all_to_all", options.stream,
               [x, out, counts = std::move(counts)](HostCollectives& all) {
                 run_all_to_all(all, x, out, counts);
               });
}

Event HostCollectives::move_rows(const ConstTensorView& x, const TensorView& out, RowTable table,
                                 const CollectiveOptions& options) {
  const char* call = table.adds ? "add_rows" : "copy_rows";
  if (domains().count() > 1) {
    throw Error(ErrorKind::unsupported,
                std::string(call) + ": got ranks in " + std::to_string(domains().count()) +
                    " domains; expected one domain: use all_to_all between domains");
  }
  return enter(call, options.stream, [x, out, table = std::move(table)](HostCollectives& all) {
    run_rows(all, x, out, table);
  });
}

Event HostCollectives::send(const ConstTensorView& x, int peer, int tag,
                            const CollectiveOptions& options) {
  return transfer(true, const_cast<void*>(x.data), x.bytes(), peer, tag, options.stream);
}

Event HostCollectives::recv(const TensorView& x, int peer, int tag,
                            const CollectiveOptions& options) {
  return transfer(false, x.data, x.bytes(), peer, tag, options.stream);
}

Event HostCollectives::transfer(bool sends, void* data, std::size_t bytes, int peer, int tag,
                                Stream* stream) {
  const auto made = transfers_->make(sends, data, bytes, peer, tag);
  engine_->channel().check_usable(made->call());
  if (stream == nullptr) {
    transfers_->begin(made, true);
    made->wait(std::chrono::hours(24), {});
    return {};
  }
  stream->queue()->start(
      [self = shared_from_this(), made] { self->transfers_->begin(made, false); }, Event(made));
  return Event(made);
}

}  // namespace ferry::host
