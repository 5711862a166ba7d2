// Places of rows to be summed: enough for each rank, none for two.
#include "core/sum_places.hpp"

#include <gtest/gtest.h>

#include <algorithm>
#include <random>

namespace ferry {
namespace {

TEST(SumPlaces, OfARankHoldItsSlotsAndNoOthers) {
  std::mt19937 random(20261122);
  for (int round = 0; round < 200; ++round) {
    const Placement placement{1 + static_cast<std::int64_t>(random() % 20),
                              1 + static_cast<int>(random() % 6)};
    std::vector<std::int32_t> routes(random() % 50);
    for (std::int32_t& id : routes) {
      id = static_cast<std::int32_t>(random() % static_cast<unsigned>(placement.experts + 1)) - 1;
    }
    const std::vector<std::uint64_t> first = first_sum_places(routes, placement);
    ASSERT_EQ(first.size(), static_cast<std::size_t>(placement.ranks));
    std::uint64_t end = 0;
    for (int rank = 0; rank < placement.ranks; ++rank) {
      EXPECT_EQ(first[static_cast<std::size_t>(rank)], end) << "rank " << rank;
      end += static_cast<std::uint64_t>(
          std::count_if(routes.begin(), routes.end(), [&](std::int32_t id) {
            return id >= placement.first_expert(rank) && id < placement.first_expert(rank + 1);
          }));
    }
    EXPECT_LE(end, routes.size());
  }
}

TEST(SumPlaces, ThatAreFixedAreApartByTheCapacity) {
  EXPECT_EQ(fixed_sum_places(7, 3), (std::vector<std::uint64_t>{0, 7, 14}));
  EXPECT_EQ(fixed_sum_places(1 << 30, 5).back(), std::uint64_t{4} << 30);
}

}  // namespace
}  // namespace ferry
