// A GPU without memory, for tests of what is refused then.
#pragma once
#include <cuda_runtime_api.h>

#include <cstddef>
#include <vector>

namespace ferry::test {

/// All but a little of the memory of the current GPU.
class Hog {
 public:
  Hog() {
    for (std::size_t bytes = std::size_t{1} << 33; bytes >= std::size_t{2} << 20; bytes /= 2) {
      void* data = nullptr;
      while (cudaMalloc(&data, bytes) == cudaSuccess) held_.push_back(data);
      (void)cudaGetLastError();
    }
  }
  ~Hog() {
    for (void* data : held_) cudaFree(data);
  }
  Hog(const Hog&) = delete;
  Hog& operator=(const Hog&) = delete;

 private:
  std::vector<void*> held_;
};

}  // namespace ferry::test
