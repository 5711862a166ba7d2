// Entry and end of a call: the swap of heads by which every block of every rank takes the same
// decision. Every function here is for whole blocks.
//
//   std::byte* control = first_control(group);
//   std::uint64_t generation;
//   if (!begin_call(group, generation)) return;
//   if (blockIdx.x == 0) {
//     post_entry(group, control, generation, call, [&](DeviceHead& head) { ... });
//   }
//   Verdict verdict;
//   if (!await_entry(group, generation, stage, call, needed, verdict)) return;
//   if (verdict.reason != Reason::none) { refuse_call(...); return; }
//   ... work; then one block, when no other reads the generation any more: end_call(...)
#pragma once
#include <cstddef>
#include <new>

#include "cuda/kernels/base/group_view.hpp"
#include "cuda/kernels/base/message.cuh"
#include "cuda/kernels/base/wait.cuh"

namespace ferry::cuda::device {

static_assert(sizeof(CallSignature) == 48 && sizeof(DeviceHead) == 104,
              "the heads cross as whole words without padding");

/// First in a kernel that is launched early: until the kernel before it in the stream has ended and
/// its writes are visible. Nothing that any kernel wrote is read before.
__device__ __forceinline__ void await_kernel_before() {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
  asm volatile("griddepcontrol.wait;" ::: "memory");
#endif
}
/// The blocks of the next kernel may come; it still waits for all of this one.
__device__ __forceinline__ void let_next_kernel_come() {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
  asm volatile("griddepcontrol.launch_dependents;" ::: "memory");
#endif
}

/// Whole block: false when the group has failed before. `generation`: of this call.
__device__ inline bool begin_call(const GroupView& group, std::uint64_t& generation) {
  generation = load_relaxed(&local_words(group)->generation) + 1;
  const bool failed = has_failed(group);
  // What the kernels before did comes before what block 0 posts, for whoever reads it: rows that a
  // combine offers, reads of the memory that a dispatch grants. Here it costs next to nothing.
  if (blockIdx.x == 0 && threadIdx.x / 32 < static_cast<unsigned>(group.ranks)) fence_system();
  return __syncthreads_or(failed) == 0;
}

inline constexpr int kHeadWords = static_cast<int>(sizeof(DeviceHead) / 8);
/// In a mailbox; the body follows, 8 bytes a word.
inline constexpr std::size_t kPostedHeadBytes = 2 * sizeof(DeviceHead);

/// A message without a body.
struct NoBody {
  __device__ int words(int) const { return 0; }
  __device__ std::int32_t word(int, int) const { return 0; }
};

/// Where the first message of this warp goes. The table of segments is the CPU's, which only ever
/// adds to it, so it can be read before the kernel before has ended: one trip to the memory less.
__device__ __forceinline__ std::byte* first_control(const GroupView& group) {
  const int warp = static_cast<int>(threadIdx.x / 32);
  return warp < group.ranks ? control_of(group, (group.rank + warp) % group.ranks) : nullptr;
}

/// Whole block 0: this rank's message to every peer: the head, of which `fill(head)` (one thread)
/// sets all but the call, then body.words(peer) words body.word(peer, i). What must come before the
/// message for its readers stands behind a fence_system (begin_call). `control`: as first_control.
template <class Fill, class Body = NoBody>
__device__ inline void post_entry(const GroupView& group, std::byte* control,
                                  std::uint64_t generation, const CallSignature& call,
                                  const Fill& fill, const Body& body = Body{}) {
  __shared__ alignas(16) std::uint64_t head[kHeadWords];
  const int lane = static_cast<int>(threadIdx.x % 32), warp = static_cast<int>(threadIdx.x / 32);
  const int warps = static_cast<int>(blockDim.x / 32);
  if (threadIdx.x == 0) {
    auto* mine = new (head) DeviceHead{};
    mine->call = call;
    fill(*mine);
  }
  __syncthreads();
#pragma unroll 1
  for (int i = warp; i < group.ranks; i += warps) {
    const int peer = (group.rank + i) % group.ranks;
    if (i != warp) control = control_of(group, peer);
    std::byte* slot = mailbox_slot(group, control, group.rank, generation);
    if (lane < kHeadWords) store_pair(slot + lane * 16, head[lane], generation);
    auto* words = reinterpret_cast<std::uint64_t*>(slot + kPostedHeadBytes);
    const int count = body.words(peer);
#pragma unroll 1
    for (int w = lane; w < count; w += 32) {
      store_relaxed(words + w, tagged(static_cast<std::uint32_t>(body.word(peer, w)), generation));
    }
  }
}

/// none: the call goes on. The same on every rank but for the peer of a mismatch.
struct Verdict {
  Reason reason = Reason::none;
  int peer = -1;
};

// Words of a head; 16 lanes of a warp hold one head, a word each.
inline constexpr int kHeadLanes = 16;
inline constexpr int kCallWords = static_cast<int>(sizeof(CallSignature) / 8);
inline constexpr int kStatusWord = static_cast<int>(offsetof(DeviceHead, status) / 8);
inline constexpr int kOffsetWord = static_cast<int>(offsetof(DeviceHead, offset) / 8);
inline constexpr int kSideWord = static_cast<int>(offsetof(DeviceHead, side_segment) / 8);
inline constexpr int kSideOffsetWord = static_cast<int>(offsetof(DeviceHead, side_offset) / 8);
inline constexpr int kRowsWord = static_cast<int>(offsetof(DeviceHead, rows) / 8);
inline constexpr int kDetailWord = static_cast<int>(offsetof(DeviceHead, detail) / 8);
inline constexpr int kBlocksWord = static_cast<int>(offsetof(DeviceHead, blocks) / 8);
static_assert(kHeadWords <= kHeadLanes && offsetof(DeviceHead, segment) % 8 == 4 &&
              offsetof(DeviceHead, refused) % 8 == 4);

/// Where a word of `peer`'s head comes.
__device__ __forceinline__ const std::byte* posted_word(const GroupView& group, int peer,
                                                        std::uint64_t generation, int word) {
  return mailbox_slot(group, group.control, peer, generation) + word * 16;
}

/// The same of its second grant (throughput/second_grant.cuh).
__device__ __forceinline__ const std::byte* second_word(const GroupView& group, int peer,
                                                        std::uint64_t generation, int word) {
  return second_slot(group, group.control, peer, generation) + word * 16;
}

/// A word of a head that is known to have come.
__device__ __forceinline__ std::uint64_t head_word(const GroupView& group, int peer,
                                                   std::uint64_t generation, int word) {
  return data_of(load_pair_relaxed(posted_word(group, peer, generation, word)));
}

/// Sixteen lanes: wait for `peer`'s head, of which each gets its word. `beside`: as await_words.
/// `or_hole`: it may be one, of which each gets 0 at once. False, in all of them: the group has
/// failed.
__device__ __forceinline__ bool await_head(const GroupView& group, int peer,
                                           std::uint64_t generation, Stage stage,
                                           std::uint64_t& value, bool beside = false,
                                           bool or_hole = false) {
  const int word = static_cast<int>(threadIdx.x % kHeadLanes);
  const std::byte* at = posted_word(group, peer, generation, word);
  TaggedPair pair{};
  bool none = false;
  const auto poll = [&] {
    TagCheck check;
    if (or_hole) none = is_hole(group, peer);
    pair = load_pair(at);
    if (!none) check.check_head(pair, generation);
    return check;
  };
  const bool there =
      word >= kHeadWords || await_words(group, generation, stage, peer, poll, beside);
  value = none ? 0 : data_of(pair);
  return __all_sync(0xffffu << (threadIdx.x & 16), there) != 0;
}

inline constexpr std::uint32_t kNoComplaint = 6;
/// Who brings the routes of a plan: ranks may know differently whether an earlier dispatch has
/// brought them. Those that are wrong find that their plan holds none, and that is what counts.
inline constexpr int kRoutesWord =
    static_cast<int>(offsetof(CallSignature, exchange.carries_routes) / 8);
static_assert(offsetof(CallSignature, exchange.carries_routes) % 8 == 0 &&
              sizeof(ExchangeTerms::carries_routes) == 4);

/// Sixteen lanes, each with its word: what this lane finds wrong with the head, as a number: the
/// lower, the earlier it is reported. `needed`: rows that arrive there.
__device__ __forceinline__ std::uint32_t complaint(std::uint64_t value, const CallSignature& call,
                                                   std::int64_t needed) {
  const int word = static_cast<int>(threadIdx.x % kHeadLanes);
  if (word < kCallWords) {
    const std::uint64_t differs = value ^ reinterpret_cast<const std::uint64_t*>(&call)[word];
    if (differs == 0) return kNoComplaint;
    return word == kRoutesWord && differs >> 32 == 0 ? 3 : 0;
  }
  if (word == kSideWord) {
    const auto refused = static_cast<Reason>(value >> 32);
    if (refused != Reason::none) return refused == Reason::bad_route ? 1 : 2;
  }
  if (word == kStatusWord) {
    const auto status = static_cast<StepStatus>(value & 0xffffffff);
    const bool guesses = status == StepStatus::guessed && call.kind == CallKind::dispatch;
    if (status == StepStatus::ok || guesses) return kNoComplaint;
    return status == StepStatus::too_many ? 5 : 4;
  }
  if (word == kRowsWord && needed > static_cast<std::int64_t>(value)) return 5;
  return kNoComplaint;
}

/// Whole block: the verdict of the worst of all threads' complaints, `what << 16 | peer`.
__device__ inline Verdict worst_of(std::uint32_t found) {
  __shared__ std::uint32_t worst;
  if (__syncthreads_and(found >> 16 == kNoComplaint) != 0) return {};
  if (threadIdx.x == 0) worst = found;
  __syncthreads();
  atomicMin(&worst, found);
  __syncthreads();
  const std::uint32_t all = worst;
  __syncthreads();
  const int peer = static_cast<int>(all & 0xffff);
  switch (all >> 16) {
    case 0:
    case 3: return {Reason::mismatch, peer};
    case 1: return {Reason::bad_route, peer};
    case 2: return {Reason::bad_plan, peer};
    case 4: return {Reason::no_room, peer};
    case 5: return {Reason::too_many, peer};
    default: return {};
  }
}

/// Polls nothing.
struct NoPoll {
  __device__ void operator()(int, std::uint64_t) const {}
};

/// Whole block: waits for the heads of all ranks. `call`: this rank's signature. `needed`: rows
/// that arrive at each rank, null: rows are not granted. `poll(peer, word)`: sixteen lanes, each
/// with its word of a head that has come; of a hole 0. False: the group has failed, return at once.
template <class Poll = NoPoll>
__device__ inline bool await_entry(const GroupView& group, std::uint64_t generation, Stage stage,
                                   const CallSignature& call, const std::int64_t* needed,
                                   Verdict& verdict, const Poll& poll = Poll{}) {
  std::uint32_t found = kNoComplaint << 16;
  bool there = true;
  for (int peer = static_cast<int>(threadIdx.x / kHeadLanes); peer < group.ranks && there;
       peer += static_cast<int>(blockDim.x / kHeadLanes)) {
    const std::int64_t rows = needed != nullptr ? needed[peer] : INT64_MIN;
    std::uint64_t word;
    there = await_head(group, peer, generation, stage, word, false, true);
    const std::uint32_t what = there ? complaint(word, call, rows) : kNoComplaint;
    const std::uint32_t mine = what << 16 | static_cast<std::uint32_t>(peer);
    if (what != kNoComplaint && mine < found && !is_hole(group, peer)) found = mine;
    if (there) poll(peer, word);
  }
  if (__syncthreads_and(there) == 0) return false;
  verdict = worst_of(found);
  return true;
}

/// One thread: tells the host why this call moved nothing.
__device__ inline void report(const GroupView& group, std::uint64_t generation, Verdict verdict,
                              Stage stage, const std::int64_t* needed, Failure* failure) {
  if (failure == nullptr) return;
  const auto first = [&](int i) { return head_word(group, verdict.peer, generation, i); };
  const auto status_in = [](std::uint64_t word) {
    return static_cast<StepStatus>(static_cast<std::uint32_t>(word));
  };
  const bool size = verdict.reason == Reason::no_room || verdict.reason == Reason::too_many;
  const bool again = size && status_in(first(kStatusWord)) == StepStatus::guessed;
  const auto word = [&](int i) {
    return again ? data_of(load_pair_relaxed(second_word(group, verdict.peer, generation, i)))
                 : first(i);
  };
  failure->reason = verdict.reason;
  failure->stage = stage;
  failure->peer = verdict.peer;
  // Too many received rows are known here; too many rows of its output only the peer knows.
  const bool counted = needed != nullptr && verdict.reason == Reason::too_many &&
                       status_in(word(kStatusWord)) != StepStatus::too_many;
  failure->detail = counted ? needed[verdict.peer] : static_cast<std::int64_t>(word(kDetailWord));
  auto* copy = reinterpret_cast<std::uint64_t*>(&failure->theirs);
  for (int i = 0; i < kCallWords; ++i) copy[i] = word(i);
  store_release(&failure->written, generation);
}

/// One thread of the last block that needs the generation: the call has ended.
__device__ inline void end_call(const GroupView& group, std::uint64_t generation) {
  store_relaxed(&local_words(group)->generation, generation);
}

/// Whole grid, every block: ends a call that moves nothing, in peace. Uses arrived[3].
__device__ inline void refuse_call(const GroupView& group, std::uint64_t generation,
                                   Verdict verdict, Stage stage, const std::int64_t* needed,
                                   Failure* failure) {
  if (blockIdx.x == 0 && threadIdx.x == 0) {
    report(group, generation, verdict, stage, needed, failure);
  }
  if (arrive_last(group, 3) && threadIdx.x == 0) {
    store_relaxed(&local_words(group)->refused, generation);
    end_call(group, generation);
  }
}

/// Whether the last call of the group moved its rows: what local kernels after it ask before they
/// touch them.
__device__ inline bool last_call_moved(const GroupView& group) {
  const LocalWords* words = local_words(group);
  return load_relaxed(&words->failed) == 0 &&
         load_relaxed(&words->refused) != load_relaxed(&words->generation);
}

}  // namespace ferry::cuda::device
