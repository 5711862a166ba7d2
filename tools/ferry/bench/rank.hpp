// What every rank of `ferry bench` does: check, then measure.
#pragma once
#include <memory>

#include "bench/board.hpp"
#include "bench/settings.hpp"
#include "ferry/bootstrap.hpp"
#include "ferry/latency.hpp"

namespace ferry::cli {

/// Collective. Throws when an exchange brings wrong data: nothing is measured then.
void bench_throughput(const BenchSettings& settings, const BenchBoard& board,
                      std::shared_ptr<Bootstrap> bootstrap);
void bench_latency(const BenchSettings& settings, const BenchBoard& board,
                   std::shared_ptr<Bootstrap> bootstrap);
/// On GPUs; stubs in builds without.
void bench_gpu_throughput(const BenchSettings& settings, const BenchBoard& board,
                          std::shared_ptr<Bootstrap> bootstrap);
void bench_gpu_latency(const BenchSettings& settings, const BenchBoard& board,
                       std::shared_ptr<Bootstrap> bootstrap);
/// With e4m3 the tokens are bf16 and are quantised in flight.
LatencyConfig latency_config(const BenchSettings& settings);

}  // namespace ferry::cli
