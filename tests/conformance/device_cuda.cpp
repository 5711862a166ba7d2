// Ordinary memory and GPUs.
#include <cuda_runtime_api.h>

#include <algorithm>
#include <bit>
#include <cstring>
#include <functional>
#include <map>
#include <mutex>
#include <stdexcept>
#include <string>

#include "device.hpp"
#include "platform/test_child.hpp"

namespace ferry::conformance {
namespace {

void need(cudaError_t result, const char* call) {
  if (result != cudaSuccess) {
    throw std::runtime_error(std::string(call) + ": " + cudaGetErrorName(result));
  }
}

bool is_cpu(Device where) {
  return where.kind == DeviceKind::cpu;
}

/// Copies of one rank, on a stream of their own: the default stream would wait for others.
cudaStream_t own_stream() {
  thread_local cudaStream_t stream = [] {
    cudaStream_t made = nullptr;
    need(cudaStreamCreateWithFlags(&made, cudaStreamNonBlocking), "cudaStreamCreateWithFlags");
    return made;
  }();
  return stream;
}

void finish_own_stream() {
  need(cudaStreamSynchronize(own_stream()), "cudaStreamSynchronize");
}

/// Pieces that were used before: cudaMalloc and cudaFree take long and wait for the whole GPU. They
/// come back as they were left, so cases see each other's old data. One for each thread, because a
/// thread uses one GPU.
class Pieces : public std::enable_shared_from_this<Pieces> {
 public:
  ~Pieces() {
    for (const auto& [size, data] : free_) cudaFree(data);
  }
  std::shared_ptr<void> take(std::size_t bytes) {
    const std::size_t size = std::bit_ceil(std::max<std::size_t>(bytes, 512));
    if (size > kLargest) return make(bytes, [](void* data) { cudaFree(data); });
    {
      std::scoped_lock lock(mutex_);
      if (const auto found = free_.find(size); found != free_.end()) {
        void* data = found->second;
        free_.erase(found);
        return {data, back(size)};
      }
    }
    return make(size, back(size));
  }

 private:
  static constexpr std::size_t kLargest = std::size_t{64} << 20;

  template <class Free>
  static std::shared_ptr<void> make(std::size_t bytes, Free free) {
    void* data = nullptr;
    need(cudaMalloc(&data, bytes), "cudaMalloc");
    return {data, free};
  }
  std::function<void(void*)> back(std::size_t size) {
    return [self = shared_from_this(), size](void* data) {
      std::scoped_lock lock(self->mutex_);
      self->free_.emplace(size, data);
    };
  }

  std::mutex mutex_;
  std::multimap<std::size_t, void*> free_;
};

}  // namespace

std::vector<std::size_t> free_gpu_bytes() {
  constexpr std::size_t kMost = 64;
  const auto memory = test::shared_block((kMost + 1) * sizeof(std::size_t));
  auto* found = static_cast<std::size_t*>(memory.get());  // a count, then as many sizes
  test::Child([&] {
    int count = 0;
    std::size_t total = 0;
    if (cudaGetDeviceCount(&count) != cudaSuccess) return 1;
    for (int gpu = 0; gpu < count && found[0] < kMost; ++gpu) {
      if (cudaSetDevice(gpu) != cudaSuccess) return 1;
      if (cudaMemGetInfo(&found[1 + found[0]], &total) != cudaSuccess) return 1;
      ++found[0];
    }
    return 0;
  }).wait();
  return {found + 1, found + 1 + found[0]};
}

void use_device(Device where) {
  if (is_cpu(where)) return;
  need(cudaSetDevice(where.index), "cudaSetDevice");
  // What copies and fills is loaded now, not beside a kernel that waits for peers.
  const auto memory = allocate(1 << 16, where);
  auto* data = static_cast<std::byte*>(memory.get());
  for (const std::size_t odd : {0, 4, 1}) {
    fill_bytes(data + odd, 0xff, (1 << 15) - odd, where);
    copy_bytes(data + (1 << 15), data + odd, (1 << 15) - odd, where);
  }
}

int sms_of(Device where) {
  if (is_cpu(where)) return 0;
  int count = 0;
  need(cudaDeviceGetAttribute(&count, cudaDevAttrMultiProcessorCount, where.index),
       "cudaDeviceGetAttribute");
  return count;
}

std::size_t free_bytes(Device where) {
  if (is_cpu(where)) return 0;
  std::size_t free = 0, total = 0;
  need(cudaMemGetInfo(&free, &total), "cudaMemGetInfo");
  return free;
}

std::shared_ptr<void> allocate(std::size_t bytes, Device where) {
  if (is_cpu(where)) return std::shared_ptr<std::byte[]>(new std::byte[bytes]);
  thread_local const auto pieces = std::make_shared<Pieces>();
  return pieces->take(bytes);
}

void copy_bytes(void* to, const void* from, std::size_t bytes, Device where) {
  if (bytes == 0) return;
  if (is_cpu(where)) {
    std::memcpy(to, from, bytes);
    return;
  }
  need(cudaMemcpyAsync(to, from, bytes, cudaMemcpyDefault, own_stream()), "cudaMemcpyAsync");
  finish_own_stream();
}

void fill_bytes(void* data, int value, std::size_t bytes, Device where) {
  if (bytes == 0) return;
  if (is_cpu(where)) {
    std::memset(data, value, bytes);
    return;
  }
  need(cudaMemsetAsync(data, value, bytes, own_stream()), "cudaMemsetAsync");
  finish_own_stream();
}

std::shared_ptr<Stream> make_stream(Device where) {
  if (is_cpu(where)) return std::make_shared<Stream>();
  cudaStream_t raw = nullptr;
  need(cudaStreamCreateWithFlags(&raw, cudaStreamNonBlocking), "cudaStreamCreateWithFlags");
  return {new Stream(Stream::of_cuda(raw, where.index)), [raw](Stream* stream) {
            delete stream;
            cudaStreamDestroy(raw);
          }};
}

}  // namespace ferry::conformance
