// Latency dispatch: header and rows out, rows in and to their experts. One kernel; with a hook,
// two.
#include <algorithm>

#include "cuda/kernels/entry.cuh"
#include "cuda/kernels/latency_few_receive.cuh"
#include "cuda/kernels/launch.hpp"
#include "cuda/kernels/load.hpp"

namespace ferry::cuda {

namespace {

using namespace device;

/// Warps that count routes for a header: as many as their counters fit.
constexpr int kCounterBytes = 32 << 10;

int header_warps(std::int64_t local_experts) {
  const std::int64_t fit = kCounterBytes / 4 / std::max<std::int64_t>(local_experts, 1);
  return static_cast<int>(std::clamp<std::int64_t>(fit, 1, kMostHeaderWarps));
}

/// Counters of headers, then the receiver's bases; one after the other in the same memory.
struct SharedShape {
  int header_warps = 1;
  bool bases = false;  ///< they fit
  std::size_t bytes = 0;
};

SharedShape make_shared_shape(const LatencyView& v) {
  const std::int64_t experts = v.placement.local_experts(0);
  SharedShape shape;
  shape.header_warps = header_warps(experts);
  const std::int64_t bases = experts * v.group.ranks * 4;
  shape.bases = bases <= kCounterBytes;
  shape.bytes =
      static_cast<std::size_t>(std::max(shape.header_warps * experts * 4, shape.bases ? bases : 0));
  return shape;
}

/// Whole block; begins the call, too: the headers of the destinations that are this block's. False:
/// the group has failed.
__device__ inline bool send_headers(const LatencyDispatchParameters& p, const RankFinder& ranks,
                                    LatencyCall& call, std::uint32_t* counters, int warps) {
  __shared__ HeaderMaker::Words words;
  const LatencyView& v = p.view;
  const auto blocks = static_cast<int>(gridDim.x);
  const int first = blocks - 1 - static_cast<int>(blockIdx.x);
  HeaderMaker header(p, ranks, counters, warps, words);
  bool stopped = false;
  if (threadIdx.x < 32) {
    stopped = open_latency_call(v, nullptr, call);
  } else {
    header.count(first);
  }
  if (!join_latency_call(v, stopped)) return false;
  const LatencyPlaces at{v, call.generation};
  for (int d = first; d < v.group.ranks; d += blocks) {
    if (d != first) {
      __syncthreads();
      header.count(d);
      __syncthreads();
    }
    if (call.open[d]) header.write(at, d);
  }
  __syncthreads();  // what follows has the same memory
  return true;
}

/// Whole block; begins the call, too. False: the group has failed.
template <class T, bool kQuantized>
__device__ bool send_half(const LatencyDispatchParameters& p, const RankFinder& ranks,
                          LatencyCall& call, std::uint32_t* counters, int warps) {
  const LatencyView& v = p.view;
  const auto blocks = static_cast<int>(gridDim.x), block = static_cast<int>(blockIdx.x);
  // Where there are blocks enough, those that make headers send no rows.
  const bool apart = blocks > 4 * v.group.ranks;
  const bool heads = blocks - 1 - block < v.group.ranks;
  if (heads) {
    if (!send_headers(p, ranks, call, counters, warps)) return false;
    if (apart) return true;
  }
  RowSender<T, kQuantized> sender(p, ranks, block, apart ? blocks - v.group.ranks : blocks);
  if (!heads && !begin_latency_call(v, nullptr, call)) return false;
  const LatencyPlaces at{v, call.generation};
  sender.send(at, call.open);
  if (block != 0) return true;
  if (threadIdx.x == 0) p.handle->generation = at.generation;
  for (int r = static_cast<int>(threadIdx.x); r < v.group.ranks; r += kLatencyThreads) {
    p.handle->sent[r] = call.open[r] ? 1 : 0;
  }
  for (int i = static_cast<int>(threadIdx.x); p.routes != nullptr && i < p.tokens * p.topk;
       i += kLatencyThreads) {
    p.routes[i] = route_id(p, i / p.topk, i % p.topk);
    if (p.own_weights != nullptr) p.own_weights[i] = p.weights[i];
  }
  return true;
}

template <class T, bool kQuantized>
__global__ void __launch_bounds__(kLatencyThreads, kLatencyBlocksPerSm)
    latency_dispatch_kernel(const __grid_constant__ LatencyDispatchParameters p,
                            const SharedShape shape) {
  extern __shared__ std::uint32_t scratch[];
  __shared__ LatencyCall call;
  __shared__ HeaderWords words;
  const LatencyView& v = p.view;
  const RankFinder ranks(v.placement);
  touch_view(v);
  for (int s = static_cast<int>(threadIdx.x); s < v.group.ranks; s += kLatencyThreads) {
    words.missing[s] = false;
  }
  await_kernel_before();
  let_next_kernel_come();
  const bool sends = p.halves != Halves::receive, receives = p.halves != Halves::send;
  if (sends) {
    if (!send_half<T, kQuantized>(p, ranks, call, scratch, shape.header_warps)) return;
  } else if (!begin_latency_call(v, p.handle, call)) {
    return;
  }
  const LatencyPlaces at{v, call.generation};
  note_latency_call(at, call, sends, receives);
  bool lost = false;
  const int experts = ranks.local_experts(v.group.rank);
  if (receives) {
    start_clock(call, p.waits);
    auto* numbers = shape.bases ? reinterpret_cast<std::int32_t*>(scratch) : nullptr;
    if (!await_headers(p, at, ranks, call, words, numbers)) return;
    if (!count_rows(p, at, call, experts, numbers)) return;
    FewReceiver<T, kQuantized> few{p, at, call, numbers, experts};
    RowReceiver<T, kQuantized> receiver{p, at, call, numbers, experts};
    const bool good = few.receive() && receiver.receive();
    if (__syncthreads_or(!good) != 0) return;
    lost = few.lost || receiver.lost;
  }
  if (end_latency_call(v, call, lost)) {
    clear_lost_rows(p, call, experts,
                    static_cast<std::size_t>(v.hidden) * (kQuantized ? 1 : sizeof(T)));
  }
}

using Kernel = void (*)(LatencyDispatchParameters, SharedShape);

Kernel kernel_of(Dtype dtype, LatencyFormat format) {
  const bool quantized = format != LatencyFormat::as_is;
  switch (dtype) {
    case Dtype::f32:
      return quantized ? latency_dispatch_kernel<float, true>
                       : latency_dispatch_kernel<float, false>;
    case Dtype::f16:
      return quantized ? latency_dispatch_kernel<Fp16, true>
                       : latency_dispatch_kernel<Bf16, false>;  // the same bytes
    case Dtype::bf16:
      return quantized ? latency_dispatch_kernel<Bf16, true> : latency_dispatch_kernel<Bf16, false>;
    default: return nullptr;
  }
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
  const Kernel kernel = kernel_of(parameters.view.dtype, parameters.format);
  if (kernel == nullptr || !fits_latency(parameters.view) || parameters.blocks < 1 ||
      parameters.tokens > parameters.view.capacity || parameters.topk > parameters.view.topk) {
    return cudaErrorInvalidValue;
  }
  LatencyDispatchParameters copy = parameters;
  SharedShape shape = make_shared_shape(parameters.view);
  void* arguments[] = {&copy, &shape};
  return launch(reinterpret_cast<const void*>(kernel),
                {static_cast<unsigned>(parameters.blocks), kLatencyThreads, shape.bytes}, arguments,
                stream, limits.bulk_copies);
}

cudaError_t load_latency_dispatch_kernels() {
  for (const Dtype dtype : {Dtype::f32, Dtype::f16, Dtype::bf16}) {
    for (const LatencyFormat format : {LatencyFormat::as_is, LatencyFormat::e4m3}) {
      const cudaError_t error =
          load_kernel(reinterpret_cast<const void*>(kernel_of(dtype, format)), kCounterBytes);
      if (error != cudaSuccess) return error;
    }
  }
  return cudaSuccess;
}

}  // namespace ferry::cuda
