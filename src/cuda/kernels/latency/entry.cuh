// Latency mode: how a kernel begins and ends. What a call needs of the words is read in one trip;
// one block writes them when all blocks have read them, in the midst of the call, so that at its
// end no block waits for another.
#pragma once
#include "cuda/kernels/latency/wait.cuh"

namespace ferry::cuda::device {

/// One warp: tells all ranks that their buffers of generations up to `upto` are free. Kernels that
/// have ended read them, and nothing that they wrote goes with it, so there is nothing to fence.
__device__ __noinline__ inline void release_upto(const LatencyView& v, std::uint64_t generation,
                                                 std::uint64_t upto) {
  const LatencyPlaces at{v, generation};
#pragma unroll 1
  for (int r = static_cast<int>(threadIdx.x % 32); r < v.group.ranks; r += 32) {
    store_relaxed(at.released(v.peers[r], v.line[r]), upto);
  }
}

/// First in a kernel: brings the parameters near before the kernel before has ended.
__device__ __forceinline__ void touch_view(const LatencyView& v) {
  for (int r = 0; r < v.group.ranks; r += 8) {
    asm volatile("" ::"l"(v.peers[r]), "l"(v.rows[r]), "l"(v.sources[r]));
  }
  asm volatile("" ::"l"(v.words), "l"(v.layout.released), "l"(v.layout.sums), "l"(v.group.control),
               "l"(v.group.layout.local), "l"(v.group.deadline_ns));
}

/// Of a result that was kept while a graph made two dispatches or more: what this call would write
/// lies where peers may still be in a later one. All ranks find that alike, and nothing moves.
__device__ __noinline__ inline void refuse_stale(Failure* failure, std::uint64_t generation,
                                                 std::uint64_t last) {
  if (failure == nullptr || blockIdx.x != 0 || threadIdx.x != 0) return;
  failure->reason = Reason::stale;
  failure->stage = Stage::latency_headers;
  failure->peer = -1;
  failure->detail = static_cast<std::int64_t>(last - generation);
  store_release(&failure->written, generation);
}

/// Warp 0, the whole of it: fills `call` but for the tokens. `handle` null: the generation is a new
/// one, and peers are open once they have read what the buffer held before. Else those that it went
/// to. True: the group has failed, or the result of the handle is stale.
__device__ inline bool open_latency_call(const LatencyView& v, const LatencyHandle* handle,
                                         LatencyCall& call, Failure* failure = nullptr) {
  const int lane = static_cast<int>(threadIdx.x), ranks = v.group.ranks;
  const LatencyWords& words = *v.words;
  const std::uint64_t newest = load_relaxed(&words.generation);
  const std::uint64_t last = handle != nullptr ? load_relaxed(&handle->generation) : newest;
  const std::uint32_t number = load_relaxed(&words.calls) + 1;
  const std::uint32_t came = load_relaxed(&words.came_before);
  const std::uint64_t failed = load_relaxed(&local_words(v.group)->failed);
  const std::uint64_t running = first_running(v.group);
  const std::uint32_t mask = lane < ranks ? load_relaxed(&words.masked[lane]) : 0;
  // A rank that was masked in the dispatch takes no part in its combine, masked still or not.
  const std::uint32_t sent =
      handle != nullptr && lane < ranks ? load_relaxed(&handle->sent[lane]) : 1;
  std::uint64_t released = 0, even = 0, odd = 0;
  std::uint32_t passed = 0;
  if (leads()) {
    released = load_relaxed(&words.released);
    even = load_relaxed(&words.received[0]);
    odd = load_relaxed(&words.received[1]);
    passed = load_relaxed(&words.passed_before);
  }
  const LatencyPlaces at{v, last + (handle != nullptr ? 0 : 1)};
  const std::uint64_t credit = handle == nullptr && lane < ranks
                                   ? load_acquire(at.released(v.sources[lane], lane))
                                   : UINT64_MAX;
  const std::uint64_t needed = handle == nullptr && at.generation > 2 ? at.generation - 2 : 0;
  const bool stale = newest - last > 1;
  if (stale) refuse_stale(failure, last, newest);
  bool stopped = failed != 0 || stale;
  if (lane == 0 && leads()) store_relaxed(&v.words->begun, number);
  if (lane == 0) {
    call.generation = at.generation;
    call.first_running = running;
    call.number = number;
    call.came_before = came;
    call.passed_before = passed;
    call.released = released;
    call.received[0] = even;
    call.received[1] = odd;
    call.lost = call.stopped = call.again = false;
  }
  __syncwarp();
  // Who may wait for this rank's credit gets it before this rank waits. Of the results before the
  // last none is alive, read or not.
  const bool waits = __any_sync(kAllLanes, lane < ranks && credit < needed) != 0 ||
                     (ranks > 32 && handle == nullptr);
  if (waits && leads() && !stopped && released < needed) {
    release_upto(v, at.generation, needed);
  }
#pragma unroll 1
  for (int r = lane; r < ranks; r += 32) {
    const std::uint32_t found = r == lane ? mask : load_relaxed(&words.masked[r]);
    const bool masked = found != 0 && found != number;
    WaitStatus came_here = masked ? WaitStatus::missing : WaitStatus::here;
    if (!masked && !stopped && needed > 0 && (r != lane || credit < needed)) {
      came_here = await_credit(at, call, r, needed);
    }
    call.masked[r] = masked;
    const bool went = handle == nullptr || (r == lane ? sent : load_relaxed(&handle->sent[r])) != 0;
    call.open[r] = came_here == WaitStatus::here && went;
    stopped |= came_here == WaitStatus::stop;
  }
  return stopped;
}

/// Whole block, when warp 0 has opened the call: all threads may read it. False: the group has
/// failed, for `stopped` is true in some thread. What was read of the words lies in shared memory
/// by then, so that nothing must be fenced, which would keep a warp for half a microsecond.
__device__ inline bool join_latency_call(const LatencyView& v, bool stopped) {
  const bool good = __syncthreads_or(stopped) == 0;
  if (good && threadIdx.x == kLatencyThreads - 1) count_relaxed(&v.words->came);
  return good;
}

/// Whole block, which has nothing else to do meanwhile.
__device__ inline bool begin_latency_call(const LatencyView& v, const LatencyHandle* handle,
                                          LatencyCall& call, Failure* failure = nullptr) {
  return join_latency_call(v, threadIdx.x < 32 && open_latency_call(v, handle, call, failure));
}

/// The leading block, warp 0 of it, which has the least to receive: tells the peers what earlier
/// calls have read, and writes what the next call finds. `sent`, `received`: of a dispatch, what
/// this call does.
__device__ inline void note_latency_call(const LatencyPlaces& at, LatencyCall& call, bool sent,
                                         bool received) {
  if (!leads() || threadIdx.x >= 32) return;
  LatencyWords& words = *at.v.words;
  const std::uint64_t generation = at.generation;
  std::uint64_t upto = call.released;
  if (sent && generation > 2 && upto < generation - 2) upto = generation - 2;
  // Received in any order, released in order.
#pragma unroll 1
  for (int i = 0; i < 2 && call.received[(upto + 1) % 2] == upto + 1; ++i) ++upto;
  if (upto > call.released) release_upto(at.v, generation, upto);
  if (threadIdx.x % 32 != 0) return;
  SpinDeadline spin_deadline;
  while (load_acquire_gpu(&words.came) - call.came_before != gridDim.x) {
    Reason reason;
    if (!spin_deadline.over(at.v.group, reason)) continue;
    if (reason != Reason::none) {
      fail_latency(at.v, call, reason, Stage::latency_credit, at.v.group.rank);
    }
    return;
  }
  if (sent) words.generation = generation;
  if (received) words.received[generation % 2] = generation;
  words.released = upto;
  words.calls = call.number;
  words.came_before = call.came_before + gridDim.x;
  if (received) words.passed_before = call.passed_before + gridDim.x;
}

/// Whole block, at the end of its work. True in every thread of the one block that clears up what
/// is lost, after all others have ended.
__device__ inline bool end_latency_call(const LatencyView& v, const LatencyCall& call) {
  __syncthreads();
  if (call.stopped) return false;
  if (threadIdx.x == 0) count_released(&v.words->left);
  if (!call.lost) return false;
  bool clears = false;
  if (threadIdx.x == 0 && atomicMax(&v.words->lost, call.number) < call.number) {
    clears = true;
    SpinDeadline spin_deadline;
    while (clears && load_acquire_gpu(&v.words->left) - call.came_before != gridDim.x) {
      Reason reason;  // the others' own waits have deadlines
      clears = !spin_deadline.over(v.group, reason) || reason == Reason::deadline;
    }
  }
  return __syncthreads_or(clears) != 0;
}

}  // namespace ferry::cuda::device
