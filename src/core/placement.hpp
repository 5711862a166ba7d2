// Which rank holds which expert.
#pragma once
#include <cstdint>

#include "core/device.hpp"

namespace ferry {

/// Experts in contiguous blocks; the first `experts mod ranks` ranks hold one more.
struct Placement {
  std::int64_t experts = 0;
  int ranks = 1;

  FERRY_FN constexpr std::int64_t first_expert(int rank) const {
    const std::int64_t extra = experts % ranks;
    return experts / ranks * rank + (rank < extra ? rank : extra);
  }
  FERRY_FN constexpr std::int64_t local_experts(int rank) const {
    return first_expert(rank + 1) - first_expert(rank);
  }
  FERRY_FN constexpr int rank_of(std::int64_t expert) const {
    const std::int64_t block = experts / ranks, extra = experts % ranks;
    const std::int64_t large = (block + 1) * extra;  // experts on the ranks that hold one more
    return static_cast<int>(expert < large ? expert / (block + 1)
                                           : extra + (expert - large) / block);
  }
  friend bool operator==(const Placement&, const Placement&) = default;
};

}  // namespace ferry
