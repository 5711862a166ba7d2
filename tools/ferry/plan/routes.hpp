// Routes that groups recorded (python/ferry/routes.py has the format).
#pragma once
#include <cstdint>
#include <string>
#include <vector>

#include "ferry/exchange_flows.hpp"

namespace ferry::cli {

struct RecordedRoutes {
  std::int64_t experts = 0;
  int topk = 0;
  std::vector<std::vector<RankRoutes>> calls{};  ///< [ranks, calls]

  /// FILE.0, FILE.1, … of all ranks that the first one names.
  static RecordedRoutes load(const std::string& file);

  int ranks() const { return static_cast<int>(calls.size()); }
  int count() const { return static_cast<int>(calls.front().size()); }
  double mean_tokens() const;
  /// Of rank `rank` of any number, which may be more than recorded: those go on with other calls of
  /// the same ranks. Each token takes one of the `copies` of its experts, in turn.
  RankRoutes of(int rank, int call, int copies) const;
};

}  // namespace ferry::cli
