// GPU memory of a test, and copies to and from it.
#pragma once
#include <cuda_runtime_api.h>

#include <cstddef>
#include <cstdint>
#include <ferry/ferry.hpp>
#include <stdexcept>
#include <string>
#include <vector>

namespace ferry::test {

inline void need(bool holds, const std::string& what) {
  if (!holds) throw std::runtime_error(what);
}
inline void need(cudaError_t result, const std::string& what) {
  need(result == cudaSuccess, what + ": " + cudaGetErrorName(result));
}

/// Memory of the current GPU.
class Buffer {
 public:
  explicit Buffer(std::size_t bytes) {
    need(cudaMalloc(&data_, bytes == 0 ? 16 : bytes), "cudaMalloc");
  }
  ~Buffer() { cudaFree(data_); }
  Buffer(const Buffer&) = delete;
  Buffer& operator=(const Buffer&) = delete;
  void* data() const { return data_; }

 private:
  void* data_ = nullptr;
};

/// Copies on a stream of their own: the default stream would wait for other ranks of this process.
class Copier {
 public:
  Copier() {
    need(cudaStreamCreateWithFlags(&stream_, cudaStreamNonBlocking), "cudaStreamCreateWithFlags");
  }
  ~Copier() { cudaStreamDestroy(stream_); }
  Copier(const Copier&) = delete;
  Copier& operator=(const Copier&) = delete;
  template <class T>
  void put(void* to, const std::vector<T>& from) const {
    copy(to, from.data(), from.size() * sizeof(T));
  }
  /// The first elements, whatever the tensor's dtype.
  template <class T>
  std::vector<T> first(const Tensor& tensor, std::size_t count) const {
    std::vector<T> values(count);
    copy(values.data(), tensor.data(), count * sizeof(T));
    return values;
  }
  template <class T>
  std::vector<T> get(const Tensor& tensor, std::int64_t rows) const {
    const std::int64_t columns = tensor.view().dims() == 1 ? 1 : tensor.view().columns();
    return first<T>(tensor, static_cast<std::size_t>(rows * columns));
  }

 private:
  void copy(void* to, const void* from, std::size_t bytes) const {
    if (bytes == 0) return;
    need(cudaMemcpyAsync(to, from, bytes, cudaMemcpyDefault, stream_), "cudaMemcpyAsync");
    need(cudaStreamSynchronize(stream_), "cudaStreamSynchronize");
  }
  cudaStream_t stream_ = nullptr;
};

}  // namespace ferry::test
