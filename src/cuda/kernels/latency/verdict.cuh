// Latency dispatch: waiting for the headers, so that all blocks of a rank agree on who is here.
//
// A block that finds all words goes on at once, and counts itself. Only one block may say that a
// header is missing: it raises a suspicion, by which every block that still polls halts and says
// so; when all blocks have passed or halted, nobody finds out anything by itself any more. If one
// has passed, all is here. Else that block polls once more, and what it sees is the verdict.
#pragma once
#include "cuda/kernels/latency/header_words.cuh"
#include "cuda/kernels/latency/team.cuh"
#include "cuda/kernels/latency/wait.cuh"

namespace ferry::cuda::device {

enum class Found { here, halted, stop };

/// What a check between two polls of a header found: `halted` and `stop` end the search, `here` has
/// it go on.
struct HeaderCheck {
  Found found;
  SpinDeadline spin_deadline;
};

/// One thread, at every kSpinsPerCheck-th spin. `late`: as note_wait takes it.
__device__ __noinline__ inline HeaderCheck check_header(const LatencyView& v,
                                                        const LatencyCall& call,
                                                        SpinDeadline spin_deadline, int source,
                                                        std::uint64_t seen, std::uint64_t late) {
  Reason reason;
  const bool over = spin_deadline.over(v.group, reason);
  // Once judged, what is not missing is there, though this block may not see it yet.
  const bool judged = load_relaxed(&v.words->judged) == call.generation;
  if (!judged && load_relaxed(&v.words->suspected[source]) == call.generation) {
    return {Found::halted, spin_deadline};
  }
  const bool judges = !judged && leads();
  const bool gone = !over && judges && v.alarm != nullptr && find_gone(v, source) != Gone::no;
  if (!over && !gone) return {Found::here, spin_deadline};
  if (reason == Reason::none && !gone) return {Found::stop, spin_deadline};
  const bool may_mask = gone || (reason == Reason::deadline && v.alarm != nullptr);
  if (may_mask && judges) {
    if (!gone && waits_on(v, spin_deadline, source)) return {Found::here, spin_deadline};
    note_wait(call, source, late);
    store_relaxed(&v.words->suspected[source], call.generation);
    return {Found::halted, spin_deadline};
  }
  // The leading block is about to say so.
  if (may_mask && now_ns() - spin_deadline.start < 4 * v.group.deadline_ns) {
    return {Found::here, spin_deadline};
  }
  fail_latency(v, call, reason, Stage::latency_headers, source, {call.generation, seen >> 32, 0});
  return {Found::stop, spin_deadline};
}

/// One thread: one word of the header of `source`.
__device__ __forceinline__ Found find_word(const LatencyPlaces& at, const LatencyCall& call,
                                           int source, const std::uint64_t* word,
                                           std::uint32_t& data) {
  SpinDeadline spin_deadline;
  std::uint64_t late = 0;
  for (;;) {
    const std::uint64_t seen = load_relaxed(word);
    if (is_word_of(seen, at.tag())) {
      data = static_cast<std::uint32_t>(seen);
      note_wait(call, source, late);
      return Found::here;
    }
    if (leads()) late = poll_time(call);  // all blocks wait for the same
    if (spin_deadline.passes()) continue;
    const HeaderCheck check = check_header(at.v, call, spin_deadline, source, seen, late);
    if (check.found != Found::here) return check.found;
    spin_deadline = check.spin_deadline;
  }
}

/// Whole team: all words of all headers that come. `numbers`: [R, local experts], null: no room.
/// False: the group has failed. `halted`: some thread waits for a verdict.
__device__ inline bool find_words(Team team, const LatencyPlaces& at, const LatencyCall& call,
                                  int experts, HeaderWords& words, std::int32_t* numbers,
                                  bool& halted) {
  const LatencyView& v = at.v;
  const int each = kLatencyHeadWords + experts, all = each * v.group.ranks;
  bool stopped = false, halts = false;
#pragma unroll 1
  for (int i = team.thread(); i < all; i += team.threads()) {
    const int source = i / each, w = i - source * each;
    std::uint32_t data = 0;
    if (!call.masked[source] && !words.missing[source] && !stopped) {
      const Found found =
          find_word(at, call, source, at.header(v.sources[source], source) + w, data);
      stopped |= found == Found::stop;
      halts |= found == Found::halted;
    }
    if (w == 0) words.head[source] = data;
    if (w == 1) words.refused[source] = data;
    if (w >= kLatencyHeadWords && numbers != nullptr) {
      numbers[source * experts + w - kLatencyHeadWords] = static_cast<std::int32_t>(data);
    }
  }
  halted = false;
  if (!team.any(stopped || halts)) return true;
  halted = true;
  return !team.any(stopped);
}

/// One thread: waits for other blocks of this rank. False: the group has failed.
template <class Ready>
__device__ inline bool await_blocks(const LatencyView& v, const LatencyCall& call,
                                    const Ready& ready) {
  SpinDeadline spin_deadline;
  while (!ready()) {
    Reason reason;
    if (!spin_deadline.over(v.group, reason)) continue;
    if (reason != Reason::none) fail_latency(v, call, reason, Stage::latency_headers, v.group.rank);
    return false;
  }
  return true;
}

/// One thread of the leading block: the verdict on every source that it suspects. False: the group
/// has failed.
__device__ inline bool judge_headers(const LatencyPlaces& at, LatencyCall& call, int experts) {
  const LatencyView& v = at.v;
  LatencyWords& words = *v.words;
  std::uint32_t passed = 0, halted = 0;
  const bool good = await_blocks(v, call, [&] {
    passed = load_acquire_gpu(&words.passed) - call.passed_before;
    halted = load_acquire_gpu(&words.halted);
    return passed + halted == gridDim.x;
  });
  if (!good) return false;
#pragma unroll 1
  for (int s = 0; s < v.group.ranks; ++s) {
    if (load_relaxed(&words.suspected[s]) != at.generation) continue;
    bool here = true;
#pragma unroll 1
    for (int w = 0; w < kLatencyHeadWords + experts && here && passed == 0; ++w) {
      here = is_word_of(load_relaxed(at.header(v.sources[s], s) + w), at.tag());
    }
    if (!here) mask_late(v, call, s);
    words.verdict[s] = at.generation << 1 | (here ? 1u : 0u);
  }
  words.halted = 0;
  call.passed_before -= halted;  // they do not pass
  store_release(&words.judged, at.generation);
  return true;
}

/// Whole team, when it halts: waits for the verdict.
__device__ __noinline__ inline bool hear_verdict(Team team, const LatencyView& v, LatencyCall& call,
                                                 int experts, HeaderWords& words) {
  const LatencyPlaces at{v, call.generation};
  bool stopped = false;
  if (team.thread() == 0) {
    count_released(&v.words->halted);
    stopped = leads() ? !judge_headers(at, call, experts) : !await_blocks(v, call, [&] {
      return load_acquire(&v.words->judged) == at.generation;
    });
  }
  if (team.any(stopped)) return false;
#pragma unroll 1
  for (int s = team.thread(); s < v.group.ranks; s += team.threads()) {
    words.missing[s] = load_relaxed(&v.words->verdict[s]) == at.generation << 1;
  }
  team.sync();
  return true;
}

/// Whole team: what every source's header says. `words.missing` is false. False: the group has
/// failed.
__device__ inline bool await_header_words(Team team, const LatencyPlaces& at, LatencyCall& call,
                                          int experts, HeaderWords& words, std::int32_t* numbers) {
  const LatencyView& v = at.v;
  bool halted;
  if (!find_words(team, at, call, experts, words, numbers, halted)) return false;
  if (!halted) {
    if (team.thread() == 0) count_relaxed(&v.words->passed);
    return true;
  }
  if (!hear_verdict(team, v, call, experts, words)) return false;
  // Those that are not missing are there.
  return find_words(team, at, call, experts, words, numbers, halted) && !halted;
}

}  // namespace ferry::cuda::device
