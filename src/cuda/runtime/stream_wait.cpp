#include "cuda/runtime/stream_wait.hpp"

#include <atomic>
#include <chrono>
#include <memory>
#include <thread>

#include "cuda/runtime/runtime.hpp"
#include "fabric/cuda/driver.hpp"

namespace ferry::cuda {
namespace {

struct AwaitedWord {
  std::uint64_t* word;
  std::uint64_t value;
};

/// On a thread of the driver, where no CUDA call is allowed. Whoever stores the word lets go of all
/// waits when the group fails or ends.
void CUDART_CB poll_word(void* pointer) {
  const std::unique_ptr<AwaitedWord> awaited(static_cast<AwaitedWord*>(pointer));
  const std::atomic_ref word(*awaited->word);
  while (word.load(std::memory_order_acquire) < awaited->value) {
    std::this_thread::sleep_for(std::chrono::microseconds(20));
  }
}

}  // namespace

void wait_for_word(cudaStream_t stream, const std::uint64_t* word, std::uint64_t value) {
  const fabric::Driver& driver = fabric::driver();
  const CUresult result =
      driver.cuStreamWaitValue32(stream, reinterpret_cast<CUdeviceptr>(word),
                                 static_cast<cuuint32_t>(value), CU_STREAM_WAIT_VALUE_GEQ);
  if (result == CUDA_SUCCESS) return;
  if (result != CUDA_ERROR_NOT_SUPPORTED) check_driver(result, "cuStreamWaitValue32");
  auto awaited =
      std::make_unique<AwaitedWord>(AwaitedWord{const_cast<std::uint64_t*>(word), value});
  check(cudaLaunchHostFunc(stream, poll_word, awaited.get()), "cudaLaunchHostFunc");
  awaited.release();
}

}  // namespace ferry::cuda
