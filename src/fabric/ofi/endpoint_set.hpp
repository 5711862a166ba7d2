// The endpoints of a rank that carry the same traffic, one on each of its NICs: what goes over
// which, and behind which writes a flag follows.
#pragma once
#include <atomic>
#include <chrono>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <optional>
#include <span>
#include <utility>
#include <vector>

#include "fabric/fabric.hpp"
#include "fabric/ofi/arrivals.hpp"
#include "fabric/ofi/endpoint.hpp"
#include "fabric/ofi/streams.hpp"
#include "fabric/segment_handle.hpp"
#include "protocol/pre_announced.hpp"

namespace ferry::fabric::ofi {

/// Endpoint `mine` of this rank and endpoint `theirs` of a peer, of all its endpoints, talk to each
/// other.
struct Partner {
  std::size_t mine = 0;
  std::size_t theirs = 0;
  std::vector<std::byte> name{};
};

/// Rows are copied into chunks, which cross as one write each when more comes than they hold or
/// when a signal follows: small rows to one place cost few writes, and a caller may reuse its
/// memory at once. A copy it is, for what the network still reads cannot be taken back at a
/// deadline.
///
/// Chunks go to the endpoints in turn, by what they have to do. A write carries its stream: pieces
/// of one stream are counted at the target, by whichever endpoint they come, and the signal says
/// how many there are, so neither writes nor messages need any order. Thread-safe.
class EndpointSet {
 public:
  /// `index`: apart from the rank's other endpoint sets. `infos`: of the NICs.
  EndpointSet(const Library& library, int index, std::span<const Info> infos,
              const EndpointSetting& setting);
  EndpointSet(const EndpointSet&) = delete;
  EndpointSet& operator=(const EndpointSet&) = delete;

  std::vector<std::vector<std::byte>> names() const;
  /// Begins to talk to the peers. `partners`: by rank, none for the own one; one peer's are in the
  /// same order on both sides. `spin`: how long threads poll before they sleep.
  void start(const JobKey& job, const std::vector<std::vector<Partner>>& partners,
             std::chrono::nanoseconds spin);

  /// From this epoch on, or under this ticket, the same on both sides, the peer is another process,
  /// which is reached by these partners. Nothing of the former one counts any more.
  void link(int peer, const std::vector<Partner>& partners, std::uint64_t since);
  /// False until both are linked, where this rank or the peer has joined: what goes there is
  /// dropped. True for a number that is no rank's, which the table of segments refuses.
  bool reaches(int peer) const {
    return peer < 0 || peer >= static_cast<int>(targets_.size()) || peer == rank_ ||
           !target_of(peer).endpoints.empty();
  }
  /// Tells the peer that this rank has linked it.
  void send_link_message(int peer, std::uint64_t since, const Fabric::LinkMessage& link_message);
  std::optional<Fabric::LinkMessage> link_message(int peer, std::uint64_t since) {
    return arrivals_.link_message(peer, since);
  }
  std::optional<Fabric::Knock> knock(int peer) { return arrivals_.knock(peer); }

  /// Says goodbye by all endpoints; before many end one after the other, each of which waits for
  /// peers.
  void leave();

  /// Lets the peers write to a segment of this rank. Returns what they add to offsets; `keys`: one
  /// for each endpoint.
  std::uint64_t expose(SegmentId segment, std::byte* data, std::size_t bytes,
                       std::span<std::uint64_t> keys);
  /// Undoes it for a segment that no peer has heard of.
  void withdraw(SegmentId segment);
  /// `keys`: of all endpoints of the peer.
  void attach(int peer, SegmentId segment, std::uint64_t base, std::span<const std::uint64_t> keys);

  /// `look_up`: what a caller that waits for room does now and then; it may throw.
  using LookUp = std::function<void(int peer)>;
  void put(int peer, Address to, std::span<const Piece> pieces, std::uint64_t tag,
           const LookUp& look_up);
  void publish(int peer, Address flag, std::uint64_t value, std::uint64_t bytes, std::uint64_t tag);

  // As the fabric's.
  void set_on_text(Fabric::OnText on_text) { arrivals_.set_on_text(std::move(on_text)); }
  void send_text(int peer, std::span<const std::byte> text);
  void fence(int peer, std::uint64_t epoch);
  bool fenced(int peer, std::uint64_t epoch);
  void exclude(int peer);

  /// By a thread that waits: makes progress, unless somebody is at it. For a while the endpoints'
  /// threads stay away from the network then: two threads that wake up for each message cost more
  /// than they carry.
  void help() noexcept;
  /// Who helped sleeps now.
  void hand_over() noexcept;
  /// Who helped or put does something else now.
  void rest() noexcept;

  /// A forked child has no such threads and shares the sockets: there an endpoint set is never
  /// destroyed.
  bool in_forked_child() const { return endpoints_.front()->in_forked_child(); }
  /// The peer cannot be reached any more, by one of the NICs at least, and did not say goodbye.
  bool lost(int peer) const noexcept;
  bool left(int peer) const noexcept;
  /// How long the peer was not heard, by one of the NICs at least that hears others.
  std::chrono::nanoseconds silent_for(int peer) const noexcept;
  /// One NIC hears nobody, another does.
  bool cut_off() const noexcept;
  /// Bytes of rows that NIC `nic` has carried.
  std::uint64_t sent(std::size_t nic) const { return endpoints_[nic]->sent(); }

 private:
  /// A signal that waits for puts that are still to come.
  struct Held {
    Address flag{};
    std::uint64_t value = 0;
    std::uint64_t bytes = 0;
  };
  /// What was put under one tag since its last signal.
  struct Tagged {
    std::uint32_t stream = 0;
    std::uint64_t pieces = 0;
    std::uint64_t bytes = 0;
    std::vector<Held> held{};
  };
  /// A chunk that still grows.
  struct Open {
    Endpoint* endpoint = nullptr;
    Endpoint::Op* chunk = nullptr;
    std::uint64_t tag = 0;
    Tagged* tagged = nullptr;
  };
  /// A flag word of a peer.
  struct Flag {
    Address at{};
    protocol::PreAnnouncedSignals<> signals{};
    std::optional<std::uint32_t> told{};  // streams of what was pre-announced, the first of them
  };
  struct Target {
    // The endpoints that lead there and their endpoints at the other end, set before anything is
    // sent.
    std::vector<Endpoint*> endpoints{};
    std::vector<std::size_t> theirs{};
    std::map<std::uint64_t, Tagged> tags{};
    std::map<std::pair<SegmentId, std::uint64_t>, Flag> flags{};  // by word
    std::vector<Flag*> company{};  // of signals without bytes since the last one with any
    Streams streams{};
    Open open{};
    std::uint64_t pieces = 0;     // that were given to the network, ever
    std::uint64_t cancelled = 0;  // streams that were
    std::size_t last = 0;         // endpoint of the last chunk
    std::size_t turn = 0;         // endpoint whose room to wait for
  };

  Target& target_of(int rank) { return *targets_[static_cast<std::size_t>(rank)].load(); }
  const Target& target_of(int rank) const {
    return *targets_[static_cast<std::size_t>(rank)].load();
  }
  /// Where it leads: returns the links of this rank's endpoints.
  std::vector<Link> set_target(int rank, const std::vector<Partner>& partners, const JobKey& job);
  bool gone(int rank) const noexcept;

  // Under the lock.
  static Tagged& tagged(Target& target, std::uint64_t tag);
  bool copy_in(std::unique_lock<std::mutex>& lock, int rank, Address to, const Piece& piece,
               std::uint64_t tag, const LookUp& look_up);
  static bool goes_early(const Open& open, int rank);
  static std::size_t endpoint_for(const Target& target, const Tagged& of_tag);
  bool open_chunk(int rank, Address to, std::uint64_t tag);
  void await_chunk(std::unique_lock<std::mutex>& lock, int rank, const LookUp& look_up);
  void flush(Target& target);
  /// Forgets what waits for a peer that is gone.
  void abandon(Target& target);
  static Flag& flag_at(Target& target, const Address& at);
  static Message signal_message(const Held& held, std::uint64_t sequence);
  void send_signal(int rank, const Held& held, std::uint64_t tag);
  void send_alone(int rank, const Held& held);
  static void forget(Target& target, std::uint64_t tag);
  void forecast(int rank, Endpoint& endpoint, Flag& flag, const std::vector<Flag*>& company);
  void tell(int rank, Endpoint& endpoint, Flag& flag, std::uint32_t stream);

  int rank_;
  int index_;
  Arrivals arrivals_;
  std::vector<std::unique_ptr<Endpoint>> endpoints_;  // by NIC
  // Of what is sent. An endpoint's lock may be taken under it, never the other way round.
  std::mutex mutex_;
  std::vector<std::atomic<Target*>> targets_;            // by rank
  std::vector<std::unique_ptr<Target>> ever_targets_{};  // and former ones
  JobKey job_{};
  Clock::time_point looked_up_{};
};

}  // namespace ferry::fabric::ofi
