// Messages that cross in one trip, without a flag behind them: beside every 4 bytes stand the low
// 32 bits of the generation, and whoever reads polls both until they are there.
//
// PTX promises that an aligned access of 8 bytes is made at once, and nothing about the order of
// several; it treats a vector of two as two. So 8 bytes are the unit that carries its generation,
// 16 are what one instruction moves. A head is written in every generation, so the tags before are
// known; a word of a body or of a second grant may be older, and would be taken for new after
// exactly 2^32 generations; one that was never written, in a generation that is a multiple of that.
#pragma once
#include "cuda/kernels/base/wait.cuh"

namespace ferry::cuda::device {

/// What looking at the tags of a message has found so far.
struct TagCheck {
  bool there = true;       ///< all are of this generation
  std::int32_t ahead = 0;  ///< more than 0: a head's is of a generation that cannot be

  __device__ __forceinline__ void check_head(const TaggedPair& pair, std::uint64_t generation) {
    for (const std::uint64_t word : {pair.low, pair.high}) {
      const auto difference = static_cast<std::int32_t>(static_cast<std::uint32_t>(word >> 32) -
                                                        static_cast<std::uint32_t>(generation));
      there = there && difference == 0;
      ahead = max(ahead, difference);
    }
  }
  __device__ __forceinline__ void check_body(std::uint64_t word, std::uint64_t generation) {
    there = there && word >> 32 == (generation & 0xffffffff);
  }
};

/// One thread: the newest generation of which a source has posted a message. `message`: its first
/// place in the mailbox; the others follow `step` bytes apart.
__device__ __noinline__ inline std::uint64_t last_posted(const std::byte* message,
                                                         std::uint64_t step,
                                                         std::uint64_t generation) {
  std::uint64_t last = 0;
#pragma unroll 1
  for (int slot = 0; slot < kMailboxDepth; ++slot, message += step) {
    const std::uint64_t word = load_relaxed(reinterpret_cast<const std::uint64_t*>(message));
    const auto behind =
        static_cast<std::uint32_t>(generation) - static_cast<std::uint32_t>(word >> 32);
    if (behind <= generation) last = max(last, generation - behind);
  }
  return last;
}

/// One thread waits until `poll()`, a TagCheck, has found all that it looks for in `source`'s
/// message. `beside`: the call before may not have ended. False: the group has failed.
template <class Poll>
__device__ __forceinline__ bool await_words(const GroupView& group, std::uint64_t generation,
                                            Stage stage, int source, const Poll& poll,
                                            bool beside = false) {
  SpinDeadline spin_deadline;
  Reason reason;
  std::int32_t ahead;
  do {
    const TagCheck check = poll();
    if (check.there) return true;
    // What comes in this slot after this generation cannot come before it has ended.
    reason = Reason::violation;
    ahead = check.ahead;
  } while (ahead <= 0 && !spin_deadline.over(group, reason));
  if (reason == Reason::none) return false;
  const std::uint64_t seen =
      ahead > 0 ? generation + static_cast<std::uint32_t>(ahead)
                : last_posted(mailbox_slot(group, group.control, source, 0),
                              static_cast<std::uint64_t>(group.ranks) * group.layout.message_bytes,
                              generation);
  return fail(group, beside ? first_running(group) : generation, reason, stage, source,
              {generation, seen, 0});
}

}  // namespace ferry::cuda::device
