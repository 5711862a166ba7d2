// Which ranks form a domain, and where rails lead.
#include "core/domains.hpp"

#include <gtest/gtest.h>

namespace ferry {
namespace {

TEST(Domains, BlocksOfOneSizeAndAShorterLast) {
  const Domains two = Domains::blocks(5, 2);
  EXPECT_EQ(two.count(), 3);
  EXPECT_EQ(two.members(0), (std::vector<int>{0, 1}));
  EXPECT_EQ(two.members(2), (std::vector<int>{4}));
  EXPECT_EQ(two.of(3), 1);
  EXPECT_EQ(two.index(3), 1);
  EXPECT_TRUE(two.together(2, 3));
  EXPECT_FALSE(two.together(1, 2));
  EXPECT_EQ(Domains::blocks(4, 0).count(), 1);
  EXPECT_EQ(Domains::blocks(4, 9).count(), 1);
  EXPECT_EQ(Domains::blocks(4, 1).count(), 4);
}

TEST(Domains, LabelsInAnyOrder) {
  const Domains hosts({7, 3, 7, 5, 3});  // ranks dealt out to hosts in turn
  EXPECT_EQ(hosts.count(), 3);
  EXPECT_EQ(hosts.members(0), (std::vector<int>{0, 2}));
  EXPECT_EQ(hosts.members(1), (std::vector<int>{1, 4}));
  EXPECT_EQ(hosts.members(2), (std::vector<int>{3}));
}

TEST(Domains, AsManyRailsAreFullAsTheSmallestDomainHasRanks) {
  const Domains unequal({0, 1, 0, 1, 0});
  EXPECT_EQ(unequal.full_rails(), 2);
  EXPECT_EQ(unequal.on_rail(0), (std::vector<int>{0, 1}));
  EXPECT_EQ(unequal.on_rail(1), (std::vector<int>{2, 3}));
  EXPECT_EQ(Domains::blocks(5, 2).full_rails(), 1);
  EXPECT_EQ(Domains::blocks(5, 2).on_rail(0), (std::vector<int>{0, 2, 4}));
}

TEST(Domains, RailsMeetWhereADomainHasFewerRanks) {
  const Domains uneven({0, 0, 0, 1, 1});
  EXPECT_EQ(uneven.rail(0, 1), 3);
  EXPECT_EQ(uneven.rail(1, 1), 4);
  EXPECT_EQ(uneven.rail(2, 1), 3);
  EXPECT_EQ(uneven.rail(4, 0), 1);
  EXPECT_EQ(uneven.feeders(3), (std::vector<int>{0, 2}));
  EXPECT_EQ(uneven.feeders(1), (std::vector<int>{4}));
  EXPECT_EQ(uneven.feeders(2), (std::vector<int>{}));
}

TEST(Domains, EveryRankFeedsOneRankOfEveryOtherDomain) {
  for (int ranks = 1; ranks <= 9; ++ranks) {
    for (int size = 1; size <= ranks; ++size) {
      const Domains domains = Domains::blocks(ranks, size);
      std::vector<int> fed(static_cast<std::size_t>(ranks), 0);
      for (int rank = 0; rank < ranks; ++rank) {
        for (const int source : domains.feeders(rank)) {
          EXPECT_FALSE(domains.together(source, rank));
          ++fed[static_cast<std::size_t>(source)];
        }
      }
      for (const int count : fed) EXPECT_EQ(count, domains.count() - 1);
    }
  }
}

}  // namespace
}  // namespace ferry
