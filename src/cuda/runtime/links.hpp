// What joins the GPUs of a group.
#pragma once
#include <span>

#include "cuda/runtime/runtime.hpp"

namespace ferry::cuda {

/// Whether rows of latency mode may cross as LL128 (kernels/latency/row_ll128.cuh) from the GPU
/// `device` of this process to each of `gpus`, which ranks of the group have: 128 bytes that a warp
/// stores at once must be seen at once. No document promises that; NCCL relies on it between GPUs
/// of one kind, of compute capability 8.0 or 9.0, over NVLink, and so does Ferry. It is known only
/// of GPUs that this process sees (CUDA_VISIBLE_DEVICES). FERRY_LATENCY_LL128=0 says no.
bool carries_ll128(int device, std::span<const cudaUUID_t> gpus);

}  // namespace ferry::cuda
