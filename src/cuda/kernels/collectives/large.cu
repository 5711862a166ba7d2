// Collectives of large tensors. When the tensors that peers touch lie in registered memory on all
// ranks, a reduction pulls this rank's share of all of them, adds in ascending order of the ranks
// and stores the result to all; a copy stores every piece where it belongs. Both end when all ranks
// have said that they are done. Else, and where the call pushes, pieces pass through the inboxes
// (inbox.cuh).
#include "cuda/kernels/base/launch.hpp"
#include "cuda/kernels/base/load.hpp"
#include "cuda/kernels/collectives/call.cuh"
#include "cuda/kernels/collectives/collective.hpp"
#include "cuda/kernels/collectives/direct.cuh"
#include "cuda/kernels/collectives/inbox.cuh"

namespace ferry::cuda {
namespace {

using namespace device;

constexpr int kThreads = 256;  // with more, vectors on their way do not fit into the registers

template <class T>
__device__ void reduce_direct(const CollectiveParameters& p, const CollectivePeers& peers) {
  const int ranks = p.group.ranks;
  const std::int64_t at = p.to.offset(p.group.rank), bytes = p.to.size(p.group.rank, ranks);
  bool aligned = p.spreads || is_aligned(p.out);  // the peers' tensors are
  aligned = aligned && at % kVectorBytes == 0;
  reduce_vectors<T, 6>(
      p.op, ranks, grid_walk(), bytes, aligned,
      [&](auto whole, int rank, std::int64_t v) {
        return load_as<decltype(whole)::value>(peers.tensor[rank] + at, bytes, v);
      },
      [&](auto whole, std::int64_t v, const uint4& vector) {
        constexpr bool kWhole = decltype(whole)::value;
        if (!p.spreads) {
          store_as<kWhole>(p.out, bytes, v, vector);
          return;
        }
#pragma unroll 1
        for (int i = 0; i < ranks; ++i) {
          store_as<kWhole>(peers.tensor[peer_after(p.group, i)] + at, bytes, v, vector);
        }
      });
}

__device__ void copy_piece(const std::byte* from, std::byte* to, std::int64_t bytes) {
  if (from != to) copy_vectors(grid_walk(), from, to, bytes);
}

/// Its own piece, which no peer touches.
__device__ void copy_own(const CollectiveParameters& p) {
  const int self = p.group.rank;
  copy_piece(p.x + p.to.offset(self), p.out + p.from.offset(self),
             p.from.size(self, p.group.ranks));
}

__device__ void copy_direct(const CollectiveParameters& p, const CollectivePeers& peers) {
#pragma unroll 1
  for (int i = 1; i < p.group.ranks; ++i) {
    const int peer = peer_after(p.group, i);
    copy_piece(p.x + p.to.offset(peer), peers.tensor[peer] + peers.at[peer],
               p.to.size(peer, p.group.ranks));
  }
}

/// T void: copies.
template <class T>
__global__ void __launch_bounds__(kThreads, 1)
    large_kernel(const __grid_constant__ CollectiveParameters p) {
  __shared__ CollectivePeers peers;
  std::uint64_t generation;
  bool direct;
  if (!enter(p, peers, generation, direct)) return;
  if constexpr (std::is_void_v<T>) {
    if (direct) copy_direct(p, peers);
    copy_own(p);
    if (!direct && !copy_staged(p, peers, generation)) return;
  } else {
    if (direct && !p.pushes)
      reduce_direct<T>(p, peers);
    else if (!reduce_staged<T>(p, peers, generation, direct))
      return;
  }
  if (direct)
    end_direct(p, generation);
  else
    end_collective(p, generation);
}

using Kernel = void (*)(CollectiveParameters);
Kernel kernel_for(bool reduces, Dtype dtype) {
  if (!reduces) return large_kernel<void>;
  switch (dtype) {
    case Dtype::f32: return large_kernel<float>;
    case Dtype::bf16: return large_kernel<Bf16>;
    case Dtype::f16: return large_kernel<Fp16>;
    case Dtype::i32: return large_kernel<std::int32_t>;
    case Dtype::i64: return large_kernel<std::int64_t>;
    case Dtype::u8: return large_kernel<std::uint8_t>;
    default: return nullptr;
  }
}

}  // namespace

cudaError_t launch_large(const CollectiveParameters& parameters, cudaStream_t stream) {
  const Kernel kernel = kernel_for(parameters.reduces, parameters.dtype);
  const auto most = static_cast<std::int64_t>(parameters.layout.round_bytes);
  if (kernel == nullptr || parameters.blocks < 1 || parameters.blocks > kMaxBlocks ||
      parameters.chunk < 1 || parameters.chunk % static_cast<std::int64_t>(kInboxUnit) != 0 ||
      parameters.blocks * parameters.chunk > most) {
    return cudaErrorInvalidValue;
  }
  CollectiveParameters copy = parameters;
  void* arguments[] = {&copy};
  return launch(reinterpret_cast<const void*>(kernel),
                {static_cast<unsigned>(parameters.blocks), kThreads, 0}, arguments, stream, false);
}

cudaError_t load_large_kernels() {
  for (const Dtype dtype :
       {Dtype::f32, Dtype::bf16, Dtype::f16, Dtype::i32, Dtype::i64, Dtype::u8}) {
    const auto* kernel = reinterpret_cast<const void*>(kernel_for(true, dtype));
    if (const cudaError_t error = load_kernel(kernel, 0); error != cudaSuccess) return error;
  }
  return load_kernel(reinterpret_cast<const void*>(kernel_for(false, Dtype::u8)), 0);
}

cudaError_t load_collective_kernels() {
  for (const auto load : {load_one_shot_kernels, load_large_kernels, load_convert_kernels,
                          load_rows_kernels, load_transfer_kernels}) {
    if (const cudaError_t error = load(); error != cudaSuccess) return error;
  }
  return cudaSuccess;
}

}  // namespace ferry::cuda
