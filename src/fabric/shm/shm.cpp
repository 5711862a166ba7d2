#include "fabric/shm/shm.hpp"

#include <sys/mman.h>
#include <unistd.h>

#include <ferry/error.hpp>
#include <set>
#include <string>
#include <utility>

#include "fabric/identity.hpp"
#include "fabric/mapped_fabric.hpp"
#include "fabric/shm/handshake.hpp"
#include "fabric/shm/names.hpp"
#include "fabric/shm/object.hpp"

namespace ferry::fabric {
namespace {

/// A rank has at most this many segments that are not sealed, so that survivors know how far beyond
/// the last one they saw a dead rank may have come.
constexpr SegmentId kMaxNamed = 64;

/// Segments of all peers that are larger than this together are mapped without filling in their
/// page tables: with n ranks that would be n² segments, seconds of the creation of a group.
constexpr std::size_t kPopulatePeers = std::size_t{512} << 20;

class ShmFabric final : public MappedFabric {
 public:
  ShmFabric(int rank, const JobKey& key, const std::vector<Identity>& ranks)
      : MappedFabric(rank, static_cast<int>(ranks.size())),
        key_(key),
        // In handles and for comparison only; the key itself stays in this process.
        job_{siphash(key, ~0ull, 0), siphash(key, ~0ull, 1)},
        owner_pid_(getpid()) {
    for (const Identity& identity : ranks) peers_.push_back(Peer{identity.process});
  }
  ~ShmFabric() override;

  std::string_view name() const override { return "shm"; }
  Segment register_memory(std::size_t bytes) override;
  void attach(int peer, SegmentId segment, std::size_t bytes,
              std::span<const std::byte> handle) override;
  void seal(SegmentId segment) override;
  void forget(int peer) noexcept override;
  PeerState peer_state(int peer) noexcept override;

 private:
  struct Peer {
    explicit Peer(const ProcessName& name) : process(name), watch(name) {}
    ProcessName process;
    ProcessWatch watch;
  };

  std::string object_of(int peer, SegmentId segment) const {
    return object_name(key_, peers_[static_cast<std::size_t>(peer)].process, peer, segment);
  }
  bool in_forked_child() const noexcept { return getpid() != owner_pid_; }

  JobKey key_;
  JobKey job_;
  pid_t owner_pid_;
  std::vector<Peer> peers_;
  std::set<SegmentId> named_;  // own segments that still have a name
};

ShmFabric::~ShmFabric() {
  if (in_forked_child()) return;  // the names are the parent's
  for (const SegmentId segment : named_) shm_unlink(object_of(rank(), segment).c_str());
  for (int peer = 0; peer < size(); ++peer) {
    if (peer_state(peer) == PeerState::dead) forget(peer);
  }
}

Segment ShmFabric::register_memory(std::size_t bytes) {
  if (named_.size() >= kMaxNamed) {
    throw Error(ErrorKind::exhausted,
                "rank " + std::to_string(rank()) + " has " + std::to_string(named_.size()) +
                    " segments that its peers have not attached yet; let them attach and seal",
                {.rank = rank()});
  }
  const SegmentId id = segments().next();
  const std::string name = object_of(rank(), id);
  named_.insert(id);  // before the object: whatever happens, the destructor unlinks it
  SharedObject object;
  try {
    object = create_object(name, bytes, rank());
  } catch (...) {
    named_.erase(id);
    throw;
  }
  if (size() == 1) seal(id);  // nobody will attach
  Segment segment{id, object.memory->data(), bytes,
                  to_bytes(SegmentHandle{.way = Wire::shm,
                                         .rank = rank(),
                                         .segment = id,
                                         .bytes = bytes,
                                         .inode = object.inode,
                                         .job = job_}),
                  object.memory};
  segments().add(rank(), id, std::move(object.memory), bytes);
  return segment;
}

void ShmFabric::attach(int peer, SegmentId segment, std::size_t bytes,
                       std::span<const std::byte> handle) {
  check_peer(peer, size(), rank(), "attach");
  if (peer == rank()) return;
  const Attachment attachment{Wire::shm, rank(), peer, segment, bytes, job_};
  const SegmentHandle checked = checked_handle(handle, attachment);
  const bool populate = bytes <= kPopulatePeers / static_cast<std::size_t>(size() - 1);
  segments().add(peer, segment,
                 open_object(object_of(peer, segment), attachment, checked.inode, populate), bytes);
}

void ShmFabric::seal(SegmentId segment) {
  if (named_.erase(segment) == 0 || in_forked_child()) return;
  shm_unlink(object_of(rank(), segment).c_str());
}

void ShmFabric::forget(int peer) noexcept {
  if (peer < 0 || peer >= size() || peer == rank() || in_forked_child()) return;
  // All that this rank attached may still have names, and at most kMaxNamed beyond.
  const SegmentId end = segments().count(peer) + kMaxNamed;
  for (SegmentId segment = 0; segment < end; ++segment) {
    shm_unlink(object_of(peer, segment).c_str());
  }
}

PeerState ShmFabric::peer_state(int peer) noexcept {
  if (peer < 0 || peer >= size()) return PeerState::unknown;
  return peers_[static_cast<std::size_t>(peer)].watch.state();
}

}  // namespace

std::unique_ptr<Fabric> make_shm_fabric(Bootstrap& bootstrap, std::chrono::nanoseconds deadline,
                                        const OnWait& on_wait) {
  return make_shm_fabric(bootstrap, Domains::blocks(bootstrap.size(), 0), deadline, on_wait);
}

std::unique_ptr<Fabric> make_shm_fabric(Bootstrap& bootstrap, const Domains& domains,
                                        std::chrono::nanoseconds deadline, const OnWait& on_wait) {
  const int rank = bootstrap.rank();
  ShmHandshake mine{.key = {}, .identity = this_identity()};
  if (domains.index(rank) == 0) remove_orphans();  // once on every host
  if (rank == 0) mine.key = random_key(rank);
  const auto all = bootstrap.all_gather(to_bytes(mine), deadline, on_wait);
  std::vector<Identity> ranks;
  JobKey key{};
  for (std::size_t r = 0; r < all.size(); ++r) {
    const ShmHandshake handshake = handshake_from(all[r], rank, static_cast<int>(r));
    if (r == 0) key = handshake.key;
    ranks.push_back(handshake.identity);
  }
  // Ranks beyond are not asked for, nor looked at: their processes are another host's.
  for (std::size_t r = 0; r < ranks.size(); ++r) {
    if (!domains.together(static_cast<int>(r), rank)) ranks[r] = mine.identity;
  }
  const Choice choice = choose(ranks);
  if (choice.by != Reachable::local && choice.by != Reachable::shm) {
    throw Error(choice.kind, choice.problem, {.rank = rank, .peer = choice.peer});
  }
  return std::make_unique<ShmFabric>(rank, key, ranks);
}

}  // namespace ferry::fabric
