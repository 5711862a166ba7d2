// One rank of 2048 plans against made-up counts of the others: what it finds, and how much memory
// it takes for it.
#include <gtest/gtest.h>

#include <algorithm>
#include <numeric>
#include <random>
#include <vector>

#include "core/crossing_plan.hpp"
#include "core/exchange_plan.hpp"
#include "core/pair_counts.hpp"

namespace ferry {
namespace {

constexpr unsigned kScaleSeed = 20261124;
constexpr int kRanks = 2048, kDomainRanks = 8, kTopk = 8, kSelf = 1029;
constexpr std::int64_t kTokens = 64;

struct Group {
  Placement placement{kRanks, kRanks};
  Domains domains = Domains::blocks(kRanks, kDomainRanks);
  std::vector<std::int32_t> own_routes{};
  std::vector<std::vector<std::int32_t>> counts{};  ///< of each rank
  std::vector<std::int32_t> domain_tokens{};

  const std::int32_t* crossings(int source) const {
    return domain_tokens.data() + index(source) * index(domains.count());
  }
  /// Whether what crosses from a rank to kSelf's domain comes to kSelf.
  bool feeds(int source) const {
    return !domains.together(source, kSelf) && domains.rail(source, domains.of(kSelf)) == kSelf;
  }
  std::int64_t tokens(int source, int target) const { return counts[index(source)][index(target)]; }
};

Group made_up() {
  Group group;
  std::mt19937 random(kScaleSeed);
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

/// What others say, without being there: their messages are counted from the matrix of counts.
class Others {
 public:
  explicit Others(const Group& group) : group_(group), first_(kRanks), rows_(kRanks) {
    for (int source = 0; source < kRanks; ++source) {
      if (source == kSelf) first_ = rows_;
      for (int target = 0; target < kRanks; ++target) {
        rows_[index(target)] += group.tokens(source, target);
      }
    }
  }
  std::vector<std::byte> counts(int source) const {
    const auto& row = group_.counts[index(source)];
    const std::int32_t* crossed = group_.crossings(source);
    const int here = group_.domains.of(kSelf);
    PairCountsHead head;
    head.sent_before = std::accumulate(row.begin(), row.begin() + kSelf, std::int64_t{0});
    head.sent_rows = std::accumulate(row.begin(), row.begin() + kRanks, std::int64_t{0});
    head.sum_row = std::accumulate(crossed, crossed + here, std::int64_t{0});
    head.sums = std::accumulate(crossed, crossed + group_.domains.count(), std::int64_t{0});
    head.tokens = row[kSelf];
    head.crossing = crossed[here];
    std::vector<std::byte> bytes = bytes_of(&head, 1);
    append(bytes, bytes_of(&row[kRanks + kSelf], 1));
    if (group_.feeds(source))
      append(bytes, bytes_of(&row[index(here) * kDomainRanks], kDomainRanks));
    return bytes;
  }
  std::vector<std::byte> places(int source) const {
    PairPlaces places;
    places.first_row = first_[index(source)];
    places.recv_rows = rows_[index(source)];
    places.staging_rows = kTokens * kRanks;
    return bytes_of(&places, 1);
  }
  std::vector<std::byte> rails(int source) const {
    std::vector<std::int32_t> first(kDomainRanks);
    for (int member = 0; group_.feeds(source) && member < kDomainRanks; ++member) {
      const int target = group_.domains.of(kSelf) * kDomainRanks + member;
      for (int s = 0; s < source; ++s) {
        first[index(member)] += static_cast<std::int32_t>(group_.tokens(s, target));
      }
    }
    return bytes_of(first.data(), group_.feeds(source) ? first.size() : 0);
  }
  std::int64_t first(int rank) const { return first_[index(rank)]; }
  std::int64_t rows(int rank) const { return rows_[index(rank)]; }

 private:
  template <class Value>
  static std::vector<std::byte> bytes_of(const Value* values, std::size_t count) {
    const auto* from = reinterpret_cast<const std::byte*>(values);
    return {from, from + count * sizeof(Value)};
  }
  static void append(std::vector<std::byte>& to, const std::vector<std::byte>& more) {
    to.insert(to.end(), more.begin(), more.end());
  }

  const Group& group_;
  std::vector<std::int64_t> first_;  // of kSelf at each rank
  std::vector<std::int64_t> rows_;   // that each rank receives
};

TEST(PlanningScale, OneOf2048TellsAndHearsWhatConcernsIt) {
  const Group group = made_up();
  const Others others(group);
  PairCounts mine(count_routes(group.own_routes, kTokens, kTopk, group.placement), group.placement,
                  group.domains, kSelf);
  const std::size_t most = PairCounts::message_bytes(group.placement, group.domains);
  std::size_t sent = 0, got = 0;
  for (const PairCounts::Step step : PairCounts::kSteps) {
    std::vector<std::byte> own(most), out(most);
    for (int peer = 0; peer < kRanks; ++peer) {
      const std::size_t bytes = mine.write(step, peer, peer == kSelf ? own.data() : out.data());
      ASSERT_LE(bytes, most);
      sent += bytes;
    }
    for (int source = 0; source < kRanks; ++source) {
      const auto theirs = step == PairCounts::Step::counts   ? others.counts(source)
                          : step == PairCounts::Step::places ? others.places(source)
                                                             : others.rails(source);
      got += theirs.size();
      const std::byte* message = source == kSelf ? own.data() : theirs.data();
      ASSERT_TRUE(mine.read(step, source, message)) << source;
    }
  }
  EXPECT_LE(std::max(sent, got), kRanks * 128u);
  const ExchangePlan plan = mine.take_plan();
  const CrossingPlan crossing = mine.take_crossing(Crossing::automatic);
  EXPECT_TRUE(plan.rank_tokens.empty() && crossing.domain_tokens.empty());
  for (int rank = 0; rank < kRanks; ++rank) {
    ASSERT_EQ(plan.peer_row[index(rank)], others.first(rank));
    ASSERT_EQ(plan.peer_recv_rows[index(rank)], others.rows(rank));
  }
  EXPECT_EQ(plan.recv_rows(), others.rows(kSelf));
  EXPECT_EQ(crossing.feeders.size(), index(kRanks / kDomainRanks - 1));
  EXPECT_EQ(crossing.feeder_first.size(), crossing.feeders.size() * kDomainRanks);
  EXPECT_EQ(crossing.staging_rows[kSelf], crossing.feeder_row.back());
}

}  // namespace
}  // namespace ferry
