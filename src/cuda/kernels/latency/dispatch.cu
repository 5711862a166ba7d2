// Latency dispatch: one kernel; with a hook, two.
#include <algorithm>

#include "cuda/kernels/base/launch.hpp"
#include "cuda/kernels/base/load.hpp"
#include "cuda/kernels/latency/dispatch_call.cuh"

namespace ferry::cuda {

namespace {

using namespace device;

SendingBlocks sending_of(const LatencyDispatchParameters& p, int num_sms) {
  const LatencyView& v = p.view;
  const bool ll = is_ll_of(v, p.tokens, size_of(v.dtype));
  if (!v.ll128 || p.halves != Halves::both || ll) return {p.blocks, p.blocks, 0};
  return sending_blocks(p.blocks, num_sms, kLatencyBlocksPerSm, v.group.ranks);
}

DispatchShape make_shape(const LatencyDispatchParameters& p, int num_sms) {
  const LatencyView& v = p.view;
  const std::int64_t experts = v.placement.local_experts(0);
  const SendingBlocks sending = sending_of(p, num_sms);
  const bool shares_warps = p.halves == Halves::both && sending.of_row == 0;
  const int send_warps = shares_warps ? kMostSendWarps : kLatencyWarps;
  DispatchShape shape{.send = SendShape(v, p.tokens, sending, send_warps)};
  shape.experts = static_cast<int>(v.placement.local_experts(v.group.rank));
  shape.header_warps = header_warps(experts);
  const std::int64_t bases = experts * v.group.ranks * 4;
  shape.bases = bases <= kCounterBytes;
  shape.bytes =
      static_cast<std::size_t>(std::max(shape.header_warps * experts * 4, shape.bases ? bases : 0));
  return shape;
}

DispatchKernel kernel_of(Dtype dtype, LatencyFormat format, bool rank_major, bool ll128) {
  if (ll128) {
    return rank_major ? ll128_rank_major_kernel(dtype, format) : ll128_kernel(dtype, format);
  }
  return rank_major ? rank_major_kernel(dtype, format)
                    : dispatch_kernel<false, false>(dtype, format);
}

}  // namespace

bool fits_latency(const LatencyView& v) {
  return v.group.ranks <= kMaxDomain && v.topk >= 1 && v.topk <= kMaxLatencyTopk &&
         v.capacity <= kMostLatencyTokens && v.parts >= 1 && v.parts <= kMaxParts &&
         v.placement.local_experts(0) <= kMostLatencyExperts && v.words != nullptr;
}

cudaError_t launch_latency_dispatch(const LatencyDispatchParameters& parameters,
                                    cudaStream_t stream) {
  KernelLimits limits;
  const cudaError_t error = kernel_limits(limits);
  if (error != cudaSuccess) return error;
  // Sending is the same in both orders.
  const bool ranked = parameters.rank_major && parameters.halves != Halves::send;
  const LatencyView& v = parameters.view;
  const DispatchKernel kernel = kernel_of(v.dtype, parameters.format, ranked, v.ll128);
  if (kernel == nullptr || !fits_latency(parameters.view) || parameters.blocks < 1 ||
      parameters.tokens > parameters.view.capacity || parameters.topk > parameters.view.topk) {
    return cudaErrorInvalidValue;
  }
  LatencyDispatchParameters copy = parameters;
  // It has an SM almost alone: it comes when the kernel before has ended, so that ranks that share
  // a GPU have room for each other.
  if (ranked) copy.blocks = std::min(copy.blocks, limits.num_sms);
  DispatchShape shape = make_shape(copy, limits.num_sms);
  RankFinder ranks(parameters.view.placement);
  void* arguments[] = {&copy, &ranks, &shape};
  return launch(reinterpret_cast<const void*>(kernel),
                {static_cast<unsigned>(copy.blocks), kLatencyThreads, shape.bytes}, arguments,
                stream, limits.bulk_copies && !ranked);
}

cudaError_t load_latency_dispatch_kernels() {
  for (const Dtype dtype : {Dtype::f32, Dtype::f16, Dtype::bf16}) {
    for (const LatencyFormat format : {LatencyFormat::as_is, LatencyFormat::e4m3}) {
      for (const int kind : {0, 1, 2, 3}) {
        const DispatchKernel kernel = kernel_of(dtype, format, kind % 2 != 0, kind / 2 != 0);
        if (kernel == nullptr) continue;  // rows of f32 do not cross as LL128
        const cudaError_t error = load_kernel(reinterpret_cast<const void*>(kernel), kCounterBytes);
        if (error != cudaSuccess) return error;
      }
    }
  }
  return cudaSuccess;
}

}  // namespace ferry::cuda
