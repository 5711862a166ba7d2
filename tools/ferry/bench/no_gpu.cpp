// In place of gpu.cpp in a build without the CUDA engine.
#include <stdexcept>

#include "bench/gpu.hpp"
#include "bench/rank.hpp"

namespace ferry::cli {

void bench_gpu(const GpuBenchSettings&, const GpuBoard&, std::shared_ptr<Bootstrap>) {
  throw std::runtime_error("this build has no CUDA engine");
}

void bench_gpu_latency(const BenchSettings&, const BenchBoard&, std::shared_ptr<Bootstrap>) {
  throw std::runtime_error("this build has no CUDA engine");
}

}  // namespace ferry::cli
