#include "cuda/runtime/stream_wait.hpp"

#include <atomic>
#include <chrono>
#include <memory>
#include <thread>

#include "cuda/runtime/runtime.hpp"
#include "fabric/cuda/driver.hpp"

namespace ferry::cuda {
namespace {

struct WordAndValue {
  std::uint64_t* word;
  std::uint64_t value;
};

/// On a thread of the driver, where no CUDA call is allowed. Whoever stores the word lets go of all
/// waits when the group fails or ends.
void CUDART_CB poll_word(void* pointer) {
  const std::unique_ptr<WordAndValue> awaited(static_cast<WordAndValue*>(pointer));
  const std::atomic_ref word(*awaited->word);
  while (word.load(std::memory_order_acquire) < awaited->value) {
    std::this_thread::sleep_for(std::chrono::microseconds(20));
  }
}

void CUDART_CB raise_word(void* pointer) {
  const std::unique_ptr<WordAndValue> told(static_cast<WordAndValue*>(pointer));
  std::atomic_ref(*told->word).store(told->value, std::memory_order_release);
}

/// For drivers without the memory operation.
void call_host(cudaStream_t stream, cudaHostFn_t function, WordAndValue of) {
  auto kept = std::make_unique<WordAndValue>(of);
  check(cudaLaunchHostFunc(stream, function, kept.get()), "cudaLaunchHostFunc");
  kept.release();
}

}  // namespace

void wait_for_word(cudaStream_t stream, const std::uint64_t* word, std::uint64_t value) {
  const fabric::Driver& driver = fabric::driver();
  const CUresult result =
      driver.cuStreamWaitValue32(stream, reinterpret_cast<CUdeviceptr>(word),
                                 static_cast<cuuint32_t>(value), CU_STREAM_WAIT_VALUE_GEQ);
  if (result == CUDA_SUCCESS) return;
  if (result != CUDA_ERROR_NOT_SUPPORTED) check_driver(result, "cuStreamWaitValue32");
  call_host(stream, poll_word, {const_cast<std::uint64_t*>(word), value});
}

void store_word(cudaStream_t stream, std::uint64_t* word, std::uint64_t value) {
  const CUresult result = fabric::driver().cuStreamWriteValue32(
      stream, reinterpret_cast<CUdeviceptr>(word), static_cast<cuuint32_t>(value),
      CU_STREAM_WRITE_VALUE_DEFAULT);
  if (result == CUDA_SUCCESS) return;
  if (result != CUDA_ERROR_NOT_SUPPORTED) check_driver(result, "cuStreamWriteValue32");
  call_host(stream, raise_word, {word, value});
}

}  // namespace ferry::cuda
