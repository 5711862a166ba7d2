#include "fabric/shm/shm.hpp"

#include <algorithm>
#include <atomic>
#include <cerrno>
#include <ferry/error.hpp>
#include <memory>
#include <mutex>
#include <optional>
#include <set>
#include <string>
#include <thread>
#include <utility>

#include "base/open_files.hpp"
#include "fabric/identity.hpp"
#include "fabric/lobby.hpp"
#include "fabric/mapped_fabric.hpp"
#include "fabric/shm/door.hpp"
#include "fabric/shm/handshake.hpp"
#include "fabric/shm/names.hpp"
#include "fabric/shm/object.hpp"
#include "platform/host.hpp"
#include "platform/pages.hpp"
#include "platform/socket.hpp"

namespace ferry::fabric {
namespace {

/// A rank has at most this many segments that are not sealed, so that survivors know how far beyond
/// the last one they saw a dead rank may have come.
constexpr SegmentId kMaxNamed = 64;

/// Segments of all peers that are larger than this together are mapped without filling in their
/// page tables: with n ranks that would be n² segments, seconds of the creation of a group. And the
/// kernel takes the tables of a killed process apart before it tells of its death, 50 ms for a GiB.
constexpr std::size_t kPopulatePeers = std::size_t{64} << 20;

/// Of those in which a process that joins looks for a rank, 10 ms each: a directory may be slow.
constexpr int kTurnsOfElsewhere = 25;

class ShmFabric final : public MappedFabric, public Lobby {
 public:
  /// `ranks`: nothing, of one that has ended.
  ShmFabric(int rank, const JobKey& key, const std::vector<std::optional<ProcessName>>& ranks)
      : MappedFabric(rank, static_cast<int>(ranks.size())),
        key_(key),
        // In handles and for comparison only; the key itself stays in this process.
        job_{siphash(key, ~0ull, 0), siphash(key, ~0ull, 1)},
        owner_pid_(process_id()),
        peers_(ranks.size()) {
    for (std::size_t r = 0; r < ranks.size(); ++r) set_peer(static_cast<int>(r), ranks[r]);
  }
  ~ShmFabric() override;

  std::string_view name() const override { return "shm"; }
  Segment register_memory(std::size_t bytes) override;
  void attach(int peer, SegmentId segment, std::size_t bytes,
              std::span<const std::byte> handle) override;
  void seal(SegmentId segment) override;
  void forget(int peer) noexcept override;
  PeerState peer_state(int peer) noexcept override;
  bool peer_ends(int peer) noexcept override;

  Lobby* lobby() noexcept override { return this; }
  bool is_open() const override { return door_ != nullptr; }
  void open(const Opening& opening) override;
  void show(std::span<const std::byte> card) override { door_->show(card); }
  const Opening& opening() const override { return opening_; }
  JobKey group() const override { return key_; }
  void close() noexcept override {
    if (door_) door_->close();
  }
  std::vector<Visitor> visitors() override;
  void seat(int peer, std::uint64_t ticket) override;
  void vacate(int peer) override;
  bool former_runs(const AtRest& at_rest) override;
  void keep_former() override { keeps_former_ = true; }
  void give_back() override;

 private:
  struct Peer {
    explicit Peer(const ProcessName& name) : process(name), watch(name) {}
    Peer() = default;
    ProcessName process{};
    ProcessWatch watch{};
    std::atomic<bool> forgotten{false};  ///< once it had ended
  };

  /// Lives on while it is looked at, when another thread replaces it.
  std::shared_ptr<Peer> peer_at(int peer) const {
    std::scoped_lock lock(peers_mutex_);
    return peers_[static_cast<std::size_t>(peer)];
  }
  void set_peer(int peer, const std::optional<ProcessName>& process) {
    auto next = process ? std::make_shared<Peer>(*process) : std::make_shared<Peer>();
    std::scoped_lock lock(peers_mutex_);
    peers_[static_cast<std::size_t>(peer)].swap(next);
  }
  void replace(int peer, const std::optional<ProcessName>& process,
               std::vector<std::shared_ptr<Memory>> memory);
  void note_former(int peer);
  void check_only_group();
  std::string object_of(int peer, SegmentId segment) const {
    return object_name(key_, peer_at(peer)->process, peer, segment);
  }
  bool is_object_of(int peer, const std::string& name) const;
  bool in_forked_child() const noexcept { return process_id() != owner_pid_; }

  JobKey key_;
  JobKey job_;
  std::int64_t owner_pid_;
  mutable std::mutex peers_mutex_;
  std::vector<std::shared_ptr<Peer>> peers_;
  /// A process whose seats others took, and segment 0 of each.
  struct Former {
    std::shared_ptr<Peer> peer;
    std::vector<std::shared_ptr<Memory>> controls;
  };
  std::vector<Former> former_processes_;
  bool keeps_former_ = false;
  std::vector<std::shared_ptr<Memory>> former_memory_;  // of processes that have ended
  std::set<SegmentId> named_;                           // own segments that still have a name
  Opening opening_{};
  JobKey door_key_{};
  std::unique_ptr<OwnDoor> door_{};
  std::optional<Doors> doors_{};
};

ShmFabric::~ShmFabric() {
  if (in_forked_child()) return;  // the names are the parent's
  for (const SegmentId segment : named_) remove_section(object_of(rank(), segment));
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
  if (door_) door_->add(id, bytes, object);
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
  remove_section(object_of(rank(), segment));
}

void ShmFabric::forget(int peer) noexcept {
  if (peer < 0 || peer >= size() || peer == rank() || in_forked_child()) return;
  const std::shared_ptr<Peer> lost = peer_at(peer);
  const bool dead = lost->watch.state() == PeerState::dead;
  if (lost->process.pid == 0 || (dead && lost->forgotten.exchange(true))) return;
  // Most often there is nothing, and the directory says so in one look.
  int error = 0;
  const auto names = list_sections(owner_prefix(lost->process), error);
  if (!names) {
    lost->forgotten = false;  // another look may find room for a descriptor
    return;
  }
  for (const std::string& name : *names) {
    if (dead || is_object_of(peer, "/" + name)) remove_section("/" + name);
  }
}

/// Not a door: one that left has closed its own, and may join again under that name.
bool ShmFabric::is_object_of(int peer, const std::string& name) const {
  // All that this rank attached may still have names, and at most kMaxNamed beyond.
  const SegmentId end = segments().count(peer) + kMaxNamed;
  for (SegmentId segment = 0; segment < end; ++segment) {
    if (name == object_of(peer, segment)) return true;
  }
  return false;
}

PeerState ShmFabric::peer_state(int peer) noexcept {
  if (peer < 0 || peer >= size()) return PeerState::unknown;
  return peer_at(peer)->watch.state();
}

bool ShmFabric::former_runs(const AtRest& at_rest) {
  std::scoped_lock lock(peers_mutex_);
  for (Former& former : former_processes_) {
    std::erase_if(former.controls, [&](const auto& memory) { return at_rest(memory->data()); });
  }
  std::erase_if(former_processes_, [](const Former& former) {
    return former.controls.empty() || former.peer->watch.state() == PeerState::dead;
  });
  return !former_processes_.empty();
}

/// One process has one entry, so that one which comes again and again takes one descriptor.
void ShmFabric::note_former(int peer) {
  const auto* control = segments().find(peer, 0);
  std::scoped_lock lock(peers_mutex_);
  const auto& there = peers_[static_cast<std::size_t>(peer)];
  if (control == nullptr || there->watch.state() == PeerState::dead) return;
  const auto known =
      std::find_if(former_processes_.begin(), former_processes_.end(),
                   [&](const Former& former) { return former.peer->process == there->process; });
  Former& former =
      known != former_processes_.end() ? *known : former_processes_.emplace_back(Former{there, {}});
  former.controls.push_back(control->memory);
}

bool ShmFabric::peer_ends(int peer) noexcept {
  return peer >= 0 && peer < size() && peer_at(peer)->watch.ends();
}

void ShmFabric::open(const Opening& opening) {
  door_key_ = door_key(opening.name);
  const std::string own = object_name(door_key_, peer_at(rank())->process, rank(), 0);
  if (section_exists(own)) {
    throw Error(
        ErrorKind::refused,
        "rank " + std::to_string(rank()) +
            ": its place is not free: this process has it, in a group of the same name "
            "(elastic): give each group a name of its own, or destroy that one first; or another "
            "user made /dev/shm" +
            own,
        {.rank = rank(), .peer = rank()});
  }
  door_ = std::make_unique<OwnDoor>(
      OwnDoor::What{door_key_, key_, rank(), opening.ticket, opening.begun, opening.invitation},
      opening.text);
  doors_.emplace(door_key_, rank(), size());
  opening_ = opening;
  check_only_group();
}

/// After this rank shows itself: of two groups that come at once one at least finds the other.
void ShmFabric::check_only_group() {
  for (const auto& door : doors_->list()) {
    const bool begun = opening_.begun || door->page().begun != 0;
    if (door->page().key == key_ || !begun) continue;
    door_->close();
    throw Error(ErrorKind::refused,
                "Group: rank " + std::to_string(rank()) + " wants to make " + opening_.name.text +
                    (opening_.begun ? "" : " with all ranks") + ", but process " +
                    std::to_string(door->page().owner.pid) + " is in another group of that name" +
                    (opening_.begun ? "" : ", which one process began alone") +
                    "; join that (FERRY_JOIN=1), end it first, or give another name (elastic) or "
                    "port",
                {.rank = rank(), .peer = door->rank()});
  }
}

std::vector<Visitor> ShmFabric::visitors() {
  std::vector<Visitor> all;
  for (const auto& door : doors_->list()) {
    if (door->page().key != key_) continue;  // of another group of that name
    try {
      all.push_back({door->rank(), door->page().ticket, door->page().owner.pid, door->text(),
                     door->invitation(), door->card(), door->page().begun != 0,
                     door->control()->data()});
    } catch (const Error&) {
      if (!door->ends_soon()) throw;
    }
  }
  return all;
}

void ShmFabric::seat(int peer, std::uint64_t ticket) {
  for (const auto& door : doors_->list()) {
    if (door->rank() != peer || door->page().ticket != ticket || door->page().key != key_) continue;
    try {
      std::vector<std::shared_ptr<Memory>> memory{door->control()};
      for (SegmentId id = 1; id < door->segments(); ++id) memory.push_back(door->map(id));
      return replace(peer, door->page().owner, std::move(memory));
    } catch (const Error&) {
      if (!door->ends_soon()) throw;
    }
  }
  vacate(peer);
}

void ShmFabric::vacate(int peer) {
  std::vector<std::shared_ptr<Memory>> memory;
  for (SegmentId id = 0; id < 2; ++id) {
    memory.push_back(anonymous_memory(bytes(rank(), id), rank()));
  }
  replace(peer, std::nullopt, std::move(memory));
}

void ShmFabric::replace(int peer, const std::optional<ProcessName>& process,
                        std::vector<std::shared_ptr<Memory>> memory) {
  const auto* control = segments().find(peer, 0);
  if (control != nullptr && control->memory == memory.front()) return;  // it has the seat already
  note_former(peer);
  // Of one that has ended the memory is given back, but for what it said (segment 0).
  for (SegmentId id = 1; id < segments().count(peer) && peer_state(peer) == PeerState::dead; ++id) {
    if (const auto* old = segments().find(peer, id)) former_memory_.push_back(old->memory);
  }
  if (!keeps_former_) give_back();
  segments().clear(peer);
  for (SegmentId id = 0; id < memory.size(); ++id) {
    const std::size_t mapped = memory[id]->mapped();
    segments().add(peer, id, std::move(memory[id]), mapped);
  }
  set_peer(peer, process);
}

void ShmFabric::give_back() {
  for (const auto& memory : former_memory_) release_pages(memory->data(), memory->mapped());
  former_memory_.clear();
}

std::vector<std::optional<ProcessName>> processes_of(const std::vector<Identity>& ranks) {
  std::vector<std::optional<ProcessName>> all;
  for (const Identity& identity : ranks) all.emplace_back(identity.process);
  return all;
}

/// The key of the group that a lobby's doors belong to.
JobKey key_behind(const std::vector<std::shared_ptr<Door>>& doors, int rank,
                  const LobbyName& name) {
  for (const auto& door : doors) {
    if (door->page().key == doors.front()->page().key) continue;
    throw Error(ErrorKind::mismatch,
                "Group: two groups on this host are found under " + name.text +
                    ": one of process " + std::to_string(doors.front()->page().owner.pid) +
                    ", one of process " + std::to_string(door->page().owner.pid) +
                    "; give each another name (elastic), or another port",
                {.rank = rank, .peer = door->rank()});
  }
  return doors.front()->page().key;
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
  return std::make_unique<ShmFabric>(rank, key, processes_of(ranks));
}

namespace {

/// Nobody but this process.
std::vector<std::optional<ProcessName>> alone(int rank, int size) {
  std::vector<std::optional<ProcessName>> ranks(static_cast<std::size_t>(size));
  ranks[static_cast<std::size_t>(rank)] = this_process();
  return ranks;
}

}  // namespace

Socket turn_to_begin(int rank, const LobbyName& name) {
  if (!user_sockets()) return {};  // nor are there doors
  const std::string object = object_name(door_key(name), {}, 0, 0);
  int error = 0;
  Socket turn = listen_on(user_socket_address("@ferry.begin." + std::to_string(user_id()) +
                                              object.substr(object.rfind('-'))),
                          error);
  if (turn) return turn;
  const bool taken = error == EADDRINUSE;
  throw Error(taken ? ErrorKind::refused : ErrorKind::system,
              "Group: rank " + std::to_string(rank) + " wants to begin " + name.text +
                  " alone, but " +
                  (taken ? "another process begins it at this moment; join it"
                         : "cannot keep others from it: " + error_text(error)),
              {.rank = rank});
}

std::unique_ptr<Fabric> begin_shm_fabric(int rank, int size, const LobbyName& name) {
  remove_orphans();
  const auto doors = Doors(door_key(name), rank, size).list();
  if (!doors.empty()) {
    throw Error(ErrorKind::refused,
                "Group: rank " + std::to_string(rank) + " wants to begin " + name.text +
                    " alone, but process " + std::to_string(doors.front()->page().owner.pid) +
                    " is in one of that name, or waits for a place there; join it, or give another "
                    "name (elastic) or port",
                {.rank = rank, .peer = doors.front()->rank()});
  }
  return std::make_unique<ShmFabric>(rank, random_key(rank), alone(rank, size));
}

Met join_shm_fabric(int rank, int size, const LobbyName& name, const LookElsewhere& elsewhere,
                    std::chrono::nanoseconds deadline, const OnWait& on_wait) {
  remove_orphans();
  const auto ranks = alone(rank, size);
  Doors lobby(door_key(name), rank, size);
  const auto end = std::chrono::steady_clock::now() + deadline;
  for (int turn = 0;;) {
    const auto doors = lobby.list();
    if (!doors.empty()) {
      const Door& first = *doors.front();
      return {std::make_unique<ShmFabric>(rank, key_behind(doors, rank, name), ranks),
              {first.rank(),
               first.page().ticket,
               first.page().owner.pid,
               first.text(),
               first.invitation(),
               {},
               first.page().begun != 0}};
    }
    const bool polls = elsewhere && turn++ % kTurnsOfElsewhere == 0;
    if (auto found = polls ? elsewhere() : std::nullopt) {
      return {std::make_unique<ShmFabric>(rank, found->group, ranks), std::move(found->there)};
    }
    if (std::chrono::steady_clock::now() >= end) {
      throw Error(ErrorKind::deadline,
                  "Group: rank " + std::to_string(rank) + " wants to join, but no rank of " +
                      name.text + " runs on this host as this user" +
                      (elsewhere ? ", and none shows itself in the arbiter's directory"
                                 : "; ranks of other hosts are found by a directory that all share "
                                   "(arbiter)") +
                      "; did all ranks end, and was the group made with the same elastic and port?",
                  {.rank = rank});
    }
    if (on_wait) on_wait();
    std::this_thread::sleep_for(std::chrono::milliseconds(10));
  }
}

}  // namespace ferry::fabric
