// What a benchmark found, for people and for programs.
#pragma once
#include <cstdint>
#include <nlohmann/json.hpp>
#include <string>
#include <vector>

#include "bench/board.hpp"
#include "bench/settings.hpp"

namespace ferry::cli {

/// One line of the table. Times: of every sample the slowest rank. Bytes: of one exchange, summed
/// over the ranks.
struct BenchResult {
  BenchCase which = BenchCase::plan;
  std::int64_t tokens = 0;  ///< of each rank
  std::int64_t rows = 0;
  std::size_t row_bytes = 0;        ///< 0: no rows move (plan), or pairs
  std::uint64_t logical_bytes = 0;  ///< rows × row bytes, own rank included
  std::uint64_t wire_bytes = 0;     ///< without own rank
  double min_us = 0;
  double mean_us = 0;
  double p50_us = 0;
  double p95_us = 0;
  /// 10^9 bytes a second, at the median.
  double logical_gbps() const { return per_second(logical_bytes); }
  double wire_gbps() const { return per_second(wire_bytes); }

 private:
  double per_second(std::uint64_t bytes) const {
    return p50_us > 0 ? static_cast<double>(bytes) / p50_us / 1e3 : 0;
  }
};

/// The value below which a share `p` of the (sorted, not empty) values lie; linear in between.
double percentile(const std::vector<double>& sorted, double p);

std::vector<BenchResult> results_of(const BenchSettings& settings, const BenchBoard& board);

std::string table(const BenchSettings& settings, const std::vector<BenchResult>& results);

/// `command`: as it was typed.
nlohmann::json to_json(const BenchSettings& settings, const std::vector<BenchResult>& results,
                       const std::vector<std::string>& command);

}  // namespace ferry::cli
