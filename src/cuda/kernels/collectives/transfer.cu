#include "cuda/kernels/collectives/transfer.hpp"

#include "cuda/kernels/base/launch.hpp"
#include "cuda/kernels/base/load.hpp"
#include "cuda/kernels/collectives/call.cuh"

namespace ferry::cuda {
namespace {

using namespace device;

constexpr int kThreads = 256, kSendThreads = 32;
constexpr unsigned kAll = ~0u;
constexpr std::uint64_t kNone = ~std::uint64_t{0};
static_assert(kMostOffers == 32, "a lane looks at each");

__device__ std::byte* segment(const TransferParameters& p, int rank) {
  return segment_of(p.group, rank, p.segment).data;
}
/// In the segment of a receiver.
__device__ TransferOffer* offer_at(const TransferParameters& p, std::byte* of, int sender,
                                   int place) {
  return reinterpret_cast<TransferOffer*>(of + p.layout.offers) + sender * kMostOffers + place;
}
/// In the segment of a sender.
__device__ TransferAnswer* answer_at(const TransferParameters& p, std::byte* of, int receiver,
                                     int place) {
  return reinterpret_cast<TransferAnswer*>(of + p.layout.answers) + receiver * kMostOffers + place;
}

/// One thread. Always false.
__device__ bool give_up(const TransferParameters& p, Reason reason) {
  const FatalDetail more{static_cast<std::uint64_t>(p.bytes), 0, p.tag};
  return fail(p.group, first_running(p.group), reason, p.stage, p.peer, more);
}

/// One thread: both learn that the sizes differ, and go on.
__device__ void refuse(const TransferParameters& p, std::uint64_t sent, std::uint64_t expected) {
  p.failure->reason = Reason::bad_counts;
  p.failure->stage = p.stage;
  p.failure->peer = p.peer;
  p.failure->detail = p.tag;
  p.failure->seen = sent;
  p.failure->expected = expected;
  store_release(&p.failure->written, first_running(p.group));
}

__device__ bool await_answer(const TransferParameters& p, const TransferAnswer* answer,
                             std::uint64_t number) {
  SpinDeadline spin_deadline;
  while (load_acquire(&answer->number) < number) {
    Reason reason;
    if (!spin_deadline.over(p.group, reason)) continue;
    return reason != Reason::none && give_up(p, reason);
  }
  return true;
}

__global__ void __launch_bounds__(kSendThreads, 1)
    send_kernel(const __grid_constant__ TransferParameters p) {
  if (thread() != 0 || has_failed(p.group)) return;
  const int place = static_cast<int>(p.number % kMostOffers);
  const TransferAnswer* answer = answer_at(p, segment(p, p.group.rank), p.peer, place);
  if (p.number > kMostOffers && !await_answer(p, answer, p.number - kMostOffers)) return;
  TransferOffer* offer = offer_at(p, segment(p, p.peer), p.group.rank, place);
  // Before it: what the kernels before did to the bytes, and that the place was cleared.
  fence_system();
  store_relaxed(&offer->tag, static_cast<std::uint64_t>(p.tag));
  store_relaxed(&offer->bytes, static_cast<std::uint64_t>(p.bytes));
  store_relaxed(&offer->offset, p.place.offset);
  store_relaxed(&offer->segment, std::uint64_t{p.place.segment});
  store_release(&offer->number, p.number);
  if (!await_answer(p, answer, p.number)) return;
  const std::uint64_t expected = load_relaxed(&answer->bytes);
  if (expected != static_cast<std::uint64_t>(p.bytes)) {
    refuse(p, static_cast<std::uint64_t>(p.bytes), expected);
  }
}

/// In shared memory: the offer that a receive takes.
struct Taken {
  TransferOffer offer;
  int place;
  int there;
};

/// One lane: the offer of its place, if it has this tag; number kNone: it has not.
__device__ TransferOffer look_at(const TransferParameters& p, const TransferOffer* at) {
  TransferOffer seen{};
  seen.number = load_acquire(&at->number);
  // The place may be another offer's by now: each read comes before the next.
  seen.tag = load_acquire(&at->tag);
  seen.bytes = load_acquire(&at->bytes);
  seen.offset = load_acquire(&at->offset);
  seen.segment = load_acquire(&at->segment);
  const bool whole = load_acquire(&at->number) == seen.number;
  const bool right = seen.number != 0 && seen.tag == static_cast<std::uint64_t>(p.tag);
  if (!whole || !right) seen.number = kNone;
  return seen;
}

/// One warp. `there` 0: the group has failed.
__device__ void find_offer(const TransferParameters& p, Taken& taken) {
  const int lane = thread();
  const TransferOffer* at = offer_at(p, segment(p, p.group.rank), p.peer, lane);
  SpinDeadline spin_deadline;
  for (;;) {
    const TransferOffer mine = look_at(p, at);
    std::uint64_t least = mine.number;
    for (int step = 16; step > 0; step /= 2) {
      const std::uint64_t other = __shfl_xor_sync(kAll, least, step);
      least = other < least ? other : least;
    }
    if (least != kNone) {
      if (mine.number == least) taken = {mine, lane, 1};
      return;
    }
    bool over = false;
    if (lane == 0) {
      Reason reason;
      over = spin_deadline.over(p.group, reason);
      if (over && reason != Reason::none) give_up(p, reason);
    }
    if (__any_sync(kAll, over) == 0) continue;
    if (lane == 0) taken.there = 0;
    return;
  }
}

/// Whole block. False: what was offered cannot be, and the group has failed.
__device__ bool take(const TransferParameters& p, const TransferOffer& offer) {
  if (offer.bytes != static_cast<std::uint64_t>(p.bytes) || p.bytes == 0) return true;
  const auto number = static_cast<std::uint32_t>(offer.segment);
  const std::byte* from = checked_place(p.group, p.peer, number, offer.offset, offer.bytes);
  if (from != nullptr) copy_vectors(grid_walk(), from, p.out, p.bytes);
  if (from == nullptr && thread() == 0) give_up(p, Reason::violation);
  return from != nullptr;
}

/// One thread of the last block, after all reads.
__device__ void answer(const TransferParameters& p, const Taken& taken) {
  std::byte* own = segment(p, p.group.rank);
  store_relaxed(&offer_at(p, own, p.peer, taken.place)->number, std::uint64_t{0});
  if (taken.offer.bytes != static_cast<std::uint64_t>(p.bytes)) {
    refuse(p, taken.offer.bytes, static_cast<std::uint64_t>(p.bytes));
  }
  TransferAnswer* to = answer_at(p, segment(p, p.peer), p.group.rank, taken.place);
  store_relaxed(&to->bytes, static_cast<std::uint64_t>(p.bytes));
  store_release(&to->number, taken.offer.number);
}

__global__ void __launch_bounds__(kThreads, 1)
    recv_kernel(const __grid_constant__ TransferParameters p) {
  __shared__ Taken taken;
  if (__syncthreads_or(has_failed(p.group)) != 0) return;
  if (thread() < 32) find_offer(p, taken);
  __syncthreads();
  if (taken.there == 0 || !take(p, taken.offer)) return;
  __syncthreads();
  if (thread() != 0) return;
  auto* arrived = reinterpret_cast<std::uint32_t*>(segment(p, p.group.rank) + p.layout.arrived) +
                  p.peer * kMostOffers + taken.place;
  fence_system();
  if (atomicAdd(arrived, 1u) + 1 != gridDim.x) return;
  fence_system();
  store_relaxed(arrived, 0u);
  answer(p, taken);
}

}  // namespace

cudaError_t launch_transfer(const TransferParameters& parameters, cudaStream_t stream) {
  if (parameters.blocks < 1) return cudaErrorInvalidValue;
  TransferParameters copy = parameters;
  void* arguments[] = {&copy};
  if (parameters.stage == Stage::send) {
    return launch(reinterpret_cast<const void*>(&send_kernel), {1, kSendThreads, 0}, arguments,
                  stream, false);
  }
  return launch(reinterpret_cast<const void*>(&recv_kernel),
                {static_cast<unsigned>(parameters.blocks), kThreads, 0}, arguments, stream, false);
}

cudaError_t load_transfer_kernels() {
  const cudaError_t error = load_kernel(reinterpret_cast<const void*>(&send_kernel), 0);
  return error != cudaSuccess ? error : load_kernel(reinterpret_cast<const void*>(&recv_kernel), 0);
}

}  // namespace ferry::cuda
