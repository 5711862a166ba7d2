// A thread that does on the network what kernels ask for: it takes their commands from a ring in
// pinned memory, posts them through the group's fabric, and tells the stream how much from the
// other side is there, portion by portion, by a word that the stream waits for. No SM is held
// meanwhile.
//
// All of a group's talk between its CPUs is on this thread, in the order of the calls; a caller
// that needs an answer itself hands in a step and waits for it. Whatever fails, every stream that
// waits for the words is let go: its kernels then find out that the group has failed.
#pragma once
#include <atomic>
#include <chrono>
#include <condition_variable>
#include <cstdint>
#include <deque>
#include <functional>
#include <memory>
#include <mutex>
#include <optional>
#include <thread>
#include <vector>

#include "base/kept_error.hpp"
#include "engine/channel.hpp"
#include "protocol/command_ring.hpp"

namespace ferry::engine {

/// What the streams and the proxy tell each other, in pinned memory; each alone on its line.
/// Streams compare the low 32 bits: numbers stay below 2^31, or one wait is let go too early only
/// after 2^31 commands.
struct ProxyWords {
  std::uint64_t* arrived = nullptr;  ///< portions of calls that are here
  std::uint64_t* taken = nullptr;    ///< commands taken from the ring
};
/// Added to a word that lets every wait go.
inline constexpr std::uint64_t kLetGo = std::uint64_t{1} << 30;

/// A block of rows for one peer, and where it goes.
struct CrossingWindow {
  int peer = 0;
  std::uint64_t from = 0;   ///< where it begins in the own staging buffer
  std::uint64_t to = 0;     ///< and in what the peer grants
  std::uint64_t bytes = 0;  ///< its room, the same on both sides
};

/// What comes from one peer.
struct CrossingFrom {
  int peer = 0;
  std::int64_t chunks = 0;
};

/// One call, as the proxy carries it. The fields below `number` are what came of it. Each put is a
/// chunk, which the peer is told of by itself; of a window they are made in ascending order.
struct CrossingCall {
  const char* stage = "";
  StepMessage head{};       ///< stage_segment, stage_offset: where peers write
  std::uint64_t first = 0;  ///< number of its `begin`; its puts follow
  std::uint64_t puts = 0;
  const std::byte* from = nullptr;  ///< the own staging buffer
  std::vector<CrossingWindow> windows{};
  std::vector<CrossingFrom> sources{};
  int portions = 1;  ///< that this stream waits for (core/crossing_layout.hpp)
  /// Ranks of the domain for which this one will wait on a GPU once all is here: so the last
  /// portion is told of when they have theirs, too.
  std::vector<int> together{};
  /// After the swap of heads, on the proxy's thread: throws what every rank throws alike. Nothing
  /// crosses then, and the group goes on.
  std::function<void(Channel&)> agree{};
  std::uint64_t number =
      0;  ///< of its last portion; `arrived` becomes that. All puts are posted then

  std::atomic<bool> ended{false};
  std::atomic<bool> crossed{false};  ///< all that was to come is there
  std::optional<Error> refused{};    ///< to be read when it has ended
};

class Proxy {
 public:
  /// `ring`, `words`: zeroed. `on_failure`: called once, on the proxy's thread, when the group has
  /// failed.
  Proxy(Channel& channel, const protocol::CommandRing<>& ring, const ProxyWords& words,
        std::chrono::nanoseconds deadline, std::function<void(const Error&)> on_failure);
  /// Stops, letting go of all waits.
  ~Proxy();
  Proxy(const Proxy&) = delete;
  Proxy& operator=(const Proxy&) = delete;

  /// In the order of calls. After a failure: ends at once.
  void submit(std::shared_ptr<CrossingCall> call);
  /// Runs `step` in its turn and waits for it, asking `on_wait`; throws what either throws. A step
  /// that was given up still runs.
  void run(std::function<void()> step, const OnWait& on_wait);
  /// Lets go of every wait, now and later: the group has failed. Any thread.
  void let_go();
  /// Ends the thread, until `resume`: a call that it carries when the group has failed ends soon.
  /// All waits are let go. Not from the thread itself.
  void pause();
  /// Begins anew, with words and numbers from 0, unless it was stopped. Nothing waits for the words
  /// and no kernel makes commands, and the ring is zeroed.
  void resume();
  /// Ends the thread for good. Streams that still wait are let go.
  void stop();

 private:
  struct Step {
    std::function<void()> work{};
    KeptError error{};
    bool done = false;
  };
  void serve();
  void carry(CrossingCall& call);
  class Arrivals;
  void await_command(CrossingCall& call, std::uint64_t number, protocol::Command& command,
                     bool bounded, Arrivals* meanwhile);
  void put(CrossingCall& call, const protocol::Command& command);
  void arrive(std::uint64_t number);

  Channel& channel_;
  protocol::CommandRing<> ring_;
  ProxyWords words_;
  std::chrono::nanoseconds deadline_;
  std::function<void(const Error&)> on_failure_;
  std::mutex mutex_;
  std::condition_variable changed_;
  std::deque<std::function<void()>> tasks_;
  std::atomic<bool> stopping_{false};
  bool stopped_ = false;  // for good
  bool failed_ = false;   // of the proxy's thread
  std::mutex words_mutex_;
  bool gone_ = false;  // all waits were let go
  std::mutex thread_mutex_;
  std::thread thread_;
};

}  // namespace ferry::engine
