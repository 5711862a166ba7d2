#include <cuda_runtime.h>

#include "touch.hpp"

namespace ferry::test {
namespace {

__global__ void store_words(unsigned long long* to, unsigned long long value, std::size_t words) {
  for (std::size_t i = threadIdx.x; i < words; i += blockDim.x) to[i] = value + i;
}

/// The first word that is not value + i * step; `words` if all are.
__global__ void find_wrong(const unsigned long long* from, unsigned long long value,
                           unsigned long long step, std::size_t words, unsigned long long* first) {
  for (std::size_t i = threadIdx.x + std::size_t{blockIdx.x} * blockDim.x; i < words;
       i += std::size_t{blockDim.x} * gridDim.x) {
    if (from[i] != value + i * step) atomicMin(first, static_cast<unsigned long long>(i));
  }
}

__device__ unsigned long long now_ns() {
  unsigned long long value;
  asm volatile("mov.u64 %0, %%globaltimer;" : "=l"(value));
  return value;
}

__global__ void wait_and_add(unsigned long long wait_ns, const std::uint32_t* from,
                             std::size_t words, std::uint32_t* sum) {
  const unsigned long long start = now_ns();
  while (now_ns() - start < wait_ns) {
  }
  std::uint32_t total = 0;
  for (std::size_t i = 0; i < words; ++i)
    total += static_cast<const volatile std::uint32_t*>(from)[i];
  if (sum != nullptr) *sum = total;
}

__global__ void __launch_bounds__(1024) wait_for_end(const volatile std::uint32_t* end) {
  const unsigned long long start = now_ns();
  while (*end == 0 && now_ns() - start < 10000000000ull) {
  }
}

}  // namespace

void read_later(cudaStream_t stream, std::chrono::milliseconds wait, const void* from,
                std::size_t words, std::uint32_t* sum) {
  wait_and_add<<<1, 1, 0, stream>>>(static_cast<unsigned long long>(wait.count()) * 1000000ull,
                                    static_cast<const std::uint32_t*>(from), words, sum);
}

void take_all_sms(cudaStream_t stream, const volatile std::uint32_t* end) {
  int device = 0, num_sms = 0;
  cudaGetDevice(&device);
  cudaDeviceGetAttribute(&num_sms, cudaDevAttrMultiProcessorCount, device);
  wait_for_end<<<2 * num_sms, 1024, 0, stream>>>(end);
}

std::string store(std::byte* to, std::uint64_t value, std::size_t words) {
  store_words<<<1, 256>>>(reinterpret_cast<unsigned long long*>(to), value, words);
  cudaError_t error = cudaGetLastError();
  if (error == cudaSuccess) error = cudaDeviceSynchronize();
  return error == cudaSuccess ? "" : cudaGetErrorString(error);
}

std::string expect(const std::byte* from, std::uint64_t value, std::uint64_t step,
                   std::size_t words) {
  unsigned long long* first = nullptr;
  unsigned long long seen = words;
  cudaError_t error = cudaMalloc(&first, sizeof *first);
  if (error == cudaSuccess) error = cudaMemcpy(first, &seen, sizeof seen, cudaMemcpyHostToDevice);
  if (error == cudaSuccess) {
    find_wrong<<<64, 256>>>(reinterpret_cast<const unsigned long long*>(from), value, step, words,
                            first);
    error = cudaGetLastError();
  }
  if (error == cudaSuccess) error = cudaMemcpy(&seen, first, sizeof seen, cudaMemcpyDeviceToHost);
  cudaFree(first);
  if (error != cudaSuccess) return cudaGetErrorString(error);
  return seen == words ? "" : "word " + std::to_string(seen) + " is wrong";
}

int kernels_made_for() {
  cudaFuncAttributes attributes{};
  if (cudaFuncGetAttributes(&attributes, wait_for_end) != cudaSuccess) return -1;
  return attributes.ptxVersion;
}

}  // namespace ferry::test
