// Latency mode: what a block knows of its call, words that carry their generation, tags, and waits
// that mask who misses a deadline.
//
// A mask set in a call counts for the calls after it: within the call all blocks must agree on who
// takes part. So a mask holds the number of its call, and of a rank that was masked on the way all
// is made zero at the call's end.
#pragma once
#include "cuda/kernels/base/access.cuh"
#include "cuda/kernels/base/wait.cuh"
#include "cuda/kernels/latency/launch_sizes.hpp"
#include "cuda/kernels/latency/view.hpp"

namespace ferry::cuda::device {

/// A word of 64 bits that carries its generation, so that it needs no flag behind it
/// (base/message.cuh says why).
__device__ __forceinline__ void store_word(std::uint64_t* word, std::uint32_t data,
                                           std::uint32_t tag) {
  store_relaxed(word, tagged(data, tag));
}
__device__ __forceinline__ bool is_word_of(std::uint64_t word, std::uint32_t tag) {
  return word >> 32 == tag;
}

/// Where all that ranks of the own domain sent lies.
__device__ __forceinline__ std::byte* own_memory(const LatencyView& v) {
  return v.peers[v.group.rank];
}

/// What a block knows of its call; in shared memory.
struct LatencyCall {
  std::uint64_t generation;
  std::uint64_t first_running;  ///< of the group's calls, among which this one is not
  std::uint32_t number;         ///< among the kernel calls, from 1
  std::uint32_t came_before;    ///< of the words
  std::uint32_t passed_before;  ///< of the words, as the next two: the leading block's
  std::uint64_t released, received[2];
  bool masked[kMaxDomain];  ///< before this call
  bool open[kMaxDomain];    ///< the rank takes part
  int tokens[kMaxDomain];   ///< that each source sent
  bool lost;                ///< something of a rank that is masked now is missing
  bool stopped;             ///< some warp has found that the group has failed
  bool again;               ///< this block alone receives again, without lost ranks
  std::uint32_t here[kLatencyWarps][(kMaxDomain + 31) / 32];  ///< of a combine: bits of the
                                                              ///< rows that a warp sums
  std::uint64_t* wait_ns;              ///< where to tell of waits; null: nobody asks
  std::uint64_t start[kLatencyWarps];  ///< of the receive on each warp, if somebody does
};

/// The block that keeps the words, and says who is missing: the last, which has the fewest rows, so
/// that nobody waits for it.
__device__ __forceinline__ bool leads() {
  return blockIdx.x == gridDim.x - 1;
}

/// Fatal; always false.
__device__ inline bool fail_latency(const LatencyView& v, const LatencyCall& call, Reason reason,
                                    Stage stage, int peer, FatalDetail more = {}) {
  return fail(v.group, call.first_running, reason, stage, peer, more);
}

// Masks.

/// No call has this number: what the host has masked is masked in all of them.
inline constexpr std::uint32_t kMaskedByHost = 0xfffffffe;
/// Nor this: the rank of the exchange was lost, and stays masked when another process has its seat.
inline constexpr std::uint32_t kLostRank = 0xffffffff;

__device__ __forceinline__ bool is_lost(const LatencyView& v, int peer) {
  return load_relaxed(&v.words->masked[peer]) == kLostRank;
}

/// Below this bit a word of `gone` is Gone, and above it the epoch in which it was said: a rank
/// that comes to the next epoch late keeps what others have said of it there already.
inline constexpr int kGoneShift = 2;
__device__ __forceinline__ Gone gone_in(std::uint32_t word) {
  return static_cast<Gone>(word & ((1u << kGoneShift) - 1));
}
__device__ __forceinline__ Gone find_gone(const LatencyView& v, int peer) {
  return gone_in(load_relaxed(LatencyPlaces{v, 0}.gone(v.sources[peer], peer)));
}
/// Says to a rank that this one goes on without it, or with it.
__device__ __forceinline__ void tell_gone(const LatencyView& v, int peer, Gone gone) {
  const std::uint32_t epoch = load_relaxed(&v.words->epoch) << kGoneShift;
  store_relaxed(LatencyPlaces{v, 0}.gone(v.peers[peer], v.line[peer]),
                gone == Gone::no ? 0 : epoch | static_cast<std::uint32_t>(gone));
}

/// The peer missed its deadline where it may. Apart: waits have the registers.
__device__ __noinline__ inline void mask_late(const LatencyView& v, const LatencyCall& call,
                                              int peer) {
  if (atomicCAS(&v.words->masked[peer], 0u, call.number) != 0) return;
  store_relaxed(&v.words->last_mask, call.number);
  tell_gone(v, peer, Gone::without_us);
  if (find_gone(v, peer) == Gone::without_us) {
    store_relaxed(&v.alarm->behind, static_cast<std::uint32_t>(peer) + 1);
  }
  store_relaxed(&v.alarm->ranks[peer], 1);
  fence_system();  // whoever sees the count sees whom it is about
  auto* count = reinterpret_cast<unsigned long long*>(&v.alarm->masked);
  atomicAdd_system(count, 1ull);
}

// Ranks that are held up. A rank that fails while it delivers holds up some ranks and not others;
// those are a call behind when the deadline of the rest is over, and have just masked it. So
// whoever has masked somebody in its last calls gets as long again.

/// In SpinDeadline::spins, above the spins: checks behind the deadline.
inline constexpr int kOverdueShift = 28;
inline constexpr std::uint32_t kOverdue = 1u << kOverdueShift;
/// So many before a rank is judged, 0.1 ms or so: its own deadline began no later than this rank's,
/// but clocks and spins are not that exact.
inline constexpr std::uint32_t kChecksBeforeVerdict = 4;
/// Added when it gets as long again, which it does once.
inline constexpr std::uint32_t kHeldUp = 8;

__device__ __forceinline__ bool was_held_up(const LatencyView& v, int peer) {
  if (v.layout.words == 0) return false;
  const auto& words = *reinterpret_cast<const LatencyWords*>(v.peers[peer] + v.layout.words);
  const std::uint32_t masked = load_relaxed(&words.last_mask);
  return masked != 0 && load_relaxed(&words.begun) - masked <= 1;
}

/// One thread, at a check behind the deadline: whether it waits for `peer` on.
__device__ __forceinline__ bool waits_on(const LatencyView& v, SpinDeadline& spin_deadline,
                                         int peer) {
  const std::uint32_t overdue = spin_deadline.spins >> kOverdueShift;
  if (overdue < kChecksBeforeVerdict) {
    spin_deadline.spins += kOverdue;
    return true;
  }
  if (overdue >= kHeldUp || !was_held_up(v, peer)) return false;
  spin_deadline.spins += kHeldUp << kOverdueShift;
  spin_deadline.start = 0;
  return true;
}

enum class WaitStatus { here, missing, stop };

// How long a receive has waited for each source, if somebody asks.

/// Whole block, before the call begins. `wait_ns` [R]; null: nobody asks.
__device__ __forceinline__ void tell_of_waits(LatencyCall& call, std::uint64_t* wait_ns) {
  if (threadIdx.x == 0) call.wait_ns = wait_ns;
}
/// Whole warp, when it begins to receive.
__device__ __forceinline__ void start_clock(LatencyCall& call) {
  if (threadIdx.x % 32 == 0 && call.wait_ns != nullptr) call.start[threadIdx.x / 32] = now_ns();
  __syncwarp();
}
/// After a poll that did not find what it waits for; 0: nobody asks.
__device__ __forceinline__ std::uint64_t poll_time(const LatencyCall& call) {
  return call.wait_ns != nullptr ? now_ns() : 0;
}
/// `late`: of the last such poll; 0: there was none.
__device__ __forceinline__ void note_wait(const LatencyCall& call, int source, std::uint64_t late) {
  if (late == 0) return;
  const std::uint64_t start = call.start[threadIdx.x / 32];
  atomicMax(reinterpret_cast<unsigned long long*>(call.wait_ns + source), late - min(start, late));
}

/// What a check between two polls found, and the wait's spin deadline after it.
struct Checked {
  WaitStatus came;
  SpinDeadline spin_deadline;
};

/// One thread, at every kSpinsPerCheck-th spin.
template <bool kMasks>
__device__ __forceinline__ Checked check_wait(const LatencyView& v, const LatencyCall& call,
                                              SpinDeadline spin_deadline, int peer, Stage stage,
                                              std::uint64_t expected, std::uint64_t seen) {
  Reason reason;
  const bool over = spin_deadline.over(v.group, reason);
  if (kMasks && load_relaxed(&v.words->masked[peer]) != 0) {
    return {WaitStatus::missing, spin_deadline};
  }
  if (kMasks && !over && v.alarm != nullptr && find_gone(v, peer) != Gone::no) {
    mask_late(v, call, peer);
    return {WaitStatus::missing, spin_deadline};
  }
  if (over && reason == Reason::none) return {WaitStatus::stop, spin_deadline};
  // It took another path or format in this very call: nothing more to wait for.
  const auto odd = static_cast<std::uint32_t>(expected ^ seen);
  if (stage == Stage::latency_sums && odd != 0 && (odd & kGenerationTag) == 0) {
    reason = Reason::mismatch;
  } else if (!over) {
    return {WaitStatus::here, spin_deadline};
  }
  if (!kMasks || reason != Reason::deadline || v.alarm == nullptr) {
    fail_latency(v, call, reason, stage, peer, {expected, seen, 0});
    return {WaitStatus::stop, spin_deadline};
  }
  if (waits_on(v, spin_deadline, peer)) return {WaitStatus::here, spin_deadline};
  mask_late(v, call, peer);
  return {WaitStatus::missing, spin_deadline};
}

// Apart: the kernels of a dispatch hold many waits, few of which come so far, and what they run
// besides must fit into the caches of instructions. Those of a combine hold few, and have no
// registers for a call; nor has a dispatch elsewhere.
template <bool kMasks>
__device__ __noinline__ Checked check_wait_apart(const LatencyView& v, const LatencyCall& call,
                                                 SpinDeadline spin_deadline, int peer, Stage stage,
                                                 std::uint64_t expected, std::uint64_t seen) {
  return check_wait<kMasks>(v, call, spin_deadline, peer, stage, expected, seen);
}
#if !defined(__CUDA_ARCH__) || __CUDA_ARCH__ < 1000
inline constexpr bool kChecksApart = true;
#else
inline constexpr bool kChecksApart = false;
#endif

/// One thread, between two polls of what `peer` writes: here means go on polling. Without kMasks
/// the exchange has none.
template <bool kMasks = true, bool kApart = kChecksApart>
__device__ __forceinline__ WaitStatus between_polls(const LatencyView& v, const LatencyCall& call,
                                                    SpinDeadline& spin_deadline, int peer,
                                                    Stage stage, std::uint64_t expected,
                                                    std::uint64_t seen) {
  if (spin_deadline.passes()) return WaitStatus::here;
  const Checked checked =
      kApart ? check_wait_apart<kMasks>(v, call, spin_deadline, peer, stage, expected, seen)
             : check_wait<kMasks>(v, call, spin_deadline, peer, stage, expected, seen);
  spin_deadline = checked.spin_deadline;
  return checked.came;
}

/// One thread, or several with the same word: waits for a tag that `peer` writes. kTimed: and tells
/// for how long.
template <bool kTimed, bool kMasks = true, bool kApart = kChecksApart>
__device__ inline WaitStatus await_tag(const LatencyView& v, const LatencyCall& call,
                                       const std::uint32_t* word, std::uint32_t tag, int peer,
                                       Stage stage) {
  SpinDeadline spin_deadline;
  std::uint64_t late = 0;
  for (;;) {
    const std::uint32_t seen = load_acquire(word);
    WaitStatus came = WaitStatus::here;
    if (seen != tag) {
      came = between_polls<kMasks, kApart>(v, call, spin_deadline, peer, stage, tag, seen);
      if constexpr (kTimed) late = poll_time(call);
      if (came == WaitStatus::here) continue;
    }
    if constexpr (kTimed) note_wait(call, peer, late);
    return came;
  }
}

/// The same for a word that carries its generation, which is all that is waited for.
template <bool kApart = kChecksApart>
__device__ inline WaitStatus await_word(const LatencyView& v, const LatencyCall& call,
                                        const std::uint64_t* word, std::uint32_t tag, int peer,
                                        Stage stage, std::uint32_t& data) {
  SpinDeadline spin_deadline;
  for (;;) {
    const std::uint64_t seen = load_relaxed(word);
    if (is_word_of(seen, tag)) {
      data = static_cast<std::uint32_t>(seen);
      return WaitStatus::here;
    }
    const WaitStatus came =
        between_polls<true, kApart>(v, call, spin_deadline, peer, stage, tag, seen >> 32);
    if (came != WaitStatus::here) return came;
  }
}

/// One thread waits until `receiver` has read what the buffer held before.
__device__ inline WaitStatus await_credit(const LatencyPlaces& at, const LatencyCall& call,
                                          int receiver, std::uint64_t least) {
  const LatencyView& v = at.v;
  const std::uint64_t* word = at.released(v.sources[receiver], receiver);
  SpinDeadline spin_deadline;
  for (;;) {
    const std::uint64_t seen = load_acquire(word);
    if (seen >= least) return WaitStatus::here;
    const WaitStatus came =
        between_polls(v, call, spin_deadline, receiver, Stage::latency_credit, least, seen);
    if (came != WaitStatus::here) return came;
  }
}

}  // namespace ferry::cuda::device
