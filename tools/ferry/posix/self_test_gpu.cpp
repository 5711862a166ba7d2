// GPUs that ranks may use, and memory of theirs for the self-test.
#include <cuda_runtime_api.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <stdexcept>

#include "doctor/machine.hpp"
#include "doctor/self_test.hpp"

namespace ferry::cli {
namespace {

void need_cuda(cudaError_t result, const char* call) {
  if (result == cudaSuccess) return;
  throw std::runtime_error(std::string(call) + ": " + cudaGetErrorName(result));
}

}  // namespace

int gpu_count() {
  const pid_t child = fork();
  if (child == 0) {
    int count = 0;
    _exit(cudaGetDeviceCount(&count) == cudaSuccess ? std::min(count, 100) : 0);
  }
  int status = 0;
  if (child < 0 || waitpid(child, &status, 0) != child) return 0;
  return WIFEXITED(status) ? WEXITSTATUS(status) : 0;
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
