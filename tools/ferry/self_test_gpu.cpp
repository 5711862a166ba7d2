// Memory of GPUs for the self-test.
#include <cuda_runtime_api.h>

#include <stdexcept>

#include "self_test.hpp"

namespace ferry::cli {
namespace {

void need(cudaError_t result, const char* call) {
  if (result == cudaSuccess) return;
  throw std::runtime_error(std::string(call) + ": " + cudaGetErrorName(result));
}

}  // namespace

std::shared_ptr<void> on_gpu(const void* values, std::size_t bytes, int gpu) {
  need(cudaSetDevice(gpu), "cudaSetDevice");
  void* data = nullptr;
  need(cudaMalloc(&data, bytes), "cudaMalloc");
  std::shared_ptr<void> owner(data, [](void* old) { cudaFree(old); });
  need(cudaMemcpy(data, values, bytes, cudaMemcpyDefault), "cudaMemcpy");
  return owner;
}

void from_gpu(void* to, const void* from, std::size_t bytes, int gpu) {
  need(cudaSetDevice(gpu), "cudaSetDevice");
  need(cudaMemcpy(to, from, bytes, cudaMemcpyDefault), "cudaMemcpy");
}

}  // namespace ferry::cli
