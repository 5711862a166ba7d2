// The rejoining of ranks that were masked: a small kernel of one block, between the calls of an
// exchange.
//
// It has two steps, for a rank may end between two of its words: every rank offers the newest
// generation that it used; who has all offers answers with the newest of them, and goes on when all
// answers are the same. Ranks whose attempts failed count rounds differently: whoever sees a later
// one joins it, also while it waits for answers, for the offers may have been those of an attempt
// that had failed. A word is round << 48 | generation, so it only grows within an epoch of the
// group. A regroup needs no words: the CPUs have agreed, on a generation above all that were used,
// and the small kernels at the end go on after it.
#include "cuda/kernels/base/load.hpp"
#include "cuda/kernels/latency/kernels.hpp"
#include "cuda/kernels/latency/wait.cuh"

namespace ferry::cuda {

namespace {

using namespace device;

__device__ std::uint64_t round_of(std::uint64_t word) {
  return word >> kRejoinShift;
}
__device__ std::uint64_t generation_in(std::uint64_t word) {
  return word & ((std::uint64_t{1} << kRejoinShift) - 1);
}

/// Above the newest generation that was used. Between domains both buffers get one
/// that nobody used, so that nothing that was said before can mean them.
__device__ std::uint64_t rejoin_step(const LatencyView& v) {
  return v.inbox != nullptr ? 2 : 1;
}

struct Rejoining {
  const LatencyRejoinParameters& p;
  std::uint64_t round;

  __device__ std::uint64_t word(std::uint64_t generation) const {
    return round << kRejoinShift | generation;
  }
  /// Whole block.
  __device__ void publish(std::size_t lines, std::uint64_t generation) const {
    const LatencyView& v = p.view;
#pragma unroll 1
    for (int r = static_cast<int>(threadIdx.x); r < v.group.ranks; r += kOneBlockThreads) {
      store_release(LatencyPlaces::line_of(v.peers[r], lines, v.line[r]), word(generation));
    }
  }

  /// One thread: a rank's word of this round, or one of a later round; 0: the rank is gone, or does
  /// not come, which is a failure. Ranks may come a call later than this one, held up by one that
  /// they mask at about the end of its deadline: so it waits another one if some were.
  __device__ std::uint64_t hear(std::size_t lines, int peer, bool& failed) const {
    const LatencyView& v = p.view;
    const std::uint64_t* line = LatencyPlaces::line_of(v.sources[peer], lines, peer);
    const std::uint64_t* offers = LatencyPlaces::line_of(v.sources[peer], v.layout.offers, peer);
    const std::uint64_t grace = v.group.deadline_ns / 4;
    std::uint64_t overtime = 0;  // since when
    SpinDeadline spin_deadline;
    for (;;) {
      const std::uint64_t word = load_acquire(line);
      if (round_of(word) >= round) return word;
      const std::uint64_t offer = load_acquire(offers);
      if (round_of(offer) > round) {
        // Inside a domain a rank that succeeded wrote its word of this round before that offer.
        const std::uint64_t before = load_acquire(line);
        return round_of(before) >= round ? before : offer;
      }
      Reason reason;
      const bool over = spin_deadline.over(v.group, reason);
      if (spin_deadline.spins % SpinDeadline::kSpinsPerCheck != 0) continue;
      if (find_gone(v, peer) == Gone::dead) return 0;
      if (over && reason == Reason::deadline && overtime == 0) {
        overtime = spin_deadline.start = now_ns();
        continue;
      }
      const bool late = overtime != 0 && now_ns() - overtime > grace && !some_held_up();
      if (!over && !late) continue;
      failed = true;
      if (late) reason = Reason::deadline;
      refuse(reason == Reason::none ? Reason::aborted : reason, peer);
      return 0;
    }
  }
  __device__ bool some_held_up() const {
    const LatencyView& v = p.view;
    for (int r = 0; r < v.group.ranks; ++r) {
      if (r != v.group.rank && was_held_up(v, r)) return true;
    }
    return false;
  }
  __device__ void refuse(Reason reason, int peer) const {
    p.failure->reason = reason;
    p.failure->stage = Stage::latency_rejoin;
    p.failure->peer = peer;
    store_release(&p.failure->written, round);
  }
};

/// No epoch has this number, of as many bits as a word of `gone` has for it.
constexpr std::uint32_t kNoEpoch = 0xffffffff;

/// One thread: what `peer` said of its mask holds no longer, unless it was in epoch `kept`. False:
/// this rank's CPU has found it dead meanwhile, which it says once.
__device__ bool forget_mask_of(const LatencyPlaces& at, int peer, std::uint32_t kept) {
  std::uint32_t* word = at.gone(at.v.sources[peer], peer);
  std::uint32_t seen = load_relaxed(word);
  if (gone_in(seen) == Gone::without_us && seen >> kGoneShift != kept) {
    seen = atomicCAS_system(word, seen, static_cast<unsigned>(Gone::no));
  }
  return gone_in(seen) != Gone::dead;
}

/// Whole block. Nothing that a rank wrote in a generation up to `agreed` is read any more. All
/// ranks have ended their calls before, so inside the domain nobody writes to another's buffers
/// now. Between domains writes may still be under way: the proxies deal with them once `word`
/// (round and generation) has told them of the rejoin. `absent`: one entry for each rank. `kept`:
/// as forget_mask_of takes it.
__device__ void go_on_after(const LatencyView& v, std::uint64_t agreed, std::uint64_t word,
                            const bool* absent, std::uint32_t kept) {
  const LatencyPlaces at{v, agreed};
#pragma unroll 1
  for (int r = static_cast<int>(threadIdx.x); r < v.group.ranks; r += kOneBlockThreads) {
    const bool away = absent[r] || !forget_mask_of(at, r, kept);
    if (away) {
      atomicMax(&v.words->masked[r], kMaskedByHost);  // one that is lost remains so
    } else {
      v.words->masked[r] = 0;
    }
    if (v.alarm != nullptr) store_relaxed(&v.alarm->ranks[r], away ? 1 : 0);
    if (!away &&
        (v.beyond[r / 32] >> r % 32 & 1) != 0) {  // there, the rank that is meant clears it
      store_relaxed(at.gone(v.peers[r], v.line[r]), static_cast<std::uint32_t>(Gone::no));
    }
    store_release(at.released(v.peers[r], v.line[r]), agreed);
  }
  __syncthreads();
  if (threadIdx.x != 0) return;
  LatencyWords& words = *v.words;
  words.generation = agreed;
  words.received[agreed % 2] = agreed;
  words.received[(agreed + 1) % 2] = agreed - 1;
  words.released = agreed;
  if (v.alarm != nullptr) store_relaxed(&v.alarm->behind, 0);
  if (v.inbox != nullptr) store_release(at.rejoined(v.inbox), word);
}

/// A captured graph survives a rejoin: its kernels read generation and masks from GPU memory at
/// each replay, and this kernel rewrites both there.
__global__ void __launch_bounds__(kOneBlockThreads)
    latency_rejoin_kernel(const __grid_constant__ LatencyRejoinParameters p) {
  __shared__ unsigned long long newest, latest;
  __shared__ bool absent[kMaxDomain];
  const LatencyView& v = p.view;
  const int ranks = v.group.ranks;
#pragma unroll 1
  for (int r = static_cast<int>(threadIdx.x); r < ranks; r += kOneBlockThreads) {
    absent[r] = is_lost(v, r);
  }
  std::uint64_t* rounds = &v.words->rounds;
  Rejoining rejoining{p, load_relaxed(rounds) + 1};
  const std::uint64_t used = load_relaxed(&v.words->generation);
  if (threadIdx.x == 0) latest = rejoining.round;
  for (;;) {
    if (threadIdx.x == 0) newest = used;
    __syncthreads();
    rejoining.round = latest;
    if (threadIdx.x == 0) *rounds = rejoining.round;
    __syncthreads();
    const auto hear = [&](std::size_t lines, const auto& take) {
      bool failed = false;
      for (int r = static_cast<int>(threadIdx.x); r < ranks && !failed; r += kOneBlockThreads) {
        if (absent[r]) continue;
        const std::uint64_t word = rejoining.hear(lines, r, failed);
        absent[r] = word == 0;
        atomicMax(&latest, static_cast<unsigned long long>(round_of(word)));
        if (word != 0 && round_of(word) == rejoining.round) take(r, generation_in(word), failed);
      }
      return __syncthreads_or(failed) == 0;
    };
    // Whether somebody is in a later round; asked by all before any of them hears more.
    const auto is_late = [&] {
      const bool late = latest > rejoining.round;
      __syncthreads();
      return late;
    };
    rejoining.publish(v.layout.offers, used);
    const bool offered = hear(v.layout.offers, [&](int, std::uint64_t generation, bool&) {
      atomicMax(&newest, static_cast<unsigned long long>(generation));
    });
    if (!offered) return;
    if (is_late()) continue;
    const std::uint64_t agreed = newest + rejoin_step(v);
    rejoining.publish(v.layout.answers, agreed);
    const bool answered =
        hear(v.layout.answers, [&](int r, std::uint64_t generation, bool& failed) {
          if (generation == agreed) return;
          failed = true;  // it saw others than this rank did
          rejoining.refuse(Reason::mismatch, r);
        });
    if (!answered) return;
    if (is_late()) continue;
    go_on_after(v, agreed, rejoining.word(agreed), absent, kNoEpoch);
    return;
  }
}

/// Of what this rank has sent, and of the words that it has heard.
__global__ void __launch_bounds__(kOneBlockThreads)
    latency_newest_kernel(const __grid_constant__ LatencyView v, std::uint64_t* newest) {
  __shared__ unsigned long long most;
  if (threadIdx.x == 0) most = v.words->generation + 1;  // of a dispatch that was cut off
  __syncthreads();
  for (int r = static_cast<int>(threadIdx.x); r < v.group.ranks; r += kOneBlockThreads) {
    for (const std::size_t lines : {v.layout.offers, v.layout.answers}) {
      const std::uint64_t word = load_relaxed(LatencyPlaces::line_of(v.sources[r], lines, r));
      atomicMax(&most, static_cast<unsigned long long>(generation_in(word)));
    }
  }
  __syncthreads();
  if (threadIdx.x == 0) store_release(newest, most);
}

/// One thread: a word of rejoining that `peer` wrote before generation `first`.
__device__ void forget_rejoin_of(const LatencyView& v, std::size_t lines, int peer,
                                 std::uint64_t first) {
  std::uint64_t* line = LatencyPlaces::line_of(v.sources[peer], lines, peer);
  const std::uint64_t seen = load_relaxed(line);
  if (seen == 0 || generation_in(seen) >= first) return;
  using Word = unsigned long long;
  atomicCAS_system(reinterpret_cast<Word*>(line), static_cast<Word>(seen), Word{0});
}

/// Kernels that were stopped in their midst have left counters behind, and ranks whose rejoins
/// failed count rounds differently: all begin anew.
__global__ void __launch_bounds__(kOneBlockThreads)
    latency_epoch_kernel(const __grid_constant__ LatencyEpochParameters p) {
  __shared__ bool absent[kMaxDomain];
  const LatencyView& v = p.view;
  static_assert(sizeof(LatencyWords) % 8 == 0);
  auto* words = reinterpret_cast<std::uint64_t*>(v.words);
  for (std::size_t i = threadIdx.x; i < sizeof(LatencyWords) / 8; i += kOneBlockThreads) {
    store_relaxed(words + i, std::uint64_t{0});
  }
  __syncthreads();
  if (threadIdx.x == 0) v.words->epoch = p.epoch & kNoEpoch >> kGoneShift;
  for (int r = static_cast<int>(threadIdx.x); r < v.group.ranks; r += kOneBlockThreads) {
    absent[r] = (p.lost[r / 32] >> r % 32 & 1) != 0;
    if (absent[r]) v.words->masked[r] = kLostRank;
    forget_rejoin_of(v, v.layout.offers, r, p.generation);
    forget_rejoin_of(v, v.layout.answers, r, p.generation);
  }
  __syncthreads();
  for (int r = static_cast<int>(threadIdx.x); r < v.group.ranks; r += kOneBlockThreads) {
    if (absent[r]) tell_gone(v, r, Gone::without_us);
  }
  go_on_after(v, p.generation, 0, absent, v.words->epoch);
}

}  // namespace

cudaError_t launch_latency_rejoin(const LatencyRejoinParameters& parameters, cudaStream_t stream) {
  if (parameters.view.words == nullptr || parameters.view.alarm == nullptr) {
    return cudaErrorInvalidValue;
  }
  LatencyRejoinParameters copy = parameters;
  void* arguments[] = {&copy};
  return cudaLaunchKernel(reinterpret_cast<const void*>(&latency_rejoin_kernel), dim3(1),
                          dim3(kOneBlockThreads), arguments, 0, stream);
}

cudaError_t launch_latency_newest(const LatencyView& view, std::uint64_t* newest,
                                  cudaStream_t stream) {
  LatencyView copy = view;
  void* arguments[] = {&copy, &newest};
  return cudaLaunchKernel(reinterpret_cast<const void*>(&latency_newest_kernel), dim3(1),
                          dim3(kOneBlockThreads), arguments, 0, stream);
}

cudaError_t launch_latency_epoch(const LatencyEpochParameters& parameters, cudaStream_t stream) {
  LatencyEpochParameters copy = parameters;
  void* arguments[] = {&copy};
  return cudaLaunchKernel(reinterpret_cast<const void*>(&latency_epoch_kernel), dim3(1),
                          dim3(kOneBlockThreads), arguments, 0, stream);
}

cudaError_t load_latency_rejoin_kernels() {
  for (const void* kernel : {reinterpret_cast<const void*>(&latency_rejoin_kernel),
                             reinterpret_cast<const void*>(&latency_newest_kernel),
                             reinterpret_cast<const void*>(&latency_epoch_kernel)}) {
    const cudaError_t error = load_kernel(kernel, 0);
    if (error != cudaSuccess) return error;
  }
  return cudaSuccess;
}

}  // namespace ferry::cuda
