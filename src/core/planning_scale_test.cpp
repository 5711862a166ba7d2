// One rank of 2048 plans against made-up counts of the others: what it finds, and how much memory
// it takes for it.
#include <gtest/gtest.h>

#include <algorithm>
#include <random>

#include "core/crossing_lists.hpp"
#include "core/crossing_plan.hpp"
#include "core/exchange_plan.hpp"

namespace ferry {
namespace {

constexpr unsigned kSeed = 20261124;
constexpr int kRanks = 2048, kDomainRanks = 8, kTopk = 8, kSelf = 1029;
constexpr std::int64_t kTokens = 64;

struct Group {
  Placement placement{kRanks, kRanks};
  Domains domains = Domains::blocks(kRanks, kDomainRanks);
  std::vector<std::int32_t> own_routes{};
  std::vector<std::vector<std::int32_t>> counts{};  ///< of each rank
  std::vector<std::int32_t> domain_tokens{};

  std::int64_t tokens(int source, int target) const { return counts[index(source)][index(target)]; }
};

Group made_up() {
  Group group;
  std::mt19937 random(kSeed);
  for (int rank = 0; rank < kRanks; ++rank) {
    std::vector<std::int32_t> routes;
    for (std::int64_t i = 0; i < kTokens * kTopk; ++i) {
      routes.push_back(static_cast<std::int32_t>(random() % kRanks));
    }
    if (rank == kSelf) group.own_routes = routes;
    const RouteCounts own = count_routes(std::move(routes), kTokens, kTopk, group.placement);
    auto& row = group.counts.emplace_back(own.tokens_per_rank);
    row.insert(row.end(), own.slots_per_expert.begin(), own.slots_per_expert.end());
    const auto crossed = count_crossings(own, group.placement, group.domains, rank);
    group.domain_tokens.insert(group.domain_tokens.end(), crossed.begin(), crossed.end());
  }
  return group;
}

TEST(PlanningScale, ARankOf2048FindsItsPlaces) {
  const Group group = made_up();
  auto domain_tokens = group.domain_tokens;
  GroupCounts counts(group.placement, kSelf);
  for (const auto& row : group.counts) counts.add(row);
  const ExchangePlan plan =
      make_plan(count_routes(group.own_routes, kTokens, kTopk, group.placement), std::move(counts),
                group.placement, kSelf);
  ASSERT_EQ(impossible_crossing(plan, group.domains, domain_tokens), -1);
  const CrossingPlan crossing = make_crossing_plan(plan, group.domains, std::move(domain_tokens));

  std::int64_t staged = 0;
  for (int rank = 0; rank < kRanks; ++rank) {
    std::int64_t first = 0, all = 0;
    for (int source = 0; source < kRanks; ++source) {
      if (source == kSelf) first = all;
      all += group.tokens(source, rank);
    }
    ASSERT_EQ(plan.peer_row[index(rank)], first);
    ASSERT_EQ(plan.peer_recv_rows[index(rank)], all);
    if (group.domains.together(rank, kSelf)) continue;
    if (group.domains.rail(rank, group.domains.of(kSelf)) != kSelf) continue;
    ASSERT_LT(index(staged), crossing.feeders.size());
    ASSERT_EQ(crossing.feeders[index(staged)], rank);
    std::int64_t rows = 0;
    for (int source = 0; source < rank; ++source) rows += group.tokens(source, kSelf);
    ASSERT_EQ(crossing.first_rows(index(staged))[index(group.domains.index(kSelf))], rows);
    ++staged;
  }
  EXPECT_EQ(crossing.staging_rows[kSelf], crossing.feeder_row.back());
}

}  // namespace
}  // namespace ferry
