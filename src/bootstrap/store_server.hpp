// The TCP store's side of every connection, without sockets, threads or clocks of its own: the
// caller says what arrived, when, and asks what to write. Never throws on account of a peer.
#pragma once
#include <chrono>
#include <cstdint>
#include <functional>
#include <map>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include "bootstrap/frame_queue.hpp"
#include "bootstrap/store_messages.hpp"

namespace ferry::bootstrap {

class StoreServer {
 public:
  using Connection = std::uint64_t;
  using TimePoint = std::chrono::steady_clock::time_point;

  struct Config {
    int size = 1;
    std::string secret{};
    std::function<Nonce()> nonce = random_nonce;
    /// A connection that has not proved the secret by then is dropped.
    std::chrono::milliseconds handshake = std::chrono::seconds(5);
    /// Strangers that said nothing yet, and as many again that said hello; see `surplus`.
    /// 0: size + 64, so that all ranks can knock at once.
    std::size_t pending_at_most = 0;
  };

  explicit StoreServer(Config config);

  Connection open(TimePoint now);
  /// Rank 0's own connection: no stranger's, so nothing crowds it out and it has time.
  Connection open_own();
  void receive(Connection id, std::span<const std::byte> bytes);
  /// The oldest stranger of a kind that has too many: read what it has sent, and if it is still
  /// the one, `evict` it. Each kind has room of its own, so that neither drives out the other.
  std::optional<Connection> surplus() const;
  void evict(Connection id) { drop(peers_.at(id)); }
  /// The peer closed, or the connection broke.
  void end_of_stream(Connection id);
  /// The bytes to write next; empty if none. Valid until the next call of anything.
  std::span<const std::byte> output(Connection id) const;
  void written(Connection id, std::size_t n);
  enum class Fate {
    open,
    ending,   ///< nothing more will be said: flush output, shut down, close at the peer's end
    dropped,  ///< close now
  };
  Fate fate(Connection id) const;
  /// The connection is closed.
  void forget(Connection id);

  /// Drops handshakes and endings that took too long. To be called before `receive`, too: it is
  /// how the server knows what time it is.
  void tick(TimePoint now);
  /// When `tick` is due, if ever.
  std::optional<TimePoint> next_tick() const;

  /// Rank 0 leaves: whoever waits hears that, everyone else that the store closes.
  void close();

  bool failed() const { return failure_.has_value(); }
  /// All ranks have met, or will not any more: nobody who is missing may still come.
  bool settled() const { return failed() || round_ > 0; }
  std::size_t connections() const { return peers_.size(); }
  std::size_t pending() const;

 private:
  enum class Phase { fresh, challenged, joined, ending, dropped };
  struct Peer {
    Phase phase = Phase::fresh;
    TimePoint due{};  // of the handshake, or of the ending
    FrameParser parser{};
    FrameQueue output{};
    Transcript transcript{};
    bool own = false;           // rank 0's
    int rank = -1;              // once joined
    std::size_t announced = 0;  // counted in announced_

    bool pending() const { return rank < 0 && !own && phase != Phase::dropped; }
    bool listening() const { return phase != Phase::ending && phase != Phase::dropped; }
  };
  enum class Presence { absent, here, gone };
  struct Member {
    Presence presence = Presence::absent;
    Connection connection = 0;
    std::shared_ptr<const SharedPayload> given{};  // in this round
  };

  void on_bad_frame(Peer& peer);
  void on_frame(Connection id, Peer& peer, Frame frame);
  void on_hello(Peer& peer, const Frame& frame);
  void on_proof(Connection id, Peer& peer, const Frame& frame);
  void on_give(Peer& peer, Frame frame);
  void on_ask(Peer& peer);
  void on_goodbye(Peer& peer, const Frame& frame);
  void count_announced(Peer& peer);
  std::optional<Refusal> reason_to_refuse(const Transcript& who) const;
  void refuse(Peer& peer, const Refusal& refusal);
  void finish_round();
  void drop(Peer& peer);
  void gone(Peer& peer);
  void fail(const Failure& failure);
  bool waiting() const { return given_ > 0; }
  Absences absences() const;
  FrameHeader header(FrameType type, int rank = 0) const;

  Config config_;
  std::map<Connection, Peer> peers_;
  Connection next_ = 1;
  TimePoint now_{};
  std::vector<Member> members_;
  std::uint64_t round_ = 0;
  std::size_t given_ = 0;        // ranks that gave in this round
  std::size_t given_bytes_ = 0;  // of this round
  std::size_t announced_ = 0;    // bytes of frames that are arriving
  int left_ = -1;                // a rank that said goodbye
  std::optional<Failure> failure_;
  std::uint32_t refused_ = 0;
  RefusalCode last_refusal_ = RefusalCode::none;
};

}  // namespace ferry::bootstrap
