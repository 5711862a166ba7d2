// In place of gpu_throughput.cpp and gpu_latency.cpp in a build without the CUDA engine.
#include <stdexcept>

#include "bench/rank.hpp"

namespace ferry::cli {

void bench_gpu_throughput(const BenchSettings&, const BenchBoard&, std::shared_ptr<Bootstrap>) {
  throw std::runtime_error("this build has no CUDA engine");
}

void bench_gpu_latency(const BenchSettings&, const BenchBoard&, std::shared_ptr<Bootstrap>) {
  throw std::runtime_error("this build has no CUDA engine");
}

}  // namespace ferry::cli
