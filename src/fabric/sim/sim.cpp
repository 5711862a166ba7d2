#include "fabric/sim/sim.hpp"

#include <algorithm>
#include <atomic>
#include <ferry/error.hpp>
#include <map>
#include <mutex>
#include <string>
#include <utility>

#include "fabric/local/thread_hub.hpp"
#include "fabric/rendezvous.hpp"
#include "fabric/segment_table.hpp"
#include "fabric/sim/target.hpp"

namespace ferry::fabric {
namespace {

constexpr std::size_t kMaxPieces = 5;

/// SplitMix64 (Steele, Lea and Flood, "Fast splittable pseudorandom number generators", 2014): the
/// same numbers on every platform, unlike std::uniform_int_distribution.
class Dice {
 public:
  explicit Dice(std::uint64_t seed) : state_(seed) {}
  std::uint64_t roll() {
    std::uint64_t z = (state_ += 0x9e3779b97f4a7c15);
    z = (z ^ (z >> 30)) * 0xbf58476d1ce4e5b9;
    z = (z ^ (z >> 27)) * 0x94d049bb133111eb;
    return z ^ (z >> 31);
  }
  /// 0 to `last`.
  std::uint64_t upto(std::uint64_t last) { return last == ~0ull ? roll() : roll() % (last + 1); }

 private:
  std::uint64_t state_;
};

/// Shared by all ranks; ends with the last of them.
struct Network {
  Network(const SimOptions& given, int ranks, const JobKey& key)
      : options(given), hub(Wire::sim, ranks, key), dead(static_cast<std::size_t>(ranks)) {
    for (int r = 0; r < ranks; ++r) {
      targets.push_back(std::make_unique<SimTarget>(ranks, options.queue_bytes));
    }
  }
  SimOptions options;
  ThreadHub hub;
  std::vector<std::atomic<bool>> dead;
  std::vector<std::unique_ptr<SimTarget>> targets;
};

class SimFabric final : public Fabric {
 public:
  SimFabric(int rank, int size, std::shared_ptr<Network> network);
  ~SimFabric() override { network_->hub.withdraw_all(rank_); }

  std::string_view name() const override { return "sim"; }
  int rank() const override { return rank_; }
  int size() const override { return size_; }
  Segment register_memory(std::size_t bytes) override;
  Segment adopt(const Segment& segment) override;
  void attach(int peer, SegmentId segment, std::size_t bytes,
              std::span<const std::byte> handle) override;
  void seal(SegmentId segment) override { network_->hub.withdraw(rank_, segment); }
  void forget(int /*peer*/) noexcept override {}
  std::byte* pointer(int peer, SegmentId segment) const noexcept override;
  std::size_t bytes(int peer, SegmentId segment) const noexcept override {
    return segments_.bytes(peer, segment);
  }
  void put(int peer, Address to, const void* from, std::size_t bytes, std::uint64_t tag) override;
  void publish(int peer, Address flag, std::uint64_t value, std::uint64_t bytes,
               std::uint64_t tag) override;
  PeerState peer_state(int peer) noexcept override;
  NetworkStats network_use() const noexcept override;

 private:
  /// The way from this rank to one target.
  struct Route {
    explicit Route(std::uint64_t seed) : dice(seed) {}
    Dice dice;
    std::map<std::pair<SegmentId, std::uint64_t>, std::uint64_t> published;  // by flag word
    SimClock::time_point newest{};  // latest due time so far
  };

  SimTarget& target(int peer) { return *network_->targets[static_cast<std::size_t>(peer)]; }
  Route& route(int peer) { return routes_[static_cast<std::size_t>(peer)]; }
  SimClock::time_point due(Route& route, int peer, std::size_t bytes);
  /// Counts one put or publish; whether it vanishes.
  bool vanishes();

  int rank_;
  int size_;
  std::shared_ptr<Network> network_;
  SegmentTable segments_;
  mutable std::mutex mutex_;   // of what follows
  std::vector<Route> routes_;  // by target
  std::uint64_t operations_ = 0;
  SimClock::time_point link_free_{};  // of a rank whose link has a rate
  NetworkStats use_{};
};

SimFabric::SimFabric(int rank, int size, std::shared_ptr<Network> network)
    : rank_(rank), size_(size), network_(std::move(network)), segments_(rank, size) {
  for (int peer = 0; peer < size; ++peer) {
    Dice mixed(network_->options.seed);
    const auto way = static_cast<std::uint64_t>(rank) << 32 | static_cast<std::uint32_t>(peer);
    routes_.emplace_back(mixed.roll() ^ Dice(way).roll());
  }
}

Segment SimFabric::register_memory(std::size_t bytes) {
  auto memory = anonymous_memory(bytes, rank_);
  const SegmentId id = segments_.next();
  Segment segment{id, memory->data(), bytes, network_->hub.offer(rank_, id, bytes, memory), memory};
  segments_.add(rank_, id, std::move(memory), bytes);
  return segment;
}

Segment SimFabric::adopt(const Segment& segment) {
  segments_.check_adopted(segment, "the simulated network");
  Segment shared = segment;
  shared.handle = network_->hub.offer(rank_, segment.id, segment.bytes, segment.memory);
  segments_.add(rank_, segment.id, segment.memory, segment.bytes);
  return shared;
}

void SimFabric::attach(int peer, SegmentId segment, std::size_t bytes,
                       std::span<const std::byte> handle) {
  check_peer(peer, size_, rank_, "attach");
  if (peer == rank_) return;
  segments_.add(peer, segment, network_->hub.take(rank_, peer, segment, bytes, handle), bytes);
}

std::byte* SimFabric::pointer(int peer, SegmentId segment) const noexcept {
  const SegmentTable::Entry* entry = peer == rank_ ? segments_.find(peer, segment) : nullptr;
  return entry == nullptr ? nullptr : entry->memory->data();
}

SimClock::time_point SimFabric::due(Route& route, int peer, std::size_t bytes) {
  const SimOptions& options = network_->options;
  const auto delay = std::chrono::microseconds(route.dice.upto(options.max_delay_us));
  SimClock::time_point when = SimClock::now();
  if (options.bytes_per_us > 0 && peer != rank_) {
    const std::chrono::nanoseconds takes(bytes * 1000 / options.bytes_per_us);
    link_free_ = std::max(link_free_, when) + takes;
    when = std::max(link_free_, target(peer).occupy(takes));
  }
  when += delay;
  if (!options.reorder) when = std::max(when, route.newest);
  route.newest = std::max(when, route.newest);
  return when;
}

bool SimFabric::vanishes() {
  const SimOptions& options = network_->options;
  ++operations_;
  if (rank_ == options.stall_rank && operations_ > options.stall_after_ops) return true;
  if (rank_ != options.fail_rank || operations_ <= options.fail_after_ops) return false;
  // relaxed: a fact by itself, no data goes with it
  network_->dead[static_cast<std::size_t>(rank_)].store(true, std::memory_order_relaxed);
  return true;
}

void SimFabric::put(int peer, Address to, const void* from, std::size_t bytes, std::uint64_t tag) {
  const auto& entry = segments_.checked(peer, to, bytes, "put");
  const std::lock_guard lock(mutex_);
  if (peer != rank_) {
    use_.put_bytes += bytes;
    ++use_.puts;
  }
  if (bytes == 0 || vanishes()) return;
  Route& way = route(peer);
  const auto* first = static_cast<const std::byte*>(from);
  const auto data = std::make_shared<const std::vector<std::byte>>(first, first + bytes);
  std::vector<std::size_t> ends{bytes};
  if (network_->options.split) {
    for (auto cuts = way.dice.upto(kMaxPieces - 1); cuts > 0; --cuts) {
      ends.push_back(static_cast<std::size_t>(way.dice.upto(bytes - 1)));
    }
    std::sort(ends.begin(), ends.end());
  }
  std::vector<SimParcel> parcels;
  std::size_t start = 0;
  for (const std::size_t end : ends) {
    if (end == start) continue;
    parcels.push_back({.due = due(way, peer, end - start),
                       .source = rank_,
                       .data = data,
                       .from = start,
                       .bytes = end - start,
                       .memory = entry.memory,
                       .offset = to.offset + start,
                       .tag = tag});
    start = end;
  }
  target(peer).send(std::move(parcels));
}

void SimFabric::publish(int peer, Address flag, std::uint64_t value, std::uint64_t bytes,
                        std::uint64_t tag) {
  const auto& entry = segments_.checked_flag(peer, flag, "publish");
  const std::lock_guard lock(mutex_);
  if (peer != rank_) ++use_.signals;
  if (vanishes()) return;
  Route& way = route(peer);
  SimParcel parcel{.due = due(way, peer, 0), .source = rank_};
  parcel.signal = {.sequence = ++way.published[{flag.segment, flag.offset}],
                   .flag = {entry.memory, flag.offset},
                   .value = value,
                   .tag = tag,
                   .bytes = bytes};
  std::vector<SimParcel> parcels;
  parcels.push_back(std::move(parcel));
  target(peer).send(std::move(parcels));
}

NetworkStats SimFabric::network_use() const noexcept {
  const std::lock_guard lock(mutex_);
  return use_;
}

PeerState SimFabric::peer_state(int peer) noexcept {
  if (peer < 0 || peer >= size_) return PeerState::unknown;
  // relaxed: a fact by itself, no data goes with it
  const bool dead = network_->dead[static_cast<std::size_t>(peer)].load(std::memory_order_relaxed);
  return dead && peer != rank_ ? PeerState::dead : PeerState::alive;
}

void check_options(const SimOptions& options, int rank, int size) {
  for (const auto& [name, value] :
       {std::pair{"fail_rank", options.fail_rank}, std::pair{"stall_rank", options.stall_rank}}) {
    if (value >= -1 && value < size) continue;
    throw Error(ErrorKind::invalid_argument,
                "rank " + std::to_string(rank) + ": SimOptions::" + name + " is " +
                    std::to_string(value) + ", expected -1 to " + std::to_string(size - 1),
                {.rank = rank});
  }
}

}  // namespace

std::unique_ptr<Fabric> make_sim_fabric(Bootstrap& bootstrap, const SimOptions& options,
                                        std::chrono::nanoseconds deadline, const OnWait& on_wait) {
  const int rank = bootstrap.rank();
  const int size = bootstrap.size();
  check_options(options, rank, size);
  auto network = share_between_threads(Wire::sim, bootstrap, deadline, on_wait, [&] {
    return std::make_shared<Network>(options, size, random_key(rank));
  });
  return std::make_unique<SimFabric>(rank, size, std::static_pointer_cast<Network>(network));
}

}  // namespace ferry::fabric
