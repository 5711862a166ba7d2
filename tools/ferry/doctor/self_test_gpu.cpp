// GPUs that ranks may use, and memory of theirs for the self-test.
#include <cuda_runtime_api.h>

#include <algorithm>
#include <stdexcept>

#include "doctor/machine.hpp"
#include "doctor/self_test.hpp"
#include "platform/posix/process_group.hpp"

namespace ferry::cli {
namespace {

void need_cuda(cudaError_t result, const char* call) {
  if (result == cudaSuccess) return;
  throw std::runtime_error(std::string(call) + ": " + cudaGetErrorName(result));
}

}  // namespace

int gpu_count() {
  const ProcessEnd asked = reap(fork_process([] {
    int count = 0;
    return cudaGetDeviceCount(&count) == cudaSuccess ? std::min(count, 100) : 0;
  }));
  return asked.signal == 0 ? asked.code : 0;
}

std::shared_ptr<void> on_gpu(const void* values, std::size_t bytes, int gpu) {
  need_cuda(cudaSetDevice(gpu), "cudaSetDevice");
  void* data = nullptr;
  need_cuda(cudaMalloc(&data, bytes), "cudaMalloc");
  std::shared_ptr<void> owner(data, [](void* old) { cudaFree(old); });
  need_cuda(cudaMemcpy(data, values, bytes, cudaMemcpyDefault), "cudaMemcpy");
  return owner;
}

void from_gpu(void* to, const void* from, std::size_t bytes, int gpu) {
  need_cuda(cudaSetDevice(gpu), "cudaSetDevice");
  need_cuda(cudaMemcpy(to, from, bytes, cudaMemcpyDefault), "cudaMemcpy");
}

}  // namespace ferry::cli
