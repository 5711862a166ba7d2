// In place of self_test_gpu.cpp in a build without the CUDA engine.
#include <stdexcept>

#include "doctor/machine.hpp"
#include "doctor/self_test.hpp"

namespace ferry::cli {

int gpu_count() {
  return 0;
}

std::shared_ptr<void> on_gpu(const void*, std::size_t, int) {
  throw std::runtime_error("this build has no CUDA engine");
}

void from_gpu(void*, const void*, std::size_t, int) {
  throw std::runtime_error("this build has no CUDA engine");
}

}  // namespace ferry::cli
