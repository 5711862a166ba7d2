// What the files of kernels offer to each other on the host's side. Nothing here needs nvcc.
#pragma once
#include <cuda_runtime_api.h>

namespace ferry::cuda {

/// What the compiled kernels may use on the current device. Looked up once for each device.
struct KernelLimits {
  bool bulk_copies = false;  ///< the code that runs here has the paths of sm_90 and later
  int shared_bytes = 0;      ///< dynamic shared memory of one block, after load_throughput_kernels
  int num_sms = 0;
};
cudaError_t kernel_limits(KernelLimits& limits);

/// Loads one kernel on the current device and allows it `shared_bytes` of dynamic shared memory.
cudaError_t load_kernel(const void* kernel, int shared_bytes);

/// Loads every kernel of throughput mode on the current device, so that none is loaded inside a
/// wait, and allows its shared memory.
cudaError_t load_throughput_kernels();
/// Loads every kernel of latency mode on the current device.
cudaError_t load_latency_kernels();

// One for each file of kernels, called by load_throughput_kernels.
cudaError_t load_plan_kernels();
cudaError_t load_dispatch_kernels();
cudaError_t load_routes_kernels();
cudaError_t load_barrier_kernels();
cudaError_t load_combine_kernels();
cudaError_t load_expert_major_kernels();
cudaError_t load_crossing_kernels();

}  // namespace ferry::cuda
