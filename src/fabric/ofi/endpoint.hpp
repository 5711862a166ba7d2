// One endpoint of a rank, on one NIC, and its traffic with all peers that it is linked with:
// writes, messages, and the thread that makes progress.
#pragma once
#include <atomic>
#include <chrono>
#include <condition_variable>
#include <cstddef>
#include <cstdint>
#include <deque>
#include <map>
#include <memory>
#include <mutex>
#include <optional>
#include <span>
#include <thread>
#include <vector>

#include "fabric/fabric.hpp"
#include "fabric/ofi/arrivals.hpp"
#include "fabric/ofi/buffers.hpp"
#include "fabric/ofi/fi_endpoint.hpp"
#include "fabric/ofi/message.hpp"

namespace ferry::fabric::ofi {

using Clock = std::chrono::steady_clock;

/// A peer's segment as this endpoint writes to it.
struct Remote {
  std::uint64_t base = 0;
  std::uint64_t key = 0;
};

/// Nothing from a peer for so long: it is stopped, cut off or gone.
inline constexpr std::chrono::nanoseconds kSilent = std::chrono::milliseconds(1000);

/// What an endpoint is told when it is made.
struct EndpointSetting {
  int rank = 0;
  int size = 1;
  bool beats = false;    ///< this endpoint also tells the peers that this rank is alive
  bool several = false;  ///< this rank has other NICs, too
  std::chrono::nanoseconds deadline{};  ///< how long a peer may take no data
};

/// The endpoint of a peer that an endpoint talks to; without name: none.
struct Link {
  std::vector<std::byte> name{};
  WayKey to{};    ///< in what goes there
  WayKey from{};  ///< in what comes from there
};

/// Thread-safe.
class Endpoint {
  struct Peer;

 public:
  Endpoint(const Library& library, Info info, const EndpointSetting& setting, Arrivals& arrivals);
  /// Leaves, waits until what it sent has arrived, at most a deadline since then, and ends.
  ~Endpoint();
  Endpoint(const Endpoint&) = delete;
  Endpoint& operator=(const Endpoint&) = delete;

  std::vector<std::byte> name() const { return fi_endpoint_.name(); }
  /// Begins to talk to the peers, by rank. `spin`: how long its thread polls before it sleeps.
  void start(const JobKey& job, const std::vector<Link>& links, std::chrono::nanoseconds spin);
  /// From now on the peer is what this leads to. Nothing of the former one counts any more.
  void link(int peer, const Link& link);

  /// Says goodbye. Nothing is sent any more; what was sent still arrives.
  void leave();

  /// Lets the peers write to a segment of this rank.
  Remote expose(SegmentId segment, std::byte* data, std::size_t bytes);
  /// Undoes it for a segment that no peer has heard of.
  void withdraw(SegmentId segment);
  void attach(int peer, SegmentId segment, const Remote& remote);

  enum class OpKind : std::uint8_t { write, message, receive };
  /// One operation of libfabric, from the post to its completion. Of a chunk the owner fills
  /// `buffer`, and sets `bytes`, `to` and `stream`.
  struct Op {
    fi_context2 context{};  // libfabric's; first, so that its address is the op's
    OpKind kind = OpKind::message;
    Peer* peer = nullptr;  // stays there when another process takes the rank's place
    Buffer buffer{};
    std::size_t bytes = 0;
    Op* payload = nullptr;     // of a message: a chunk that goes behind it
    Address to{};              // of a write
    std::uint32_t stream = 0;  // and whether with its companion
    std::size_t load = 0;      // bytes of a write that is on its way
  };
  std::size_t chunk_bytes() const { return chunks_.bytes(); }
  /// An empty chunk, which ends with `write_chunk`, `send` or `drop_chunk`. Null: the peer has as
  /// many as it may, or is gone.
  Op* take_chunk(int peer);
  /// Waits until the peer may have one more, not longer than that. Its thread does all work
  /// meanwhile.
  void await_chunk(int peer, std::chrono::nanoseconds longest);
  /// No chunk is on its way to the peer.
  bool is_idle(int peer);
  /// Gives a chunk to the network. It takes the signal along that was told as its companion, if
  /// that one waits, alone.
  void write_chunk(Op* chunk);
  /// `payload`: a chunk whose bytes go with the message, or null.
  void send(int peer, const Message& message, Op* payload);
  /// A message that hurries nobody: it may wait a little for others, or for the write that says the
  /// same: of stream `companion`.
  void send_soon(int peer, const Message& message, std::uint32_t companion = kNoStream);
  /// A message with a text behind it, which is copied.
  void send_text(int peer, const Message& message, std::span<const std::byte> text);
  /// Sends nothing there any more.
  void exclude(int peer);
  void drop_chunk(Op* chunk);
  /// Bytes of chunks that are on their way.
  std::size_t load() const { return load_.load(std::memory_order_relaxed); }
  /// Bytes of all chunks so far.
  std::uint64_t sent() const { return sent_.load(std::memory_order_relaxed); }

  /// By a thread that waits: makes progress, unless somebody is at it. For a while this endpoint's
  /// thread stays away from the network then: two threads that wake up for each message cost more
  /// than they carry.
  void help() noexcept;
  /// Who helped sleeps now.
  void hand_over() noexcept;
  /// Who helped does something else now: the endpoint's thread comes if anything is still to be
  /// sent.
  void rest() noexcept;

  /// A forked child has no such thread and shares the sockets: there an endpoint is never
  /// destroyed.
  bool in_forked_child() const;
  /// The peer cannot be reached any more.
  bool lost(int peer) const noexcept;
  /// It said goodbye.
  bool left(int peer) const noexcept;
  std::chrono::nanoseconds silent_for(int peer) const noexcept;
  /// It has several peers, and all are silent: its own NIC may be cut off.
  bool isolated() const noexcept;

 private:
  struct Peer {
    bool linked = false;  // set before others see it
    fi_addr_t address = FI_ADDR_UNSPEC;
    WayKey to_key{};
    WayKey from_key{};
    std::vector<Remote> segments{};
    std::vector<Message> held{};  // go with the next message, or when the endpoint's thread polls
    std::uint32_t companion = kNoStream;  // whose piece says what the last of them says
    std::deque<Op*> backlog{};            // the provider had no room
    std::size_t chunks = 0;               // open, in the backlog or under way
    std::size_t load = 0;                 // bytes of its chunks that are on their way
    std::size_t under_way = 0;            // posted, not completed
    Clock::time_point moved{};            // when the provider last took or completed anything
    Clock::time_point told{};             // when this rank last sent anything
    bool bye_seen = false;                // it knows that this rank leaves
    bool spoke = false;                   // there was a connection
    std::atomic<bool> lost{false};
    std::atomic<bool> left{false};
    std::atomic<std::int64_t> heard{0};  // when it last said anything, ns of Clock
    bool gone() const { return lost.load() || left.load(); }
  };

  Peer& peer_of(int rank) { return *peers_[static_cast<std::size_t>(rank)].load(); }
  const Peer& peer_of(int rank) const { return *peers_[static_cast<std::size_t>(rank)].load(); }
  void set_peer(int rank, const Link& link);

  // endpoint_send.cpp; all but `locked` under the lock
  std::unique_lock<std::mutex> locked();
  void send_message(int rank, const Message& message, Op* payload,
                    std::span<const std::byte> text = {});
  void send_held(int rank);
  Op* new_op(OpKind kind, Peer* peer);
  void recycle(Op* op);
  void submit(Op* op);
  bool post(Op* op);
  bool post_backlog(Peer& peer);
  void lose(Peer& peer);

  // endpoint.cpp
  void run();
  void sleep();
  bool heeded(int fd);
  void heed_new_connections();
  bool sending() const;
  void park();
  bool helped() const;
  void wake();
  bool try_progress(Clock::time_point now);

  // endpoint_progress.cpp; under the lock
  bool progress(Clock::time_point now);
  bool read_completions();
  void complete(const fi_cq_data_entry& entry);
  void failed(const fi_cq_err_entry& entry);
  void receive(Op* op);
  void piece(std::uint64_t data);
  void message(const Message& message, const std::byte* payload);
  bool is_link_message(const Message& message) const;
  void beat(Clock::time_point now);
  bool is_lost(const Peer& peer, Clock::time_point now) const;
  void heard_from(Peer& peer);
  bool all_said_goodbye(Clock::time_point start) const;

  const Library& library_;
  const EndpointSetting setting_;
  Arrivals& arrivals_;
  FiEndpoint fi_endpoint_;
  const pid_t owner_pid_;
  int wake_fd_ = -1;
  std::atomic<int> callers_{0};  // wait for the lock
  std::mutex mutex_;             // of what follows, and of all calls into libfabric
  std::condition_variable room_;
  std::vector<Registration> own_;  // by segment
  Buffers chunks_;
  Buffers messages_;
  std::vector<std::unique_ptr<Op>> ops_;
  std::vector<Op*> free_ops_;
  std::deque<Op*> refused_receives_{};               // the provider had no room
  std::vector<std::atomic<Peer*>> peers_;            // by rank
  std::vector<std::unique_ptr<Peer>> ever_peers_{};  // and those whose places others have taken
  JobKey job_{};
  std::chrono::nanoseconds spin_{};
  bool stop_ = false;
  std::optional<Clock::time_point> leaves_{};  // since when
  Clock::time_point now_{};                    // when somebody last looked at the network
  Clock::time_point last_beat_{};
  // Numbers to choose endpoints by, and for statistics: relaxed.
  std::atomic<std::size_t> load_{0};
  std::atomic<std::uint64_t> sent_{0};
  std::atomic<bool> asleep_{false};
  std::atomic<bool> parked_{false};
  std::atomic<std::uint64_t> moves_{0};  // times that anybody found something to do
  std::atomic<std::int64_t> helped_{0};  // when somebody last did, ns of Clock
  /// Of the endpoint's thread: descriptors that stay readable with nothing to do, and how often
  /// each was found so.
  std::map<int, int> false_alarms_{};
  std::thread thread_{};
};

}  // namespace ferry::fabric::ofi
