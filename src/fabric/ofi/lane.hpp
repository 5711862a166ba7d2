// One endpoint of a rank and its traffic with all peers: what it sends, what it counts as it
// arrives, and the thread that makes progress.
#pragma once
#include <array>
#include <atomic>
#include <chrono>
#include <condition_variable>
#include <cstddef>
#include <cstdint>
#include <deque>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <span>
#include <thread>
#include <utility>
#include <vector>

#include "fabric/fabric.hpp"
#include "fabric/ofi/buffers.hpp"
#include "fabric/ofi/endpoint.hpp"
#include "fabric/ofi/message.hpp"
#include "protocol/counted_signal.hpp"
#include "protocol/reach.hpp"

namespace ferry::fabric::ofi {

using Clock = std::chrono::steady_clock;

/// A peer's segment as this lane writes to it.
struct Remote {
  std::uint64_t base = 0;
  std::uint64_t key = 0;
};

/// What a lane is told when it is made.
struct LaneSetting {
  int rank = 0;
  int size = 1;
  int index = 0;
  bool beats = false;                   ///< this lane also tells the peers that this rank is alive
  std::chrono::nanoseconds deadline{};  ///< how long a peer may take no data
};

/// Rows are copied into chunks, which cross as one write each when they are full or when a signal
/// follows: small rows to one place cost few writes, and a caller may reuse its memory at once. A
/// copy it is, for what the network still reads cannot be taken back at a deadline.
///
/// A write carries its stream: pieces of one stream are counted at the target, and the signal says
/// how many there are, so neither writes nor messages need any order. Thread-safe.
class Lane {
 public:
  Lane(const Library& library, Info info, const LaneSetting& setting);
  /// Says goodbye, so that what it sent still arrives, for at most a second; then ends.
  ~Lane();
  Lane(const Lane&) = delete;
  Lane& operator=(const Lane&) = delete;

  std::vector<std::byte> name() const { return endpoint_.name(); }
  /// Begins to talk to the peers whose endpoints have these names, by rank. `spin`: how long its
  /// thread looks before it sleeps.
  void start(const JobKey& job, const std::vector<std::vector<std::byte>>& names,
             std::chrono::nanoseconds spin);

  /// Lets the peers write to a segment of this rank.
  Remote expose(SegmentId segment, std::byte* data, std::size_t bytes);
  /// Undoes it for a segment that no peer has heard of.
  void withdraw(SegmentId segment);
  void attach(int peer, SegmentId segment, const Remote& remote);
  /// `look_up`: what a caller that waits for room does now and then; it may throw.
  using LookUp = std::function<void(int peer)>;
  void put(int peer, Address to, std::span<const Piece> pieces, std::uint64_t tag,
           const LookUp& look_up);
  void publish(int peer, Address flag, std::uint64_t value, std::uint64_t bytes, std::uint64_t tag);

  /// By a thread that waits: makes progress, unless somebody is at it. For a while this lane's
  /// thread stays away from the network then: two threads that wake up for each message cost more
  /// than they carry.
  void help() noexcept;
  /// Who helped sleeps now.
  void hand_over() noexcept;

  /// A forked child has no such thread and shares the sockets: there a lane is never destroyed.
  bool in_forked_child() const;
  /// The peer cannot be reached any more.
  bool lost(int peer) const noexcept;
  /// It said goodbye.
  bool left(int peer) const noexcept;
  std::chrono::nanoseconds silent_for(int peer) const noexcept;

 private:
  using Place = protocol::Place;
  using Signal = protocol::ArrivedSignal<Place>;

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
  enum class OpKind : std::uint8_t { write, message, receive };
  /// One operation of libfabric, from the post to its completion.
  struct Op {
    fi_context2 context{};  // libfabric's; first, so that its address is the op's
    OpKind kind = OpKind::message;
    int peer = -1;
    Buffer buffer{};
    std::size_t bytes = 0;
    Op* payload = nullptr;  // of a message: a chunk that goes behind it
    Address to{};           // of a write
    std::uint64_t tag = 0;  // of a write
    std::uint32_t stream = 0;
    Tagged* tagged = nullptr;  // of a write that still grows
  };
  struct Peer {
    fi_addr_t address = FI_ADDR_UNSPEC;
    Token to_token{};    // in what goes there
    Token from_token{};  // in what comes from there
    std::vector<Remote> segments{};
    std::map<std::uint64_t, Tagged> tags{};
    std::map<std::pair<SegmentId, std::uint64_t>, std::uint64_t> sequences{};  // by flag word
    std::uint32_t next_stream = 0;
    Op* open = nullptr;           // a write that still grows
    std::vector<Message> held{};  // go with the next message, or when the lane's thread looks
    std::deque<Op*> backlog{};    // the provider had no room
    std::size_t chunks = 0;       // open, in the backlog or under way
    std::size_t under_way = 0;    // posted, not completed
    Clock::time_point moved{};    // when the provider last took or completed anything
    Clock::time_point told{};     // when this rank last sent anything
    bool bye_seen = false;        // it knows that this rank leaves
    bool spoke = false;           // there was a connection
    std::atomic<bool> lost{false};
    std::atomic<bool> left{false};
    std::atomic<std::int64_t> heard{0};  // when it last said anything, ns of Clock
    bool gone() const { return lost.load() || left.load(); }
  };

  Peer& peer_of(int rank) { return *peers_[static_cast<std::size_t>(rank)]; }
  const Peer& peer_of(int rank) const { return *peers_[static_cast<std::size_t>(rank)]; }

  // lane_send.cpp; all but `locked` under the lock
  std::unique_lock<std::mutex> locked();
  Tagged& tagged(Peer& peer, std::uint64_t tag);
  bool await_chunk(std::unique_lock<std::mutex>& lock, int rank, const LookUp& look_up);
  bool copy_in(std::unique_lock<std::mutex>& lock, int rank, Address to, const Piece& piece,
               std::uint64_t tag, const LookUp& look_up);
  void flush(Peer& peer);
  void send_signal(int rank, const Held& held, std::uint64_t tag);
  /// `payload`: a chunk that is not submitted; it ends with the message.
  void send_message(int rank, Message message, Op* payload);
  void send_held(int rank);

  // lane_post.cpp; under the lock
  Op* new_op(OpKind kind, int peer);
  void recycle(Op* op);
  void submit(Op* op);
  bool post(Op* op);
  bool post_backlog(Peer& peer);
  void lose(Peer& peer);

  // lane_thread.cpp
  void run();
  void sleep();
  void park();
  bool helped() const;
  void wake();
  bool try_progress(Clock::time_point now);

  // lane_progress.cpp; under the lock
  bool progress(Clock::time_point now);
  bool read_completions();
  void complete(const fi_cq_data_entry& entry);
  void failed(const fi_cq_err_entry& entry);
  void receive(Op* op);
  void piece(std::uint64_t data);
  void message(const Message& message, const std::byte* payload);
  void signal(const Message& message, const std::byte* payload);
  void release(const Signal& signal);
  std::byte* own_bytes(SegmentId segment, std::uint64_t offset, std::uint64_t bytes) const;
  void beat(Clock::time_point now);
  bool is_lost(const Peer& peer, Clock::time_point now) const;
  void heard_from(Peer& peer);
  bool all_said_goodbye(Clock::time_point start) const;

  const Library& library_;
  const LaneSetting setting_;
  Endpoint endpoint_;
  const pid_t owner_pid_;
  int wake_fd_ = -1;
  std::atomic<int> callers_{0};  // wait for the lock
  std::mutex mutex_;             // of what follows, and of all calls into libfabric
  std::condition_variable room_;
  struct Own {
    std::byte* data = nullptr;
    std::size_t bytes = 0;
    Registration registration{};
  };
  std::vector<Own> own_;  // by segment
  Buffers chunks_;
  Buffers messages_;
  std::vector<std::unique_ptr<Op>> ops_;
  std::vector<Op*> free_ops_;
  std::deque<Op*> refused_receives_{};  // the provider had no room
  std::vector<std::unique_ptr<Peer>> peers_;
  protocol::CountedSignals<Place> signals_;
  std::chrono::nanoseconds spin_{};
  bool stop_ = false;
  Clock::time_point looked_up_{};
  Clock::time_point now_{};  // when somebody last looked at the network
  Clock::time_point last_beat_{};
  std::atomic<bool> asleep_{false};
  std::atomic<bool> parked_{false};
  std::atomic<std::uint64_t> moves_{0};  // times that anybody found something to do
  std::atomic<std::int64_t> helped_{0};  // when somebody last did, ns of Clock
  /// Of the lane's thread: descriptors that stay readable with nothing to do, and how often each
  /// was found so.
  std::map<int, int> false_alarms_{};
  std::thread thread_{};
};

}  // namespace ferry::fabric::ofi
