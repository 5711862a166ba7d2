// Where the arrays of a rank lie: in ordinary memory for the host engine, or on the rank's GPU.
// device_cuda.cpp knows GPUs; in a build without the CUDA engine device_none.cpp stands in.
#pragma once
#include <cstddef>
#include <memory>
#include <vector>

#include "ferry/dtype.hpp"
#include "ferry/stream.hpp"
#include "ferry/tensor.hpp"

namespace ferry::conformance {

/// Free bytes of every GPU that CUDA sees; none without a GPU or without the CUDA engine. Asked in
/// a child: a process that has called CUDA cannot fork ranks that do.
std::vector<std::size_t> free_gpu_bytes();
inline int gpu_count() {
  return static_cast<int>(free_gpu_bytes().size());
}

/// Called once by the thread of a rank, before anything else there.
void use_device(Device where);
/// Streaming multiprocessors; 0 for the CPU.
int sms_of(Device where);
/// Free bytes of the GPU, as this process sees it; 0 for the CPU.
std::size_t free_bytes(Device where);

/// Uninitialised memory there. Throws std::runtime_error when there is none.
std::shared_ptr<void> allocate(std::size_t bytes, Device where);
/// To, from, or inside `where`; complete on return. Never waits for work of other streams.
void copy_bytes(void* to, const void* from, std::size_t bytes, Device where);
void fill_bytes(void* data, int value, std::size_t bytes, Device where);
/// A worker thread, or a CUDA stream, which ends with the last copy.
std::shared_ptr<Stream> make_stream(Device where);

/// The same numbers there, with the same strides, in memory of their own; on the CPU the tensor
/// itself, which the result does not own.
Tensor to_device(const ConstTensorView& tensor, Device where);
/// The numbers of a dense tensor in ordinary memory: a copy, or the tensor itself.
Tensor to_cpu(const Tensor& tensor);

}  // namespace ferry::conformance
