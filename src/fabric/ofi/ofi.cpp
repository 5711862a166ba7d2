#include "fabric/ofi/ofi.hpp"

#include <algorithm>
#include <array>
#include <atomic>
#include <cstring>
#include <ferry/error.hpp>
#include <map>
#include <mutex>
#include <optional>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "fabric/identity.hpp"
#include "fabric/ofi/greeting.hpp"
#include "fabric/ofi/lane.hpp"
#include "fabric/segment_handle.hpp"
#include "fabric/segment_table.hpp"
#include "fabric/shm/names.hpp"

namespace ferry::fabric {
namespace {

using ofi::Lane;
using ofi::Remote;

/// Nothing from a peer for so long: it is stopped, cut off or gone.
constexpr std::chrono::nanoseconds kSilent = std::chrono::milliseconds(1000);
/// How long a lane's thread looks before it sleeps; and a thread that waits for a peer, which does
/// the lane's work meanwhile.
constexpr std::chrono::nanoseconds kSpin = std::chrono::microseconds(20);
constexpr std::chrono::nanoseconds kPatience = std::chrono::microseconds(100);
constexpr std::chrono::nanoseconds kShortPatience = std::chrono::microseconds(1);

/// A segment's handle: what every fabric says, and how each lane writes there.
struct OfiHandle {
  std::uint64_t base = 0;  // the same on all lanes: an address or nothing
  std::array<std::uint64_t, kMaxOfiEndpoints> keys{};
  SegmentHandle segment{};
};
static_assert(sizeof(OfiHandle) <= kMaxHandleBytes);

class OfiFabric final : public Fabric {
 public:
  OfiFabric(int rank, int size, const JobKey& key, std::chrono::nanoseconds patience,
            std::vector<std::unique_ptr<Lane>> lanes)
      : rank_(rank),
        size_(size),
        patience_(patience),
        // In handles and for comparison only; the key itself stays in this process.
        job_{siphash(key, ~0ull, 2), siphash(key, ~0ull, 3)},
        segments_(rank, size),
        own_(1),
        lanes_(std::move(lanes)) {}

  ~OfiFabric() override {
    for (auto& lane : lanes_) {
      if (lane->in_forked_child()) static_cast<void>(lane.release());  // the parent's
    }
  }

  std::string_view name() const override { return "ofi"; }
  int rank() const override { return rank_; }
  int size() const override { return size_; }
  Segment register_memory(std::size_t bytes) override;
  Segment adopt(const Segment& segment) override;
  void attach(int peer, SegmentId segment, std::size_t bytes,
              std::span<const std::byte> handle) override;
  void seal(SegmentId /*segment*/) override {}  // a handle names nothing that others could find
  void forget(int /*peer*/) noexcept override {}
  std::byte* pointer(int peer, SegmentId segment) const noexcept override;
  std::size_t bytes(int peer, SegmentId segment) const noexcept override {
    return segments_.bytes(peer, segment);
  }
  void put(int peer, Address to, const void* from, std::size_t bytes, std::uint64_t tag) override;
  void put_pieces(int peer, Address to, std::span<const Piece> pieces, std::uint64_t tag) override;
  void set_look_up(std::function<void(int peer)> look_up) override {
    look_up_ = std::move(look_up);
  }
  void publish(int peer, Address flag, std::uint64_t value, std::uint64_t bytes,
               std::uint64_t tag) override;
  PeerState peer_state(int peer) noexcept override;
  std::chrono::nanoseconds patience() const noexcept override { return patience_; }
  bool progress() noexcept override {
    for (const auto& lane : lanes_) lane->help();
    return true;
  }
  void hand_over() noexcept override {
    for (const auto& lane : lanes_) lane->hand_over();
  }
  NetworkUse network_use() const noexcept override {
    return {put_bytes_.load(std::memory_order_relaxed), puts_.load(std::memory_order_relaxed),
            signals_.load(std::memory_order_relaxed)};
  }

 private:
  using OwnSignal = protocol::ArrivedSignal<protocol::Place>;

  /// Bits 40 to 55 of a tag tell latency exchanges apart; the group itself has 0 there.
  Lane& lane_of(std::uint64_t tag) {
    const std::uint64_t space = tag >> 40 & 0xffff;
    if (lanes_.size() == 1 || space == 0 || tag == ~std::uint64_t{0}) return *lanes_[0];
    return *lanes_[1 + space % (lanes_.size() - 1)];
  }
  Segment exposed(Segment segment);
  void release_own(const OwnSignal& signal);

  int rank_;
  int size_;
  std::chrono::nanoseconds patience_;
  std::function<void(int peer)> look_up_{};
  JobKey job_;
  SegmentTable segments_;  // peers' entries have no memory
  // Numbers for statistics: relaxed.
  std::atomic<std::uint64_t> put_bytes_{0};
  std::atomic<std::uint64_t> puts_{0};
  std::atomic<std::uint64_t> signals_{0};
  std::mutex own_mutex_;
  std::map<protocol::Place, std::uint64_t> own_sequences_;
  protocol::CountedSignals<protocol::Place> own_;  // what this rank tells itself
  std::vector<std::unique_ptr<Lane>> lanes_;       // last: they end before the memory
};

Segment OfiFabric::register_memory(std::size_t bytes) {
  auto memory = anonymous_memory(bytes, rank_);
  const SegmentId id = segments_.next();
  return exposed({id, memory->data(), bytes, {}, memory});
}

Segment OfiFabric::adopt(const Segment& segment) {
  // Numbers may be left out: of a segment that another fabric made and this one could not share.
  if (segment.id < segments_.next() || segment.id >= kMaxSegments || !segment.memory) {
    throw Error(ErrorKind::unsupported,
                "rank " + std::to_string(rank_) + ": the network cannot share segment " +
                    std::to_string(segment.id) + "; expected mapped memory as segment " +
                    std::to_string(segments_.next()) + " or later",
                {.rank = rank_});
  }
  return exposed(segment);
}

Segment OfiFabric::exposed(Segment segment) {
  OfiHandle handle;
  handle.segment = {
      .wire = Wire::ofi, .rank = rank_, .segment = segment.id, .bytes = segment.bytes, .job = job_};
  try {
    for (std::size_t lane = 0; lane < lanes_.size(); ++lane) {
      const Remote remote = lanes_[lane]->expose(segment.id, segment.data, segment.bytes);
      handle.base = remote.base;
      handle.keys[lane] = remote.key;
    }
  } catch (...) {
    for (const auto& lane : lanes_) lane->withdraw(segment.id);
    throw;
  }
  const auto* first = reinterpret_cast<const std::byte*>(&handle);
  segment.handle.assign(first, first + sizeof handle);
  segments_.add(rank_, segment.id, segment.memory, segment.bytes);
  return segment;
}

void OfiFabric::attach(int peer, SegmentId segment, std::size_t bytes,
                       std::span<const std::byte> handle) {
  check_peer(peer, size_, rank_, "attach");
  if (peer == rank_) return;
  const Attachment attachment{Wire::ofi, rank_, peer, segment, bytes, job_};
  OfiHandle theirs;
  if (handle.size() != sizeof theirs) {
    throw_attach(attachment, "its handle has " + std::to_string(handle.size()) +
                                 " bytes, expected " + std::to_string(sizeof theirs));
  }
  checked_handle(handle.last(sizeof(SegmentHandle)), attachment);
  std::memcpy(&theirs, handle.data(), sizeof theirs);
  if (lanes_[0]->left(peer)) throw_attach(attachment, "the rank left");
  if (segment < kMaxSegments && segments_.find(peer, segment) == nullptr) {
    for (std::size_t lane = 0; lane < lanes_.size(); ++lane) {
      lanes_[lane]->attach(peer, segment, {theirs.base, theirs.keys[lane]});
    }
  }
  segments_.add(peer, segment, nullptr, bytes);
}

std::byte* OfiFabric::pointer(int peer, SegmentId segment) const noexcept {
  const SegmentTable::Entry* entry = peer == rank_ ? segments_.find(peer, segment) : nullptr;
  return entry == nullptr ? nullptr : entry->memory->data();
}

void OfiFabric::put(int peer, Address to, const void* from, std::size_t bytes, std::uint64_t tag) {
  const auto& entry = segments_.checked(peer, to, bytes, "put");
  if (bytes == 0) return;
  if (peer != rank_) {
    put_bytes_.fetch_add(bytes, std::memory_order_relaxed);
    puts_.fetch_add(1, std::memory_order_relaxed);
    const Piece whole{from, bytes};
    lane_of(tag).put(peer, to, {&whole, 1}, tag, look_up_);
    return;
  }
  std::memcpy(entry.memory->data() + to.offset, from, bytes);
  const std::lock_guard lock(own_mutex_);
  own_.piece(0, tag, bytes, [this](int, const OwnSignal& signal) { release_own(signal); });
}

void OfiFabric::put_pieces(int peer, Address to, std::span<const Piece> pieces, std::uint64_t tag) {
  if (peer == rank_) return Fabric::put_pieces(peer, to, pieces, tag);
  std::size_t bytes = 0;
  for (const Piece& piece : pieces) bytes += piece.bytes;
  segments_.checked(peer, to, bytes, "put");
  put_bytes_.fetch_add(bytes, std::memory_order_relaxed);
  puts_.fetch_add(1, std::memory_order_relaxed);
  lane_of(tag).put(peer, to, pieces, tag, look_up_);
}

void OfiFabric::publish(int peer, Address flag, std::uint64_t value, std::uint64_t bytes,
                        std::uint64_t tag) {
  segments_.checked_flag(peer, flag, "publish");
  if (peer != rank_) {
    signals_.fetch_add(1, std::memory_order_relaxed);
    lane_of(tag).publish(peer, flag, value, bytes, tag);
    return;
  }
  const std::lock_guard lock(own_mutex_);
  const protocol::Place place{flag.segment, flag.offset};
  const OwnSignal signal{++own_sequences_[place], place, value, tag, bytes};
  own_.signal(0, signal, [this](int, const OwnSignal& done) { release_own(done); });
}

void OfiFabric::release_own(const OwnSignal& signal) {
  std::byte* base = pointer(rank_, signal.flag.segment);
  auto* word = reinterpret_cast<std::uint64_t*>(base + signal.flag.offset);
  protocol::publish_in_own_memory(protocol::Flag{word}, signal.value);
}

PeerState OfiFabric::peer_state(int peer) noexcept {
  if (peer < 0 || peer >= size_) return PeerState::unknown;
  if (peer == rank_) return PeerState::alive;
  auto silent = lanes_[0]->silent_for(peer);
  for (const auto& lane : lanes_) {
    if (lane->lost(peer) && !lane->left(peer)) return PeerState::dead;
    silent = std::min(silent, lane->silent_for(peer));
  }
  return silent > kSilent && !lanes_[0]->left(peer) ? PeerState::unknown : PeerState::alive;
}

/// Whether every rank of this machine has so many cores.
bool has_cores(int each, const std::vector<ofi::Greeting>& greetings, int rank) {
  const std::string& here = greetings[static_cast<std::size_t>(rank)].boot_id;
  const auto local = std::count_if(greetings.begin(), greetings.end(),
                                   [&](const auto& other) { return other.boot_id == here; });
  return each * local <= static_cast<std::int64_t>(std::thread::hardware_concurrency());
}

std::vector<std::unique_ptr<Lane>> make_lanes(int rank, int size, const OfiOptions& options,
                                              std::chrono::nanoseconds deadline,
                                              ofi::Greeting& mine) {
  const ofi::Library& library = ofi::library(rank);
  std::vector<std::unique_ptr<Lane>> lanes;
  for (int index = 0; index < std::max(options.endpoints, 1); ++index) {
    const ofi::Info info = ofi::find_provider(library, rank, options, index > 0);
    const ofi::LaneSetting setting{
        .rank = rank, .size = size, .index = index, .beats = index == 0, .deadline = deadline};
    lanes.push_back(std::make_unique<Lane>(library, info, setting));
    mine.provider = info->fabric_attr->prov_name;
    mine.names.push_back(lanes.back()->name());
  }
  return lanes;
}

}  // namespace

bool ofi_is_built() noexcept {
  return true;
}

std::unique_ptr<Fabric> make_ofi_fabric(Bootstrap& bootstrap, const OfiOptions& options,
                                        std::chrono::nanoseconds deadline, const OnWait& on_wait) {
  const int rank = bootstrap.rank();
  const int size = bootstrap.size();
  ofi::Greeting mine;
  std::vector<std::unique_ptr<Lane>> lanes;
  std::optional<Error> problem;
  try {
    if (rank == 0) mine.key = random_key(rank);
    mine.boot_id = this_identity().boot_id;
    mine.address = ofi::listening_address(options.host, rank);
    lanes = make_lanes(rank, size, options, deadline, mine);
  } catch (const Error& error) {
    problem = error;
    mine.problem = error.what();
  }
  // A rank without an endpoint says so, so that nobody waits for it.
  const auto all = bootstrap.all_gather(to_bytes(mine), deadline, on_wait);
  if (problem) throw *problem;
  std::vector<ofi::Greeting> greetings;
  for (int peer = 0; peer < size; ++peer) {
    greetings.push_back(ofi::greeting_from(all[static_cast<std::size_t>(peer)], rank, peer));
  }
  ofi::check_greetings(greetings, rank);
  const auto patience = has_cores(1, greetings, rank) ? kPatience : kShortPatience;
  for (std::size_t lane = 0; lane < lanes.size(); ++lane) {
    std::vector<std::vector<std::byte>> names;
    for (const auto& greeting : greetings) names.push_back(greeting.names[lane]);
    lanes[lane]->start(greetings[0].key, names,
                       has_cores(2, greetings, rank) ? kSpin : std::chrono::nanoseconds(0));
  }
  return std::make_unique<OfiFabric>(rank, size, greetings[0].key, patience, std::move(lanes));
}

}  // namespace ferry::fabric
