// By which wire: registered memory, put, publish, failure broadcast.
//
// What fits behind this interface: threads (local), processes (shm), NVLink peers (a raw pointer
// into a peer's memory) and a network (put + weak signal, counted, unordered).
#pragma once
#include <array>
#include <chrono>
#include <cstddef>
#include <cstdint>
#include <ferry/network.hpp>
#include <functional>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "platform/process.hpp"

namespace ferry::fabric {

using ferry::PeerState;

/// Numbers a rank's segments in the order in which it registered them, from 0.
using SegmentId = std::uint32_t;

/// A place in a rank's registered memory.
struct Address {
  SegmentId segment = 0;
  std::uint64_t offset = 0;  ///< bytes from the segment's start
};

class Lobby;
class Memory;

/// A part of what one write carries.
struct Piece {
  const void* data = nullptr;
  std::size_t bytes = 0;
};

/// Registered memory of this rank: zeroed, aligned to 4096 bytes, mapped until the fabric ends.
struct Segment {
  SegmentId id = 0;
  std::byte* data = nullptr;
  std::size_t bytes = 0;
  std::vector<std::byte> handle{};   ///< lets a peer attach; at most kMaxHandleBytes
  std::shared_ptr<Memory> memory{};  ///< keeps `data` mapped; null where that is no mapping of ours
};

inline constexpr std::size_t kMaxHandleBytes = 192;

/// Where a process runs, as it says itself.
struct Place {
  std::string kernel{};     ///< a boot of a machine; empty: unknown
  std::string processes{};  ///< which of its processes see each other
  std::string address{};    ///< on the network
};
/// Whether a process that found no other one of its rank there proves that the former one has
/// ended: it sees the same processes, or the machine with that address was started anew.
bool proves_end(const Place& former, const Place& now);

/// One thread at a time registers, attaches, seals and forgets; meanwhile other threads may put,
/// publish and ask for pointers (results are dropped and groups destroyed on any thread).
class Fabric {
 public:
  virtual ~Fabric() = default;
  virtual std::string_view name() const = 0;
  virtual int rank() const = 0;
  virtual int size() const = 0;

  /// Registers memory of this rank. Throws Error(exhausted) or Error(system).
  virtual Segment register_memory(std::size_t bytes) = 0;
  /// Registers what another fabric of this rank has registered, under the same number, so that
  /// peers of this fabric reach the same memory. Throws Error(unsupported): not every fabric can.
  virtual Segment adopt(const Segment& segment);
  /// Makes a peer's segment reachable. Throws Error(system) naming the peer; the handle comes from
  /// that peer and is checked before use.
  virtual void attach(int peer, SegmentId segment, std::size_t bytes,
                      std::span<const std::byte> handle) = 0;
  /// Every peer has attached this rank's segment: names and descriptors that served for that go.
  virtual void seal(SegmentId segment) = 0;
  /// The peer is known to have failed: remove what it may have left behind (names).
  virtual void forget(int peer) noexcept = 0;

  /// The peer's segment in this rank's address space; null outside the domain. Own rank: its data.
  virtual std::byte* pointer(int peer, SegmentId segment) const noexcept = 0;
  /// Whether the ranks are threads of this process: then they reach each other's ordinary memory.
  virtual bool one_address_space() const noexcept { return false; }
  /// Bytes of an attached segment, inside the domain or not; 0 if it is not attached.
  virtual std::size_t bytes(int peer, SegmentId segment) const noexcept = 0;

  /// Copies into a peer's segment. Unordered: only `publish` with the same tag tells the peer that
  /// it has landed. `from` may be reused when the call returns. The range must lie inside the
  /// attached segment: checked, Error(invalid_argument).
  virtual void put(int peer, Address to, const void* from, std::size_t bytes,
                   std::uint64_t tag) = 0;
  /// The same for pieces that lie one behind the other there: one write.
  virtual void put_pieces(int peer, Address to, std::span<const Piece> pieces, std::uint64_t tag);
  /// What a `put` that waits for room calls about every 50 ms, with the peer: what it throws leaves
  /// the put. Set once, by the only one who puts.
  virtual void set_look_up(std::function<void(int peer)> /*look_up*/) {}
  /// Sets a 64-bit flag word of the peer to `value` once all `bytes` that this rank put there with
  /// this tag have landed, then wakes its waiters. For one flag word, values become visible in
  /// increasing order. A flag begins a line (protocol/sync.hpp, kFlagStride).
  virtual void publish(int peer, Address flag, std::uint64_t value, std::uint64_t bytes,
                       std::uint64_t tag) = 0;

  /// Whether the peer still runs. Cheap enough to call for every peer every 50 ms; never blocks.
  virtual PeerState peer_state(int peer) noexcept = 0;
  /// Whether the peer has ended or is being ended: it will call nothing more, but what it started
  /// may still write to this rank's memory until `peer_state` says that it is dead.
  virtual bool peer_ends(int peer) noexcept { return peer_state(peer) == PeerState::dead; }

  /// Whether this rank seems to be cut off itself: by one of its NICs it hears nobody, by another
  /// it does. Then its peers are not to blame.
  virtual bool cut_off() const noexcept { return false; }

  /// How long a wait spins before it sleeps: about as long as a message takes. Where ranks share
  /// cores, it lets others run meanwhile (`progress`).
  virtual std::chrono::nanoseconds spin_time() const noexcept;
  /// Called by a wait while it spins: does what else a thread of the fabric does, sparing both ends
  /// the time until that thread runs. False: there is no such thread. Never blocks.
  virtual bool progress() noexcept;
  /// Who called `progress` goes to sleep: from now on the fabric's own thread does it at once.
  virtual void hand_over() noexcept {}
  /// Who called `progress` or `put` has nothing more to do here for now: what is still to be sent
  /// is for the fabric's own thread, which otherwise may take a millisecond to notice.
  virtual void rest() noexcept {}

  // How ranks whose memory the others cannot read agree on their next epoch. Of a network.

  /// Whether this fabric has what follows.
  virtual bool carries_texts() const noexcept { return false; }
  /// Gives a few hundred bytes to the peer. Never blocks. It may be lost with the peer.
  virtual void send_text(int /*peer*/, std::span<const std::byte> /*text*/) {}
  /// What takes the peers' texts, on a thread of the fabric; an empty one says that `fenced` may
  /// have changed. It must not call the fabric. Set once; texts that came before are lost.
  using OnText = std::function<void(int peer, std::span<const std::byte> text)>;
  virtual void set_on_text(OnText /*on_text*/) {}
  /// This rank puts nothing more to the peer in this epoch. Puts of which no signal was published
  /// are over: their tags may be used again.
  virtual void fence(int /*peer*/, std::uint64_t /*epoch*/) {}
  /// Whether both ends have called `fence` for this epoch or a later one, and all that they had put
  /// has landed. To be asked until it is so: the peer hears from it, too.
  virtual bool fenced(int /*peer*/, std::uint64_t /*epoch*/) { return true; }
  /// This rank goes on without the peer for good: nothing is sent there any more.
  virtual void exclude(int /*peer*/) noexcept {}

  /// What tells this job's network from others', the same on all ranks; zeros: there is none.
  virtual std::array<std::uint64_t, 2> job() const { return {}; }

  // Of a network: how a process that takes the place of a lost rank, and the ranks that share no
  // memory with it, come to reach each other.

  /// What a process that joins needs for its own fabric. It holds the job's key: for processes of
  /// this user on this host alone.
  virtual std::vector<std::byte> invitation() const { return {}; }
  /// How others reach this rank and its memory.
  virtual std::vector<std::byte> card() const { return {}; }
  struct LinkMessage {
    std::array<std::uint64_t, 2> words{};  ///< the engine's
    std::vector<std::byte> card{};         ///< of who has linked
  };
  /// From this epoch on, or under this ticket (lobby.hpp), the same on both sides, the peer is the
  /// process with this card. It is sent `words` and this rank's card. Throws Error for a card that
  /// cannot be.
  virtual void link(int /*peer*/, std::span<const std::byte> /*card*/, std::uint64_t /*since*/,
                    const std::array<std::uint64_t, 2>& /*words*/) {}
  /// What the peer has sent when it linked this rank so, perhaps before this rank did; nothing: it
  /// has not yet.
  virtual std::optional<LinkMessage> link_message(int /*peer*/, std::uint64_t /*since*/) {
    return {};
  }

  /// A process that joins links a rank under its ticket before it has its seat, and the rank
  /// answers by linking it under the same. The last ticket under which the peer has linked this
  /// rank, with what it sent.
  struct Knock {
    std::uint64_t ticket = 0;
    LinkMessage message{};
  };
  virtual std::optional<Knock> knock(int /*peer*/) { return {}; }
  /// The memory of a peer that is linked is what its card says.
  virtual void attach_card(int /*peer*/, std::span<const std::byte> /*card*/) {}
  /// Where the peer that was linked last runs, or that of a card.
  virtual Place place(int /*peer*/) const { return {}; }
  virtual Place place_in(int /*peer*/, std::span<const std::byte> /*card*/) const { return {}; }

  /// Where new processes find the ranks; null: they cannot.
  virtual Lobby* lobby() noexcept { return nullptr; }

  /// What left through `put` and `publish` for peers outside the domain.
  virtual NetworkStats network_use() const noexcept { return {}; }
  /// The NICs of this rank; none where there is no network of NICs.
  virtual std::vector<NicStats> nics() const { return {}; }

 private:
  /// More ranks than this machine has cores.
  bool shares_cores() const noexcept;
};

}  // namespace ferry::fabric
