// Launching a kernel so that its start overlaps the end of the kernel before it in the stream.
#pragma once
#include <cuda_runtime_api.h>

#include <cstddef>

namespace ferry::cuda {

struct LaunchShape {
  unsigned blocks = 1;
  unsigned threads = 1;
  std::size_t shared_bytes = 0;
};

/// `early`: the blocks may come while the kernel before still runs (sm_90 and later; the code must
/// have been compiled for them). The kernel then begins with await_kernel_before().
inline cudaError_t launch(const void* kernel, const LaunchShape& shape, void** arguments,
                          cudaStream_t stream, bool early) {
  cudaLaunchAttribute attribute{};
  attribute.id = cudaLaunchAttributeProgrammaticStreamSerialization;
  attribute.val.programmaticStreamSerializationAllowed = 1;
  cudaLaunchConfig_t config{};
  config.gridDim = dim3(shape.blocks);
  config.blockDim = dim3(shape.threads);
  config.dynamicSmemBytes = shape.shared_bytes;
  config.stream = stream;
  config.attrs = &attribute;
  config.numAttrs = early ? 1 : 0;
  return cudaLaunchKernelExC(&config, kernel, arguments);
}

}  // namespace ferry::cuda
