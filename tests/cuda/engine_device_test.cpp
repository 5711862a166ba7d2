// Threads of a process that never chose a GPU.
#include <cuda.h>
#include <gtest/gtest.h>
#include <sys/wait.h>
#include <unistd.h>

#include "cuda/runtime/runtime.hpp"
#include "fabric/cuda/driver.hpp"
#include "shared_ranks.hpp"

namespace ferry::test {
namespace {

/// In a process that has not used CUDA: 0, or which of these steps went wrong.
int visit_second_gpu() {
  int sum = 0;
  {
    const cuda::OnDevice here(1);
    void* memory = nullptr;
    int device = -1;
    if (cudaGetDevice(&device) != cudaSuccess || device != 1) return 1;
    if (cudaMalloc(&memory, 4) != cudaSuccess || cudaMemset(memory, 7, 4) != cudaSuccess) return 2;
    if (cudaMemcpy(&sum, memory, 4, cudaMemcpyDeviceToHost) != cudaSuccess) return 3;
    cudaPointerAttributes attributes{};
    if (cudaPointerGetAttributes(&attributes, memory) != cudaSuccess) return 4;
    if (attributes.device != 1 || sum != 0x07070707) return 5;
  }
  int device = -1;
  if (cudaGetDevice(&device) != cudaSuccess || device != 0) return 6;
  unsigned flags = 0;
  int active = -1;
  const CUresult result = fabric::driver().cuDevicePrimaryCtxGetState(0, &flags, &active);
  if (result != CUDA_SUCCESS) return 7;
  return active == 0 ? 0 : 8;  // nothing was made on the first GPU
}

TEST(EngineDeviceTest, VisitsAGpuAndLeavesNothingOnTheFirst) {
  if (gpu_count() < 2) GTEST_SKIP() << "one GPU";
  const pid_t child = fork();
  if (child == 0) _exit(visit_second_gpu());
  int status = 0;
  ASSERT_EQ(waitpid(child, &status, 0), child);
  ASSERT_TRUE(WIFEXITED(status));
  EXPECT_EQ(WEXITSTATUS(status), 0) << "the step that went wrong";
}

}  // namespace
}  // namespace ferry::test
