// Latency dispatch: waiting for the headers, so that all blocks of a rank agree on who is here.
//
// A block that finds all words goes on at once, and counts itself. Only block 0 may say that a
// header is missing: it raises a suspicion, by which every block that still looks halts and says
// so; when all blocks have passed or halted, nobody finds out anything by itself any more. If one
// has passed, all is here. Else block 0 looks once more, and what it sees is the verdict.
#pragma once
#include "cuda/kernels/latency_entry.cuh"

namespace ferry::cuda::device {

enum class Found { here, halted, stop };

/// The words of headers that every block reads, in shared memory.
struct HeaderWords {
  std::uint32_t head[kMaxDomain];
  std::uint32_t refused[kMaxDomain];
  bool missing[kMaxDomain];  ///< the verdict
};

/// One thread: one word of the header of `source`.
__device__ inline Found find_word(const LatencyPlaces& at, const LatencyCall& call, int source,
                                  const std::uint64_t* word, std::uint32_t& data) {
  const LatencyView& v = at.v;
  Patience patience;
  for (;;) {
    const std::uint64_t seen = load_relaxed(word);
    if (is_word_of(seen, at.tag())) {
      data = static_cast<std::uint32_t>(seen);
      return Found::here;
    }
    Reason reason;
    const bool over = patience.over(v.group, reason);
    if (patience.looks % Patience::kLooksPerCheck != 0) continue;
    if (load_relaxed(&v.words->suspected[source]) == at.generation) return Found::halted;
    if (!over) continue;
    if (reason == Reason::none) return Found::stop;
    const bool may_mask = reason == Reason::deadline && v.alarm != nullptr;
    if (may_mask && blockIdx.x == 0) {
      store_relaxed(&v.words->suspected[source], at.generation);
      return Found::halted;
    }
    // Block 0 is about to say so.
    if (may_mask && now_ns() - patience.start < 4 * v.group.deadline_ns) continue;
    fail(v.group, call.number, reason, Stage::latency_headers, source,
         {at.generation, seen >> 32, 0});
    return Found::stop;
  }
}

/// Whole block: all words of all headers that come. `numbers`: [R, local experts], null: no room.
/// False: the group has failed. `halted`: some thread waits for a verdict.
__device__ inline bool find_words(const LatencyPlaces& at, const LatencyCall& call, int experts,
                                  HeaderWords& words, std::int32_t* numbers, bool& halted) {
  const LatencyView& v = at.v;
  std::byte* own = v.peers[v.group.rank];
  const int each = kLatencyHeadWords + experts, all = each * v.group.ranks;
  bool stopped = false, halts = false;
  // From the other end than the senders.
  for (int i = kLatencyThreads - 1 - static_cast<int>(threadIdx.x); i < all; i += kLatencyThreads) {
    const int source = i / each, w = i - source * each;
    std::uint32_t data = 0;
    if (!call.masked[source] && !words.missing[source] && !stopped) {
      const Found found = find_word(at, call, source, at.header(own, source) + w, data);
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
  if (__syncthreads_or(stopped || halts) == 0) return true;
  halted = true;
  return __syncthreads_or(stopped) == 0;
}

/// One thread: waits for other blocks of this rank. False: the group has failed.
template <class Ready>
__device__ inline bool await_blocks(const LatencyView& v, std::uint32_t call, const Ready& ready) {
  Patience patience;
  while (!ready()) {
    Reason reason;
    if (!patience.over(v.group, reason)) continue;
    if (reason != Reason::none) {
      fail(v.group, call, reason, Stage::latency_headers, v.group.rank);
    }
    return false;
  }
  return true;
}

/// One thread of block 0: the verdict on every source that it suspects. False: the group has
/// failed.
__device__ inline bool judge_headers(const LatencyPlaces& at, const LatencyCall& call,
                                     int experts) {
  const LatencyView& v = at.v;
  LatencyWords& words = *v.words;
  std::uint32_t passed = 0, halted = 0;
  const bool good = await_blocks(v, call.number, [&] {
    passed = load_acquire_gpu(&words.passed) - call.passed_before;
    halted = load_acquire_gpu(&words.halted);
    return passed + halted == gridDim.x;
  });
  if (!good) return false;
  for (int s = 0; s < v.group.ranks; ++s) {
    if (load_relaxed(&words.suspected[s]) != at.generation) continue;
    bool here = true;
    for (int w = 0; w < kLatencyHeadWords + experts && here && passed == 0; ++w) {
      here = is_word_of(load_relaxed(at.header(v.peers[v.group.rank], s) + w), at.tag());
    }
    if (!here) mask_late(v, call.number, Stage::latency_headers, s, {});
    words.verdict[s] = at.generation << 1 | (here ? 1u : 0u);
  }
  words.halted = 0;
  words.passed_before -= halted;  // they do not pass
  store_release(&words.judged, at.generation);
  return true;
}

/// Whole block, when it halts: waits for the verdict.
__device__ __noinline__ inline bool hear_verdict(const LatencyPlaces& at, const LatencyCall& call,
                                                 int experts, HeaderWords& words) {
  const LatencyView& v = at.v;
  bool stopped = false;
  if (threadIdx.x == 0) {
    count_released(&v.words->halted);
    stopped =
        blockIdx.x == 0 ? !judge_headers(at, call, experts) : !await_blocks(v, call.number, [&] {
          return load_acquire(&v.words->judged) == at.generation;
        });
  }
  if (__syncthreads_or(stopped) != 0) return false;
  for (int s = static_cast<int>(threadIdx.x); s < v.group.ranks; s += kLatencyThreads) {
    words.missing[s] = load_relaxed(&v.words->verdict[s]) == at.generation << 1;
  }
  __syncthreads();
  return true;
}

/// Whole block: what every source's header says. `words.missing` is false. False: the group has
/// failed.
__device__ inline bool await_header_words(const LatencyPlaces& at, const LatencyCall& call,
                                          int experts, HeaderWords& words, std::int32_t* numbers) {
  const LatencyView& v = at.v;
  bool halted;
  if (!find_words(at, call, experts, words, numbers, halted)) return false;
  if (!halted) {
    if (threadIdx.x == 0) count_relaxed(&v.words->passed);
    return true;
  }
  if (!hear_verdict(at, call, experts, words)) return false;
  // Those that are not missing are there.
  return find_words(at, call, experts, words, numbers, halted) && !halted;
}

}  // namespace ferry::cuda::device
