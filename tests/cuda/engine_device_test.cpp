// Threads of a process that never chose a GPU; how the ranks of a test may end.
#include <cuda.h>
#include <gtest/gtest.h>
#include <signal.h>
#include <sys/wait.h>
#include <unistd.h>

#include <exception>
#include <stdexcept>

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

/// Needs no GPU.
TEST(SharedRanksTest, SayHowTheirProcessesEnded) {
  testing::internal::CaptureStderr();
  const auto problems = run_ranks(6, 1, [](Bootstrap& bootstrap) {
    switch (bootstrap.rank()) {
      case 0: return;
      case 1: throw std::runtime_error("thrown");
      case 2: _exit(3);
      case 3: raise(SIGKILL); break;
      case 4: raise(SIGSEGV); break;
      default: std::terminate();
    }
  });
  const std::string told = testing::internal::GetCapturedStderr();
  EXPECT_NE(told.find("ended by a signal; it was in\n"), std::string::npos) << told;
  EXPECT_NE(told.find("libc.so"), std::string::npos) << told;  // which raised it
  const std::string ended = ": its process ended before it did: ";
  const std::vector<std::string> expected = {
      "rank 1: thrown", "rank 2" + ended + "exit status 3", "rank 3" + ended + "signal 9 (Killed)",
      "rank 4" + ended + "signal 11 (Segmentation fault)", "rank 5" + ended + "signal 6 (Aborted)"};
  EXPECT_EQ(problems, expected);
}

}  // namespace
}  // namespace ferry::test
