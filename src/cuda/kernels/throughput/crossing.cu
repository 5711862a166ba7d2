// Rows into and out of the staging buffer between domains; see crossing.hpp.
#include "cuda/kernels/throughput/crossing.hpp"

#include "cuda/kernels/base/accumulate.cuh"
#include "cuda/kernels/base/load.hpp"
#include "cuda/kernels/base/quantize.cuh"
#include "cuda/kernels/base/wait.cuh"
#include "cuda/kernels/throughput/kernels.hpp"

namespace ferry::cuda {
namespace {

using namespace device;
using protocol::Command;
using protocol::CommandSlot;

constexpr int kThreads = 512;
constexpr int kWarps = kThreads / 32;

/// A row of a staging buffer: its block, and where that begins.
struct StagingRow {
  std::int64_t row = 0;   ///< of the block
  std::int64_t rows = 0;  ///< of the block, in all
  std::size_t base = 0;
};

__device__ StagingRow find_row(const CrossingLayout& layout, const StagingBlocks& blocks,
                               std::int64_t row) {
  std::size_t base = 0;
  int block = 0;
#pragma unroll 1
  while (block + 1 < blocks.count && row >= blocks.first[block + 1]) {
    base += layout.block_bytes(blocks.first[block + 1] - blocks.first[block]);
    ++block;
  }
  return {row - blocks.first[block], blocks.first[block + 1] - blocks.first[block], base};
}

/// `lane` of `lanes` threads copies its share; all is a multiple of 16 bytes and aligned to that.
__device__ __forceinline__ void copy_row(std::byte* to, const std::byte* from, std::size_t bytes,
                                         int lane, int lanes) {
  const auto count = static_cast<std::int64_t>(bytes / 16);
#pragma unroll 4
  for (std::int64_t i = lane; i < count; i += lanes) {
    reinterpret_cast<uint4*>(to)[i] = reinterpret_cast<const uint4*>(from)[i];
  }
}

/// Whole warp: row `token` of `from` to three places.
__device__ void copy_parts(const CrossingLayout& layout, const CrossingSource& from,
                           std::int64_t token, std::byte* row, float* scales, float* weights) {
  const int lane = static_cast<int>(threadIdx.x % 32);
  copy_row(row, from.rows + token * static_cast<std::int64_t>(layout.row_bytes), layout.row_bytes,
           lane, 32);
  const auto columns = static_cast<std::int64_t>(layout.scale_bytes / sizeof(float));
  for (std::int64_t c = lane; c < columns; c += 32) {
    scales[c] = from.scales[token * from.scale_token_stride + c * from.scale_column_stride];
  }
  const auto topk = static_cast<std::int64_t>(layout.weight_bytes / sizeof(float));
  for (std::int64_t k = lane; k < topk; k += 32) weights[k] = from.weights[token * topk + k];
}

__global__ void __launch_bounds__(kThreads, 1)
    pack_kernel(const __grid_constant__ PackParameters p) {
  const auto post = [&](std::uint64_t number, const Command& command) {
    // As CommandRing::post; there is room, or this kernel would not have been started.
    CommandSlot& slot = p.ring[number % p.ring_size];
    slot.command = command;
    store_release(&slot.number, number + 1);
  };
  if (p.first_chunk == 0 && blockIdx.x == 0 && threadIdx.x == 0) {
    post(p.first_command, {Command::Kind::begin});
  }
  for (std::int64_t chunk = p.first_chunk + blockIdx.x; chunk < p.end_chunk; chunk += gridDim.x) {
    const auto [block, in_block] = chunk_in_turn(p.layout, p.blocks.first, p.blocks.count, chunk);
    std::size_t base = 0;
#pragma unroll 1
    for (int b = 0; b < block; ++b) {
      base += p.layout.block_bytes(p.blocks.first[b + 1] - p.blocks.first[b]);
    }
    const std::int64_t rows = p.blocks.first[block + 1] - p.blocks.first[block];
    const std::int64_t first = in_block * p.layout.chunk_rows;
    const std::int64_t count = p.layout.rows_of(rows, in_block);
    std::byte* to = p.staging + base;
    for (std::int64_t i = threadIdx.x / 32; i < count; i += kWarps) {
      const CrossingPlace place = crossing_place(p.layout, rows, first + i);
      copy_parts(p.layout, p.from, p.index[p.blocks.first[block] + first + i], to + place.row,
                 reinterpret_cast<float*>(to + place.scales),
                 reinterpret_cast<float*>(to + place.weights));
    }
    fence_system();
    __syncthreads();
    if (threadIdx.x != 0) continue;
    const std::size_t begin = static_cast<std::size_t>(in_block) * p.layout.chunk_bytes;
    post(p.first_command + 1 + static_cast<std::uint64_t>(chunk),
         {Command::Kind::put, static_cast<std::uint64_t>(block), base + begin, begin,
          static_cast<std::size_t>(count) * p.layout.each()});
  }
}

/// Whole warp: row `from` of a source becomes row `to`.
__device__ void copy_to(const CrossingLayout& layout, const CrossingSource& source,
                        std::int64_t from, const CrossingRows& rows, std::int64_t to) {
  copy_parts(layout, source, from, rows.rows + to * static_cast<std::int64_t>(layout.row_bytes),
             rows.scales + to * static_cast<std::int64_t>(layout.scale_bytes / sizeof(float)),
             rows.weights + to * static_cast<std::int64_t>(layout.weight_bytes / sizeof(float)));
}

__global__ void __launch_bounds__(kThreads, 1)
    gather_kernel(const __grid_constant__ GatherParameters p) {
  const std::int64_t stride = std::int64_t{gridDim.x} * kWarps;
  for (std::int64_t v = std::int64_t{blockIdx.x} * kWarps + threadIdx.x / 32; v < p.count;
       v += stride) {
    copy_to(p.layout, p.own, p.from[v], p.to, v);
  }
}

__global__ void __launch_bounds__(kThreads, 1)
    unpack_kernel(const __grid_constant__ UnpackParameters p) {
  const std::int64_t stride = std::int64_t{gridDim.x} * kWarps;
  const std::byte* block = p.staging;
#pragma unroll 1
  for (int b = 0; b < p.blocks.count; ++b) {
    const std::int64_t first = p.blocks.first[b], rows = p.blocks.first[b + 1] - first;
    const std::int64_t end = rows_after(p.layout, rows, p.portion, p.portions);
    for (std::int64_t i = rows_after(p.layout, rows, p.portion - 1, p.portions) +
                          std::int64_t{blockIdx.x} * kWarps + threadIdx.x / 32;
         i < end; i += stride) {
      const CrossingPlace place = crossing_place(p.layout, rows, i);
      const CrossingSource one{block + place.row,
                               reinterpret_cast<const float*>(block + place.scales), 0, 1,
                               reinterpret_cast<const float*>(block + place.weights)};
      copy_to(p.layout, one, 0, p.to, first + i);
    }
    block += p.layout.block_bytes(rows);
  }
}

__global__ void __launch_bounds__(kThreads, 1)
    shift_destinations_kernel(const __grid_constant__ ShiftDestinationsParameters p) {
  const std::int64_t thread = std::int64_t{blockIdx.x} * kThreads + threadIdx.x;
  if (thread < p.ranks) p.peer_row[thread] = 0;
  auto* destinations = static_cast<DeviceDestination*>(p.destinations);
  for (std::int64_t i = thread; i < p.count * p.destination_count;
       i += std::int64_t{gridDim.x} * kThreads) {
    const std::int64_t token = i / p.destination_count;
    int source = 0;
#pragma unroll 1
    while (source + 1 < p.sources && token >= p.first[source + 1]) ++source;
    DeviceDestination destination = destinations[i];
    if (destination.rank < 0) continue;
    destination.row += p.shift[source * p.ranks + destination.rank];
    destinations[i] = destination;
  }
}

template <class T>
__global__ void __launch_bounds__(kThreads, 1)
    add_domains_kernel(const __grid_constant__ AddDomainsParameters p) {
  const int lane = static_cast<int>(threadIdx.x % 32);
  const auto vectors = static_cast<std::int64_t>(p.layout.row_bytes / 16);
  const auto topk = static_cast<std::int64_t>(p.layout.weight_bytes / sizeof(float));
  const std::int64_t stride = std::int64_t{gridDim.x} * kWarps;
  for (std::int64_t t = p.begin + std::int64_t{blockIdx.x} * kWarps + threadIdx.x / 32; t < p.end;
       t += stride) {
    const std::int64_t begin = p.offset[t], end = p.offset[t + 1];
    const auto place_of = [&](std::int32_t part, const float*& weights) {
      if (part >= 0) {
        weights = p.weights + part * topk;
        return p.rows + part * static_cast<std::int64_t>(p.layout.row_bytes);
      }
      const StagingRow at = find_row(p.layout, p.blocks, -1 - static_cast<std::int64_t>(part));
      const CrossingPlace place = crossing_place(p.layout, at.rows, at.row);
      weights = reinterpret_cast<const float*>(p.staging + at.base + place.weights);
      return p.staging + at.base + place.row;
    };
    const std::int64_t row = t * static_cast<std::int64_t>(p.layout.row_bytes);
    // Lane e knows where part e is; few tokens have more parts than a warp has lanes.
    const auto count = static_cast<int>(end - begin);
    const float* beside = nullptr;
    std::uint64_t mine = 0;
    if (lane < count) {
      mine = reinterpret_cast<std::uint64_t>(place_of(p.parts[begin + lane], beside));
    }
    for (std::int64_t base = 0; base < vectors; base += 32) {
      const std::int64_t i = base + lane;
      float acc[kPerVector<T>] = {};
#pragma unroll 1
      for (int e = 0; e < count; ++e) {
        const auto* from = reinterpret_cast<const std::byte*>(__shfl_sync(~0u, mine, e & 31));
        if (e >= 32) from = place_of(p.parts[begin + e], beside);
        if (i < vectors) add_vector<T, false>(acc, reinterpret_cast<const uint4*>(from)[i], 0.0f);
      }
      if (i >= vectors) continue;
      for (const std::byte* bias : {p.bias0, p.bias1}) {
        if (bias == nullptr) continue;
        add_vector<T, false>(acc, reinterpret_cast<const uint4*>(bias + row)[i], 0.0f);
      }
      reinterpret_cast<uint4*>(p.out + row)[i] = round_vector<T>(acc);
    }
    if (p.out_weights == nullptr) continue;
    for (std::int64_t k = lane; k < topk; k += 32) {
      float acc = 0.0f;
#pragma unroll 1
      for (std::int64_t e = begin; e < end; ++e) {
        const float* weights = nullptr;
        (void)place_of(p.parts[e], weights);
        acc = __fadd_rn(acc, weights[k]);
      }
      p.out_weights[t * topk + k] = acc;
    }
  }
}

template <class T>
__global__ void __launch_bounds__(kThreads, 1)
    quantize_rows_kernel(const __grid_constant__ QuantizeRowsParameters p) {
  using Part = LanePart<T>;
  const std::int64_t blocks = (p.columns + kBlockChannels - 1) / kBlockChannels;
  const std::int64_t stride = std::int64_t{gridDim.x} * kWarps;
  for (std::int64_t t = std::int64_t{blockIdx.x} * kWarps + threadIdx.x / 32; t < p.tokens;
       t += stride) {
    const std::byte* row = p.x + t * p.columns * static_cast<std::int64_t>(sizeof(T));
    for (std::int64_t first = 0; first < p.columns; first += kStepChannels) {
      Part part;
#pragma unroll
      for (int v = 0; v < Part::kVectors; ++v) {
        const std::int64_t channel = first + Part::channel(v);
        part.vectors[v] = {};
        if (channel < p.columns) {
          part.vectors[v] =
              *reinterpret_cast<const uint4*>(row + channel * static_cast<std::int64_t>(sizeof(T)));
        }
      }
      part.quantize(p.round_scale);
#pragma unroll
      for (int v = 0; v < Part::kVectors; ++v) {
        const std::int64_t channel = first + Part::channel(v);
        if (channel < p.columns) part.store(p.codes + t * p.columns + channel, v);
      }
      const std::int64_t channel = first + Part::channel(0);
      if (threadIdx.x % kBlockLanes == 0 && channel < p.columns) {
        p.scales[t * blocks + channel / kBlockChannels] = part.scale;
      }
    }
  }
}

/// Enough blocks for so many items of a warp, or of a block.
unsigned grid(std::int64_t items, std::int64_t of_a_block, int num_sms) {
  const std::int64_t blocks = (items + of_a_block - 1) / of_a_block;
  return static_cast<unsigned>(blocks < 1 ? 1 : blocks > 2 * num_sms ? 2 * num_sms : blocks);
}

using AddDomains = void (*)(AddDomainsParameters);
AddDomains add_kernel_for(Dtype dtype) {
  switch (dtype) {
    case Dtype::f32: return add_domains_kernel<float>;
    case Dtype::bf16: return add_domains_kernel<Bf16>;
    case Dtype::f16: return add_domains_kernel<Fp16>;
    default: return nullptr;
  }
}
using QuantizeRows = void (*)(QuantizeRowsParameters);
QuantizeRows quantize_kernel_for(Dtype dtype) {
  switch (dtype) {
    case Dtype::f32: return quantize_rows_kernel<float>;
    case Dtype::bf16: return quantize_rows_kernel<Bf16>;
    case Dtype::f16: return quantize_rows_kernel<Fp16>;
    default: return nullptr;
  }
}

}  // namespace

cudaError_t launch_pack(const PackParameters& parameters, cudaStream_t stream) {
  const unsigned blocks =
      grid(parameters.end_chunk - parameters.first_chunk, 1, parameters.num_sms);
  pack_kernel<<<blocks, kThreads, 0, stream>>>(parameters);
  return cudaGetLastError();
}

cudaError_t launch_gather(const GatherParameters& parameters, cudaStream_t stream) {
  if (parameters.count == 0) return cudaSuccess;
  gather_kernel<<<grid(parameters.count, kWarps, parameters.num_sms), kThreads, 0, stream>>>(
      parameters);
  return cudaGetLastError();
}

cudaError_t launch_unpack(const UnpackParameters& parameters, cudaStream_t stream) {
  if (parameters.blocks.count == 0) return cudaSuccess;
  unpack_kernel<<<grid(parameters.num_sms, 1, parameters.num_sms), kThreads, 0, stream>>>(
      parameters);
  return cudaGetLastError();
}

cudaError_t launch_shift_destinations(const ShiftDestinationsParameters& parameters,
                                      cudaStream_t stream) {
  constexpr int kBlocks = 64;
  shift_destinations_kernel<<<kBlocks, kThreads, 0, stream>>>(parameters);
  return cudaGetLastError();
}

cudaError_t launch_add_domains(const AddDomainsParameters& parameters, cudaStream_t stream) {
  const AddDomains kernel = add_kernel_for(parameters.dtype);
  if (kernel == nullptr) return cudaErrorInvalidValue;
  const std::int64_t tokens = parameters.end - parameters.begin;
  if (tokens <= 0) return cudaSuccess;
  kernel<<<grid(tokens, kWarps, parameters.num_sms), kThreads, 0, stream>>>(parameters);
  return cudaGetLastError();
}

cudaError_t launch_quantize_rows(const QuantizeRowsParameters& parameters, cudaStream_t stream) {
  const QuantizeRows kernel = quantize_kernel_for(parameters.dtype);
  if (kernel == nullptr) return cudaErrorInvalidValue;
  if (parameters.tokens == 0) return cudaSuccess;
  kernel<<<grid(parameters.tokens, kWarps, parameters.num_sms), kThreads, 0, stream>>>(parameters);
  return cudaGetLastError();
}

cudaError_t load_crossing_kernels() {
  const void* const kernels[] = {reinterpret_cast<const void*>(&pack_kernel),
                                 reinterpret_cast<const void*>(&gather_kernel),
                                 reinterpret_cast<const void*>(&unpack_kernel),
                                 reinterpret_cast<const void*>(&shift_destinations_kernel),
                                 reinterpret_cast<const void*>(add_kernel_for(Dtype::f32)),
                                 reinterpret_cast<const void*>(add_kernel_for(Dtype::bf16)),
                                 reinterpret_cast<const void*>(add_kernel_for(Dtype::f16)),
                                 reinterpret_cast<const void*>(quantize_kernel_for(Dtype::f32)),
                                 reinterpret_cast<const void*>(quantize_kernel_for(Dtype::bf16)),
                                 reinterpret_cast<const void*>(quantize_kernel_for(Dtype::f16))};
  for (const void* kernel : kernels) {
    if (const cudaError_t error = load_kernel(kernel, 0); error != cudaSuccess) return error;
  }
  return cudaSuccess;
}

}  // namespace ferry::cuda
