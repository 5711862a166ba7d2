// What moves between every two ranks in a dispatch with given routes: by the code that plans
// exchanges. A combine moves as many rows back. Pure.
#pragma once
#include <cstdint>
#include <vector>

#include "ferry/exchange_model.hpp"

namespace ferry {

/// Routes of one rank: ids [T, K], −1 where a slot is not used.
using RankRoutes = std::vector<std::int32_t>;

struct FlowShape {
  std::int64_t experts = 0;  ///< contiguous blocks, as in a group
  int ranks = 1;
  int host_ranks = 8;  ///< that share NVLink
  int topk = 8;
  bool hierarchical = false;
};

/// Rows from a rank to another.
struct Flow {
  std::int32_t from = 0, to = 0;
  bool network = false;  ///< over NICs, not NVLink
  std::int64_t rows = 0;
};

/// Draws different experts for each token, alike for all of them but that each of the first
/// `hot` is drawn as if it were there `heat` times. The same of the same seed.
struct DrawnRoutes {
  std::int64_t tokens = 0;
  int most_hosts = 0;  ///< whose experts a token names; 0: any
  int hot = 0;
  double heat = 1;
  std::uint64_t seed = 1;
};
RankRoutes draw_routes(const FlowShape& shape, const DrawnRoutes& drawn, int rank);

/// Routes of ranks are asked for one after another.
class ExchangeFlows {
 public:
  explicit ExchangeFlows(const FlowShape& shape);
  /// Where an expert is.
  int rank_of(std::int64_t expert) const;
  /// Of each rank once. Throws Error(invalid_argument) for an id that is no expert.
  void add(int rank, RankRoutes routes);

  /// All that move at least a row, by source.
  std::vector<Flow> flows() const;
  /// Of the busiest rank, in each: what an exchange with these routes waits for.
  ExchangeBytes busiest(double row_bytes, const ExchangeRates& rates = {}) const;

 private:
  std::int64_t& at(std::vector<std::int64_t>& matrix, int from, int to) const;
  FlowShape shape_;
  std::vector<std::int64_t> network_{};  ///< [R, hosts or R]: rows from a rank across
  std::vector<std::int64_t> inside_{};   ///< [R, ranks of a host]: rows to each rank of its host
  std::vector<std::int64_t> copies_{};   ///< [R]: rows that a rank sends, its own included
};

}  // namespace ferry
