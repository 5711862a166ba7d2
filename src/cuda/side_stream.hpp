// A stream beside those of the calls, whose kernels begin when a word in this GPU's memory has been
// raised: no SM waits.
#pragma once
#include <cuda_runtime_api.h>

#include <cstdint>

namespace ferry::cuda {

/// Its device must be current whenever it is used.
class SideStream {
 public:
  SideStream();
  ~SideStream();
  SideStream(const SideStream&) = delete;
  SideStream& operator=(const SideStream&) = delete;

  /// Whether the driver lets streams wait for this word, in device memory, which is 0 now.
  bool can_wait_for(const std::uint32_t* word);
  cudaStream_t stream() const { return stream_; }
  /// What follows on it waits until the word is at least `value`, as numbers that wrap around.
  cudaError_t wait_for(const std::uint32_t* word, std::uint32_t value);
  /// What follows on `other` waits for all that is on it now.
  cudaError_t join(cudaStream_t other);

 private:
  cudaStream_t stream_ = nullptr;
  cudaEvent_t end_ = nullptr;
};

}  // namespace ferry::cuda
