#include "cuda/side_stream.hpp"

#include "cuda/runtime.hpp"
#include "fabric/cuda/driver.hpp"

namespace ferry::cuda {

SideStream::SideStream() {
  // Streams of one priority may share a queue of the GPU. What waits here must not hold up the
  // engine's copies, of the greatest priority, which a waiting kernel may need; between the two, it
  // does not stand before the calls' own streams either.
  int least = 0, greatest = 0;
  check(cudaDeviceGetStreamPriorityRange(&least, &greatest), "cudaDeviceGetStreamPriorityRange");
  check(cudaStreamCreateWithPriority(&stream_, cudaStreamNonBlocking, (least + greatest) / 2),
        "cudaStreamCreateWithPriority");
  const cudaError_t made = cudaEventCreateWithFlags(&end_, cudaEventDisableTiming);
  if (made != cudaSuccess) cudaStreamDestroy(stream_);
  check(made, "cudaEventCreateWithFlags");
}

SideStream::~SideStream() {
  cudaEventDestroy(end_);
  cudaStreamDestroy(stream_);
}

bool SideStream::can_wait_for(const std::uint32_t* word) {
  return wait_for(word, 0) == cudaSuccess;
}

cudaError_t SideStream::wait_for(const std::uint32_t* word, std::uint32_t value) {
  const auto* calls = &fabric::driver();
  if (!calls->problem.empty()) return cudaErrorNotSupported;
  const CUresult result = calls->cuStreamWaitValue32(stream_, reinterpret_cast<CUdeviceptr>(word),
                                                     value, CU_STREAM_WAIT_VALUE_GEQ);
  if (result == CUDA_SUCCESS) return cudaSuccess;
  return result == CUDA_ERROR_NOT_SUPPORTED ? cudaErrorNotSupported : cudaErrorUnknown;
}

cudaError_t SideStream::join(cudaStream_t other) {
  const cudaError_t recorded = cudaEventRecord(end_, stream_);
  return recorded != cudaSuccess ? recorded : cudaStreamWaitEvent(other, end_, 0);
}

}  // namespace ferry::cuda
