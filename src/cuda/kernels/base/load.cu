// Loading every kernel before the first call, and what the device allows them.
#include <atomic>
#include <cstdint>

#include "cuda/kernels/base/load.hpp"

namespace ferry::cuda {

namespace {

__global__ void probe_kernel() {}

cudaError_t look_up(int device, KernelLimits& limits) {
  cudaFuncAttributes code{};
  cudaError_t error = cudaFuncGetAttributes(&code, probe_kernel);
  if (error != cudaSuccess) return error;
  // The PTX version tells the paths that were compiled; a binary may have been made from older PTX.
  limits.bulk_copies = code.ptxVersion >= 90;
  error =
      cudaDeviceGetAttribute(&limits.shared_bytes, cudaDevAttrMaxSharedMemoryPerBlockOptin, device);
  if (error != cudaSuccess) return error;
  return cudaDeviceGetAttribute(&limits.num_sms, cudaDevAttrMultiProcessorCount, device);
}

std::uint64_t pack(const KernelLimits& limits) {
  return std::uint64_t{1} << 63 | std::uint64_t{limits.bulk_copies} << 62 |
         static_cast<std::uint64_t>(limits.num_sms) << 32 |
         static_cast<std::uint64_t>(limits.shared_bytes);
}

}  // namespace

cudaError_t kernel_limits(KernelLimits& limits) {
  // Facts about the hardware: the same for every group of the process.
  constexpr int kDevices = 64;
  static std::atomic<std::uint64_t> known[kDevices] = {};
  int device = 0;
  const cudaError_t error = cudaGetDevice(&device);
  if (error != cudaSuccess) return error;
  const std::uint64_t word = device < kDevices ? known[device].load(std::memory_order_relaxed) : 0;
  if (word == 0) {
    const cudaError_t found = look_up(device, limits);
    if (found == cudaSuccess && device < kDevices) {
      known[device].store(pack(limits), std::memory_order_relaxed);
    }
    return found;
  }
  limits.bulk_copies = (word >> 62 & 1) != 0;
  limits.num_sms = static_cast<int>(word >> 32 & 0xffff);
  limits.shared_bytes = static_cast<int>(word & 0xffffffff);
  return cudaSuccess;
}

cudaError_t load_kernel(const void* kernel, int shared_bytes) {
  cudaFuncAttributes code{};
  const cudaError_t error = cudaFuncGetAttributes(&code, kernel);  // this loads it
  if (error != cudaSuccess || shared_bytes == 0) return error;
  return cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, shared_bytes);
}

cudaError_t load_throughput_kernels() {
  cudaError_t (*const loaders[])() = {
      load_plan_kernels,    load_dispatch_kernels,     load_routes_kernels,  load_barrier_kernels,
      load_combine_kernels, load_expert_major_kernels, load_crossing_kernels};
  for (const auto load : loaders) {
    const cudaError_t error = load();
    if (error != cudaSuccess) return error;
  }
  return cudaSuccess;
}

}  // namespace ferry::cuda
