// What every rank of `ferry bench` does: check, then measure.
#pragma once
#include <memory>

#include "bench_board.hpp"
#include "bench_settings.hpp"
#include "ferry/bootstrap.hpp"

namespace ferry::cli {

/// Collective. Throws when an exchange brings wrong data: nothing is measured then.
void bench_throughput(const BenchSettings& settings, const BenchBoard& board,
                      std::shared_ptr<Bootstrap> bootstrap);
void bench_latency(const BenchSettings& settings, const BenchBoard& board,
                   std::shared_ptr<Bootstrap> bootstrap);

}  // namespace ferry::cli
