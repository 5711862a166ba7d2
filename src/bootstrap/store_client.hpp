// One rank's side of the TCP store, without the socket: bytes in, bytes out, and what was learnt.
#pragma once
#include <cstdint>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include "bootstrap/frame_queue.hpp"
#include "bootstrap/store_messages.hpp"

namespace ferry::bootstrap {

class StoreClient {
 public:
  struct Config {
    int rank = 0;
    int size = 1;
    std::string secret{};
    Nonce nonce{};  ///< fresh for each connection
  };
  enum class State {
    handshake,    ///< the handshake is under way
    joined,       ///< admitted
    refused,      ///< see refusal()
    not_a_store,  ///< what answered is no Ferry store, or broke the protocol
    impostor,     ///< a store that could not prove the secret
    lost,         ///< the connection ended without a word
    closed,       ///< rank 0 left in good order
  };

  /// The hello frame is ready to be written at once.
  explicit StoreClient(Config config);

  void receive(std::span<const std::byte> bytes);
  void end_of_stream();
  /// Bytes to write; see FrameQueue.
  FrameQueue& output() { return output_; }

  State state() const { return state_; }
  bool answered() const { return answered_; }  ///< a Ferry store answered
  const std::optional<Refusal>& refusal() const { return refusal_; }

  /// Starts a gather. Only when joined, one at a time; at most kMaxMessageBytes.
  void give(std::span<const std::byte> mine);
  /// All parts of the gather that `give` started are here.
  bool complete() const { return giving_ && arrived_ == parts_.size(); }
  /// The parts, once complete; the next gather may start.
  std::vector<std::vector<std::byte>> take();
  std::uint64_t sequence() const { return sequence_; }
  std::size_t arrived() const { return arrived_; }

  /// Asks the store who is missing; `absences` is its last answer in this gather.
  void ask();
  const std::optional<Absences>& absences() const { return absences_; }
  std::uint64_t answers() const { return answers_; }  ///< how many there were
  /// Why the ranks cannot meet any more, as the store said.
  const std::optional<Failure>& failure() const { return failure_; }

  /// Says why this rank goes. Nothing but output() may be used afterwards.
  void leave(Farewell farewell);

 private:
  void on_frame(Frame frame);
  void on_challenge(const Frame& frame);
  void on_welcome(const Frame& frame);
  void on_part(Frame frame);
  FrameHeader header(FrameType type) const;

  Config config_;
  State state_ = State::handshake;
  FrameParser parser_;
  FrameQueue output_;
  std::optional<Proofs> proofs_;
  bool answered_ = false;
  std::optional<Refusal> refusal_;
  std::uint64_t sequence_ = 0;  // of the gather that is under way or comes next
  bool giving_ = false;
  std::size_t arrived_ = 0;
  std::size_t bytes_ = 0;  // of the parts
  std::vector<std::vector<std::byte>> parts_;
  std::optional<Absences> absences_;
  std::uint64_t answers_ = 0;
  std::optional<Failure> failure_;
};

}  // namespace ferry::bootstrap
