// What a benchmark found, for people and for programs.
#pragma once
#include <cstdint>
#include <nlohmann/json.hpp>
#include <string>
#include <vector>

#include "bench/board.hpp"
#include "bench/settings.hpp"

namespace ferry::cli {

/// What one line came to. Times: microseconds, of every sample the slowest rank. Bytes: of one
/// call, summed over the ranks.
struct BenchResult {
  struct Times {
    double min = 0, mean = 0, p50 = 0, p95 = 0;
  };
  BenchLine line{};
  Times times{};
  Times alone{};  ///< zeros unless single calls were timed, too
  std::int64_t rows = 0;
  std::size_t row_bytes = 0;        ///< 0: no rows move (plan), or pairs
  std::uint64_t logical_bytes = 0;  ///< rows × row bytes, own rank included
  std::uint64_t wire_bytes = 0;     ///< without own rank
  int among = 1;                    ///< rates are of one of so many
  /// 10^9 bytes a second, at the median.
  double logical_gbps() const { return per_second(logical_bytes); }
  double wire_gbps() const { return per_second(wire_bytes); }

 private:
  double per_second(std::uint64_t bytes) const {
    return times.p50 > 0 ? static_cast<double>(bytes) / among / times.p50 / 1e3 : 0;
  }
};

/// The value below which a share `p` of the (sorted, not empty) values lie; linear in between.
double percentile(const std::vector<double>& sorted, double p);

/// Of a run.
std::vector<BenchResult> results_of(const BenchSettings& settings, const BenchBoard& board);
/// `settings` here: of the command, whose mode may be both.
std::string table(const BenchSettings& settings, const std::vector<BenchResult>& results);
nlohmann::json to_json(const BenchSettings& settings, const std::vector<BenchResult>& results,
                       const std::vector<std::string>& command);

}  // namespace ferry::cli
