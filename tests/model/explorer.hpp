// Explores code written against protocol/sync.hpp: every interleaving up to a bound of preemptions,
// every store that a weak load may return, every order in which a network may deliver.
//
// Ranks are fibers on one OS thread. One execution is a list of choices; depth-first search replays
// a prefix and takes the next choice. States reached before (same place of every fiber, same
// knowledge and memory, no fewer preemptions left) are not explored twice.
//
// The memory: C++20's release/acquire/relaxed over vector clocks; the modification order of a word
// follows the order of execution (exact for words with one writer; compare-exchange reads the
// newest value, as the standard says). A wait is one step: it takes any visible store that
// satisfies it. Reads of values that do not satisfy it are left out, since they could only add
// order. A wait whose newest store no longer satisfies it may also miss the older one that did.
// A sleep is a futex's: it begins if a visible store has the value told, and ends with a wake of
// that word. Sleeps and wakes of a word come one after another, and the later ones know what the
// earlier ones knew; who was woken knows no more than before.
#pragma once

#include <algorithm>
#include <array>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <map>
#include <memory>
#include <random>
#include <string>
#include <string_view>
#include <unordered_map>
#include <vector>

#include "platform/posix/test_fiber.hpp"
#include "protocol/sync.hpp"

namespace ferry::model {

using test::Fiber;

inline constexpr int kMaxActors = 40;             // fibers, network links, the observer
inline constexpr int kObserver = kMaxActors - 1;  // looks at the memory when all is over
inline constexpr std::size_t kArenaBytes = 16 << 10;

/// Who knows which step of whom.
struct Clock {
  std::array<std::uint16_t, kMaxActors> at{};
  void join(const Clock& other) {
    for (std::size_t i = 0; i < at.size(); ++i) at[i] = std::max(at[i], other.at[i]);
  }
};

/// What is under way in a network. Delivery waits until somebody reads: an earlier delivery would
/// change nothing that a rank can observe, because races are found by order, not by time.
class Wire {
 public:
  virtual ~Wire() = default;
  virtual int pending(const void* word) const = 0;  ///< items whose delivery may change the word
  virtual void deliver(const void* word, int index) = 0;
  virtual void drain() = 0;  ///< delivers everything, at the end of an execution
  virtual std::uint64_t hash() const = 0;
};

/// What to explore. Bodies run on fibers that are dropped in the middle: they and what they call
/// must hold nothing on their stack that needs a destructor. Shared memory lies in the arena.
struct Scenario {
  int fibers = 0;
  std::function<void()> setup;    ///< before each execution; the arena is zero
  std::function<void(int)> body;  ///< one fiber
  std::function<void()> finish;   ///< after an execution in which all fibers ended
  Wire* wire = nullptr;
  bool silent_rank = false;  ///< somebody never comes: waits may end by deadline when all wait
};

struct Bounds {
  int preemptions = 2;                   ///< switches away from a fiber that could go on
  int slices = 0;                        ///< time slices that end early, anywhere, per execution
  std::uint64_t executions = 3'000'000;  ///< reaching it is a failure
  int overtakes = 2;                     ///< deliveries out of order, or before somebody needs them
  bool naive = false;  ///< without any reduction: what the reductions are tested against
};
inline constexpr int kAnyOrder = 1'000'000;

struct Report {
  bool passed = false;    ///< nothing wrong in what was explored
  bool complete = false;  ///< everything within the bounds was explored
  std::string failure;
  std::string schedule;  ///< the failing execution, one step a line
  std::uint64_t executions = 0;
  std::uint64_t states = 0;
};

class Explorer {
 public:
  Report explore(const Scenario& scenario, const Bounds& bounds);
  /// Random executions instead of all: for cases that are too large.
  Report sample(const Scenario& scenario, const Bounds& bounds, std::uint64_t seed);

  static Explorer& current();

  std::byte* arena() { return arena_.data(); }
  /// Names a piece of the arena for failing schedules.
  void name(const void* from, std::size_t bytes, std::string text);
  /// Ends the execution as failed; called by bodies.
  void fail(std::string_view what, const void* place = nullptr);
  /// The running body's variables are a function of `value` from here on: what it did before no
  /// longer tells states apart. Saves much; a lie hides errors.
  void checkpoint(std::uint64_t value);
  /// Only `fiber` reads these flags (checked). Said in `setup`; saves much.
  void only_reader(const void* from, std::size_t bytes, int fiber);
  /// Adds a line to a failing schedule. Costs nothing otherwise, if `tracing()` is asked first.
  void note(const std::string& text);
  bool tracing() const { return tracing_; }
  /// Whether a time slice ended early in this execution.
  bool slices_used() const { return slices_used_ > 0; }
  int fiber() const { return current_; }

  // What sync.hpp binds to.
  std::uint64_t load(const std::uint64_t* word, protocol::order o);
  void store(std::uint64_t* word, std::uint64_t value, protocol::order o);
  bool compare_exchange(std::uint64_t* word, std::uint64_t& expected, std::uint64_t desired,
                        protocol::order o);
  std::uint64_t fetch_add(std::uint64_t* word, std::uint64_t more, protocol::order o);
  void sleep(const std::uint64_t* word, std::uint64_t seen);
  void wake(const std::uint64_t* word);
  Waited wait(const std::uint64_t* word, Reached reached, const void* context, protocol::order o);
  void access(const void* data, std::size_t bytes, bool write);

  // What a network is built from.
  Clock snapshot();  ///< what the running fiber knows now, one step on
  /// The running fiber hands `what` to the network: others may go first, as before a store.
  void send_point(std::uint64_t what);
  /// Runs `action` as `actor`, which knows `clock`; its accesses are step `tick`.
  template <class Action>
  void act_as(int actor, const Clock& clock, std::uint16_t tick, Action action) {
    const int previous = actor_;
    const std::uint16_t previous_tick = wire_tick_;
    actor_ = actor;
    wire_tick_ = tick;
    clocks_[static_cast<std::size_t>(actor)] = clock;
    action();
    actor_ = previous;
    wire_tick_ = previous_tick;
  }

 private:
  struct Store {
    std::uint64_t value;
    Clock release;  // what an acquire of this store learns
    int actor;      // -1: the initial value
    std::uint16_t tick;
    std::uint64_t hash;
  };
  struct Word {
    std::vector<Store> stores;
    std::array<std::uint16_t, kMaxActors> seen{};  // newest store that each actor knows
    int reader = -1;                               // the only fiber that loads it; -1: any
    Clock futex;                                   // what its sleeps and wakes have known
    bool used = false;
  };
  struct Granule {  // 8 bytes of plain data
    int writer = -1;
    std::uint16_t written = 0;
    Clock reads;
    bool used = false;
  };
  enum class State : std::uint8_t { kReady, kWaiting, kAsleep, kDone };
  struct Strand {
    Fiber fiber;
    State state = State::kReady;
    const std::uint64_t* word = nullptr;
    Reached reached = nullptr;
    const void* context = nullptr;
    bool stored = false;  // since the last switch: others may have something new to see
    bool quiet = false;   // its slice ended because nothing else could happen
    bool woken = false;   // from its sleep
    std::uint64_t hash = 0;
  };
  struct Options {
    std::array<std::uint16_t, 64> reads;
    int count = 0;
    bool miss = false;
    int deliveries = 0;  // of the items under way, in order; all but the first overtake
    int total() const { return count + (miss ? 1 : 0) + deliveries; }
  };

  Report search(const Scenario& scenario, const Bounds& bounds, bool random);
  void run_once();
  bool advance();
  std::size_t choose(std::size_t n);
  enum class At { kOperation, kBlock, kWait };
  bool known(At at);
  void schedule_point();
  void block();
  void resume(int next);
  void leave();  // back to the search
  void finish_fiber();
  Options options(int strand);
  bool can_go_on(int strand);
  void end_slice();
  std::size_t oldest_visible(const Word& word, int actor) const;
  void take(Word& word, std::size_t index, protocol::order o, const char* verb,
            const std::uint64_t* address);
  void append(std::uint64_t* word, std::uint64_t value, protocol::order o, const Clock& base);
  Word& word_at(const std::uint64_t* word);
  bool knows(int actor, int writer, std::uint16_t tick) const;
  void remember(std::uint64_t a, std::uint64_t b);
  std::string where(const void* address) const;
  std::uint16_t step();
  void stored(int reader);

  const Scenario* scenario_ = nullptr;
  Bounds bounds_;
  alignas(64) std::array<std::byte, kArenaBytes> arena_{};
  std::vector<Word> words_ = std::vector<Word>(kArenaBytes / 8);
  std::vector<Granule> granules_ = std::vector<Granule>(kArenaBytes / 8);
  std::vector<std::size_t> used_words_, used_granules_;
  std::vector<std::unique_ptr<Strand>> strands_;
  std::array<Clock, kMaxActors> clocks_;
  Fiber main_;
  int current_ = 0;
  int actor_ = 0;
  std::uint16_t wire_tick_ = 0;
  int preemptions_ = 0;
  int slices_used_ = 0;
  int quiet_slices_ = 0;
  int overtakes_ = 0;
  bool pruned_ = false;
  std::string failure_;
  bool tracing_ = false;
  std::string trace_;
  std::map<std::size_t, std::pair<std::size_t, std::string>> names_;

  struct Choice {
    std::uint32_t taken, of;
  };
  std::vector<Choice> path_;
  std::size_t position_ = 0;
  std::unordered_map<std::uint64_t, std::uint8_t> visited_;
  bool random_ = false;
  std::mt19937_64 rng_;
};

}  // namespace ferry::model
