// What latency mode brought, compared with what was sent; in ordinary memory.
#pragma once
#include <cstddef>
#include <cstdint>
#include <functional>

#include "bench/data.hpp"
#include "bench/settings.hpp"

namespace ferry::cli {

/// The tensors of an expert-major dispatch.
struct LatencyArrival {
  const std::byte* x = nullptr;   ///< [experts, ranks * tokens, hidden]
  const float* scales = nullptr;  ///< e4m3: [experts, columns, ranks * tokens]
  const std::int64_t* ranges = nullptr;
  const std::int32_t* source_token = nullptr;
  std::int64_t experts = 0;  ///< of this rank
};

/// Calls visit(row of x, source rank, token) for every row, in order.
void for_each_row(const BenchSettings& settings, const LatencyArrival& arrival,
                  const std::function<void(std::int64_t, int, std::int64_t)>& visit);

/// Throws std::runtime_error, which names the row, unless every row is what was sent.
void check_arrival(const BenchSettings& settings, const LatencyArrival& arrival,
                   const RowPattern& pattern);

/// The same of sums [tokens, hidden]: every token comes back once for each slot, with weight 1.
void check_latency_sums(const BenchSettings& settings, const std::byte* sums, int rank);

}  // namespace ferry::cli
