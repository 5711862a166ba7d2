#include "bench/latency_check.hpp"

#include <fmt/format.h>

#include <cmath>
#include <stdexcept>

namespace ferry::cli {
namespace {

// One element that was quantised: three mantissa bits of the largest of its block.
bool close_to(float got, int expected) {
  return std::fabs(got - static_cast<float>(expected)) <=
         std::fabs(static_cast<float>(expected)) / 16 + 1e-6f;
}

bool quantised_row_is(const BenchSettings& s, const LatencyArrival& arrival,
                      const RowPattern& pattern, std::int64_t row, int source, std::int64_t token) {
  const std::int64_t rows = s.ranks * s.latency_tokens;
  const auto* codes = reinterpret_cast<const std::uint8_t*>(arrival.x) + row * s.hidden;
  for (std::int64_t c = 0; c < s.hidden; ++c) {
    const std::int64_t at = (row / rows * s.scales() + c / 128) * rows + row % rows;
    if (!close_to(decode_e4m3(codes[c]) * arrival.scales[at], pattern.value(source, token, c))) {
      return false;
    }
  }
  return true;
}

}  // namespace

void for_each_row(const BenchSettings& s, const LatencyArrival& arrival,
                  const std::function<void(std::int64_t, int, std::int64_t)>& visit) {
  const std::int64_t rows = s.ranks * s.latency_tokens;
  for (std::int64_t expert = 0; expert < arrival.experts; ++expert) {
    for (int source = 0; source < s.ranks; ++source) {
      const std::int64_t range = arrival.ranges[expert * s.ranks + source];
      const std::int64_t first = expert * rows + (range >> 32), count = range & 0xffffffff;
      for (std::int64_t row = first; row < first + count; ++row) {
        visit(row, source, arrival.source_token[row]);
      }
    }
  }
}

void check_arrival(const BenchSettings& s, const LatencyArrival& arrival,
                   const RowPattern& pattern) {
  for_each_row(s, arrival, [&](std::int64_t row, int source, std::int64_t token) {
    const std::size_t at = static_cast<std::size_t>(row) * pattern.row_bytes();
    const bool right = s.dtype == Dtype::e4m3
                           ? quantised_row_is(s, arrival, pattern, row, source, token)
                           : pattern.matches(arrival.x + at, source, token);
    if (right) return;
    throw std::runtime_error(
        fmt::format("latency dispatch: row {} is not token {} of rank {}", row, token, source));
  });
}

void check_latency_sums(const BenchSettings& s, const std::byte* sums, int rank) {
  const RowPattern expected(s.seed, s.hidden, s.combine_dtype(), s.topk);
  for (std::int64_t t = 0; t < s.latency_tokens; ++t) {
    if (expected.matches(sums + static_cast<std::size_t>(t) * expected.row_bytes(), rank, t)) {
      continue;
    }
    throw std::runtime_error(
        fmt::format("latency combine: token {} is not the sum of its {} rows", t, s.topk));
  }
}

}  // namespace ferry::cli
