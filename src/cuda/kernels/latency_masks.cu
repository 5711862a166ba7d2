// Masks that the host sets and clears, and the rejoining of ranks that were masked: small kernels
// of one block, between the calls of an exchange.
#include "cuda/kernels/entry.cuh"
#include "cuda/kernels/latency_wait.cuh"
#include "cuda/kernels/load.hpp"

namespace ferry::cuda {

namespace {

using namespace device;

constexpr int kThreads = 128;

/// No call has this number: what the host has masked is masked in all of them.
constexpr std::uint32_t kMaskedByHost = 0xffffffff;

__global__ void __launch_bounds__(kThreads)
    latency_mask_kernel(const __grid_constant__ LatencyView v, int rank, bool masked) {
  for (int r = static_cast<int>(threadIdx.x); r < v.group.ranks; r += kThreads) {
    if ((rank >= 0 && r != rank) || r == v.group.rank) continue;
    if (!masked) {
      v.words->masked[r] = 0;
    } else if (v.words->masked[r] == 0) {
      v.words->masked[r] = kMaskedByHost;
    }
    store_relaxed(&v.alarm->ranks[r], masked ? 1 : 0);
  }
}

/// Nothing that a rank wrote in a generation up to `newest` is looked at any more.
__device__ void go_on_after(const LatencyView& v, std::uint64_t newest) {
  const LatencyPlaces at{v, newest};
  for (int r = static_cast<int>(threadIdx.x); r < v.group.ranks; r += kThreads) {
    v.words->masked[r] = 0;
    store_relaxed(&v.alarm->ranks[r], 0);
    store_release(at.released(v.peers[r], v.group.rank), newest);
  }
  if (threadIdx.x != 0) return;
  LatencyWords& words = *v.words;
  words.generation = newest;
  words.received[newest % 2] = newest;
  words.received[(newest + 1) % 2] = newest == 0 ? 0 : newest - 1;
  words.released = newest;
}

/// By the swap of heads all ranks are here, and so have ended their latency calls before: nobody
/// writes into another's buffers, and what a peer writes after it is of a newer generation.
__global__ void __launch_bounds__(kThreads)
    latency_rejoin_kernel(const __grid_constant__ LatencyRejoinParameters p) {
  __shared__ unsigned long long newest;
  const GroupView& group = p.view.group;
  std::byte* control = first_control(group);
  std::uint64_t generation;
  if (threadIdx.x == 0) newest = 0;
  if (!begin_call(group, generation)) return;
  post_entry(group, control, generation, p.call, [&](DeviceHead& head) {
    head.detail = static_cast<std::int64_t>(load_relaxed(&p.view.words->generation));
  });
  Verdict verdict;
  if (!await_entry(group, generation, Stage::latency_rejoin, p.call, nullptr, verdict)) return;
  if (verdict.reason != Reason::none) {
    refuse_call(group, generation, verdict, Stage::latency_rejoin, nullptr, p.failure);
    return;
  }
  bool good = true;
  for (int r = static_cast<int>(threadIdx.x); r < group.ranks; r += kThreads) {
    const std::uint64_t theirs = head_word(group, r, generation, kDetailWord);
    if (theirs >> 62 != 0) {
      good = fail(group, generation, Reason::distrust, Stage::latency_rejoin, r, {0, theirs, 0});
    }
    atomicMax(&newest, static_cast<unsigned long long>(theirs));
  }
  if (__syncthreads_and(good) == 0) return;
  go_on_after(p.view, newest);
  __syncthreads();
  if (threadIdx.x == 0) end_call(group, generation);
}

}  // namespace

cudaError_t launch_latency_mask(const LatencyView& view, int rank, bool masked,
                                cudaStream_t stream) {
  if (view.words == nullptr || view.alarm == nullptr) return cudaErrorInvalidValue;
  LatencyView copy = view;
  void* arguments[] = {&copy, &rank, &masked};
  return cudaLaunchKernel(reinterpret_cast<const void*>(&latency_mask_kernel), dim3(1),
                          dim3(kThreads), arguments, 0, stream);
}

cudaError_t launch_latency_rejoin(const LatencyRejoinParameters& parameters, cudaStream_t stream) {
  if (parameters.view.words == nullptr || parameters.view.alarm == nullptr) {
    return cudaErrorInvalidValue;
  }
  LatencyRejoinParameters copy = parameters;
  void* arguments[] = {&copy};
  return cudaLaunchKernel(reinterpret_cast<const void*>(&latency_rejoin_kernel), dim3(1),
                          dim3(kThreads), arguments, 0, stream);
}

cudaError_t load_latency_mask_kernels() {
  const cudaError_t error = load_kernel(reinterpret_cast<const void*>(&latency_mask_kernel), 0);
  if (error != cudaSuccess) return error;
  return load_kernel(reinterpret_cast<const void*>(&latency_rejoin_kernel), 0);
}

}  // namespace ferry::cuda
