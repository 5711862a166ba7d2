// The only header that knows which memory the protocols run on: host threads and processes, or
// (FERRY_MODEL) the explorer of tests/model. Kernels
// have their own (cuda/kernels/base).
#pragma once

#include <concepts>
#include <cstddef>
#include <cstdint>
#include <cstring>

#include "core/device.hpp"
#include "protocol/status.hpp"

#if !defined(FERRY_MODEL)
#include <atomic>
#include <chrono>

#include "platform/futex.hpp"
#endif

namespace ferry::protocol {

/// How an access orders the accesses around it. No fences: thread sanitizers do not model them.
enum class order { relaxed, acquire, release };

/// What a wait asks while it sleeps. `spin_ns`: how long to spin before the first sleep (short when
/// there are fewer cores than ranks). `slice_ns`: the longest sleep before the next `check`.
/// `check`: not ok ends the wait (deadline, failed peer, interrupt); a check that names no peer
/// gets the peer of the flag. It may have `progress`, which is called while the wait spins and may
/// itself raise the flag (false: it never does), and `hand_over`, called before it sleeps.
template <class T>
concept Watch = requires(T& watch) {
  { watch.spin_ns() } -> std::convertible_to<std::uint64_t>;
  { watch.slice_ns() } -> std::convertible_to<std::uint64_t>;
  { watch.check() } -> std::same_as<Status>;
};

}  // namespace ferry::protocol

#if defined(FERRY_MODEL)
// Defined by the explorer (tests/model/explorer.cpp).
namespace ferry::model {
std::uint64_t load(const std::uint64_t* word, protocol::order o);
void store(std::uint64_t* word, std::uint64_t value, protocol::order o);
bool compare_exchange(std::uint64_t* word, std::uint64_t& expected, std::uint64_t desired,
                      protocol::order o);
std::uint64_t fetch_add(std::uint64_t* word, std::uint64_t more, protocol::order o);
/// As FUTEX_WAIT and FUTEX_WAKE.
void sleep(const std::uint64_t* word, std::uint64_t seen);
void wake(const std::uint64_t* word);
void access(const void* data, std::size_t bytes, bool write);

struct Waited {
  bool slice_ended;    // the time slice ended first
  std::uint64_t seen;  // value read
};
using Reached = bool (*)(const void* context, std::uint64_t value);
Waited wait(const std::uint64_t* word, Reached reached, const void* context, protocol::order o);
}  // namespace ferry::model
#endif

namespace ferry::protocol {

/// A flag is two words, its own and behind it the number of those who sleep on it, and lies on a
/// line of its own.
inline constexpr std::uint64_t kFlagBytes = 16, kFlagStride = 64;

/// A 64-bit word that another rank can write: zeroed at first, only ever growing (a failure
/// broadcast: written once). A flag on which nobody ever sleeps may be a word alone.
struct Flag {
  std::uint64_t* word;

  /// The value; `order::acquire` makes what its writer did before a release store visible.
  FERRY_FN std::uint64_t load(order o) const;

  /// Sets the value. Follow with `wake` if someone may wait for it.
  FERRY_FN void store(std::uint64_t value, order o) const;

  /// Sets `desired` if the word holds `expected`; otherwise loads `expected` and returns false.
  FERRY_FN bool compare_exchange(std::uint64_t& expected, std::uint64_t desired, order o) const;

  /// Adds, and returns the value before.
  FERRY_FN std::uint64_t fetch_add(std::uint64_t more, order o) const;

  /// Waits until `reached(value)` holds: ok, with `seen` = that value, or the first status of
  /// `watch.check()` that is not ok, with `seen` = the last value. A flag that is there wins over a
  /// deadline that passed meanwhile.
  template <class Reached, class W>
    requires Watch<W>
  FERRY_FN Status wait_until(Reached reached, W& watch, order o = order::acquire) const;

  /// Wakes those who sleep in `wait_until` on this word, in any process. After the word was
  /// changed.
  FERRY_FN void wake() const;
};

/// What sleeping relies on, as parameters, so that the explorer can break it.
struct SleepTraits {
  static constexpr order kCount = order::acquire;
  /// The sleep begins only if the flag still has the value that was seen.
  static constexpr bool kChecks = true;
  /// Adds nothing, because a load could come before the store of the flag.
  FERRY_FN static std::uint64_t sleepers(Flag count) { return count.fetch_add(0, order::release); }
};

/// Who sleeps on a flag. A wake is a system call, and mostly nobody sleeps: so a sleeper counts
/// itself in the flag's second word before it sleeps, and who has changed the flag reads that word
/// before it wakes. Both change the word. If the sleeper does so first, the waker finds it counted;
/// if it is second, it acquires the flag's new value, and does not sleep. A process that is killed
/// in its sleep stays counted: later changes of that flag call for a wake in vain.
template <class Traits = SleepTraits>
class Sleepers {
 public:
  FERRY_FN explicit Sleepers(Flag flag) : flag_(flag), count_{flag.word + 1} {}

  /// Sleeps while the flag is `seen`, at most so long. It may end early: the caller polls again.
  FERRY_FN void sleep(std::uint64_t seen, std::uint64_t slice_ns) const;
  /// The same until `reached`, from `seen` on. As Flag::wait_until.
  template <class Reached, class W>
    requires Watch<W>
  FERRY_FN Status sleep_until(Reached reached, W& watch, std::uint64_t seen, order o) const;
  FERRY_FN void wake() const;

 private:
  Flag flag_;
  Flag count_;
};

/// Plain data in memory that another rank also touches: ordered by flags alone, never by itself.
template <class T>
FERRY_FN T read(const T* from);
template <class T>
FERRY_FN void write(T* to, T value);
FERRY_FN void read_bytes(void* to, const void* shared_from, std::size_t bytes);
FERRY_FN void write_bytes(void* shared_to, const void* from, std::size_t bytes);

#if defined(FERRY_MODEL)

FERRY_FN std::uint64_t Flag::load(order o) const {
  return model::load(word, o);
}
FERRY_FN void Flag::store(std::uint64_t value, order o) const {
  model::store(word, value, o);
}
FERRY_FN bool Flag::compare_exchange(std::uint64_t& expected, std::uint64_t desired,
                                     order o) const {
  return model::compare_exchange(word, expected, desired, o);
}
FERRY_FN std::uint64_t Flag::fetch_add(std::uint64_t more, order o) const {
  return model::fetch_add(word, more, o);
}

// A wait of the explorer is one step: it may end whenever the word changed. That sleepers are woken
// then has a model of its own (sleep_model_test.cpp).
FERRY_FN void Flag::wake() const {}

template <class Reached, class W>
  requires Watch<W>
FERRY_FN Status Flag::wait_until(Reached reached, W& watch, order o) const {
  const auto ask = [](const void* context, std::uint64_t value) {
    return static_cast<bool>((*static_cast<const Reached*>(context))(value));
  };
  for (;;) {
    const model::Waited waited = model::wait(word, ask, &reached, o);
    Status status;
    if (waited.slice_ended) status = watch.check();
    status.seen = waited.seen;
    if (!waited.slice_ended || !status.ok()) return status;
  }
}

namespace detail {
inline void shared_access(const void* data, std::size_t bytes, bool write) {
  model::access(data, bytes, write);
}
inline void sleep_on(const std::uint64_t* word, std::uint64_t seen, std::uint64_t) {
  model::sleep(word, seen);
}
inline void wake_on(const std::uint64_t* word) {
  model::wake(word);
}
}  // namespace detail

#else

namespace detail {
constexpr std::memory_order native(order o) {
  return o == order::acquire   ? std::memory_order_acquire
         : o == order::release ? std::memory_order_release
                               : std::memory_order_relaxed;
}
inline void pause() {
#if defined(__x86_64__)
  __builtin_ia32_pause();
#elif defined(__aarch64__)
  asm volatile("yield");
#endif
}
inline void shared_access(const void*, std::size_t, bool) {}
inline void sleep_on(const std::uint64_t* word, std::uint64_t seen, std::uint64_t slice_ns) {
  futex_wait(word, seen, slice_ns);
}
inline void wake_on(const std::uint64_t* word) {
  futex_wake(word);
}
template <class W>
bool progress(W& watch) {
  if constexpr (requires { watch.progress(); }) return watch.progress();
  return false;
}
}  // namespace detail

FERRY_FN std::uint64_t Flag::load(order o) const {
  return std::atomic_ref<std::uint64_t>(*word).load(detail::native(o));
}
FERRY_FN void Flag::store(std::uint64_t value, order o) const {
  std::atomic_ref<std::uint64_t>(*word).store(value, detail::native(o));
}
FERRY_FN bool Flag::compare_exchange(std::uint64_t& expected, std::uint64_t desired,
                                     order o) const {
  // relaxed on failure: the caller gets a value, and nothing else through it.
  return std::atomic_ref<std::uint64_t>(*word).compare_exchange_strong(
      expected, desired, detail::native(o), std::memory_order_relaxed);
}
FERRY_FN std::uint64_t Flag::fetch_add(std::uint64_t more, order o) const {
  return std::atomic_ref<std::uint64_t>(*word).fetch_add(more, detail::native(o));
}
FERRY_FN void Flag::wake() const {
  Sleepers<>(*this).wake();
}

template <class Reached, class W>
  requires Watch<W>
FERRY_FN Status Flag::wait_until(Reached reached, W& watch, order o) const {
  using SteadyClock = std::chrono::steady_clock;
  Status status;
  status.seen = load(o);
  if (reached(status.seen)) return status;
  if (const std::uint64_t spin_ns = watch.spin_ns(); spin_ns > 0) {
    const auto end = SteadyClock::now() + std::chrono::nanoseconds(spin_ns);
    do {
      if (detail::progress(watch)) {
        status.seen = load(o);
        if (reached(status.seen)) return status;
        continue;
      }
      for (int i = 0; i < 16; ++i) {
        detail::pause();
        status.seen = load(o);
        if (reached(status.seen)) return status;
      }
    } while (SteadyClock::now() < end);
  }
  if constexpr (requires { watch.hand_over(); }) watch.hand_over();
  return Sleepers<>(*this).sleep_until(reached, watch, status.seen, o);
}

#endif

template <class Traits>
FERRY_FN void Sleepers<Traits>::sleep(std::uint64_t seen, std::uint64_t slice_ns) const {
  // Acquire: the changes of the flag by wakers that did not find this one counted.
  count_.fetch_add(1, Traits::kCount);
  detail::sleep_on(flag_.word, Traits::kChecks ? seen : flag_.load(order::relaxed), slice_ns);
  // relaxed: who still finds this one counted wakes nobody.
  count_.fetch_add(~std::uint64_t{0}, order::relaxed);
}

template <class Traits>
template <class Reached, class W>
  requires Watch<W>
FERRY_FN Status Sleepers<Traits>::sleep_until(Reached reached, W& watch, std::uint64_t seen,
                                              order o) const {
  Status status;
  status.seen = seen;
  for (;;) {
    sleep(status.seen, watch.slice_ns());
    status.seen = flag_.load(o);
    if (reached(status.seen)) return status;
    if (Status verdict = watch.check(); !verdict.ok()) {
      verdict.seen = flag_.load(o);
      if (!reached(verdict.seen)) return verdict;
      status.seen = verdict.seen;
      return status;
    }
  }
}

template <class Traits>
FERRY_FN void Sleepers<Traits>::wake() const {
  if (Traits::sleepers(count_) != 0) detail::wake_on(flag_.word);
}

template <class T>
FERRY_FN T read(const T* from) {
  detail::shared_access(from, sizeof(T), false);
  return *from;
}

template <class T>
FERRY_FN void write(T* to, T value) {
  detail::shared_access(to, sizeof(T), true);
  *to = value;
}

FERRY_FN void read_bytes(void* to, const void* shared_from, std::size_t bytes) {
  detail::shared_access(shared_from, bytes, false);
  if (bytes > 0) std::memcpy(to, shared_from, bytes);
}

FERRY_FN void write_bytes(void* shared_to, const void* from, std::size_t bytes) {
  detail::shared_access(shared_to, bytes, true);
  if (bytes > 0) std::memcpy(shared_to, from, bytes);
}

}  // namespace ferry::protocol
