// The public face of the planner: steps in their order, routes to places.
#include <gtest/gtest.h>

#include <array>
#include <random>

#include "core/domains.hpp"
#include "core/experts/balance_state.hpp"
#include "core/experts/test_batches.hpp"
#include "core/experts/test_warps.hpp"
#include "core/test_errors.hpp"
#include "ferry/experts.hpp"

namespace ferry::test {
namespace {

constexpr int kRanks = 4, kExperts = 8, kSlots = 2, kTopk = 2, kTokens = 50;

/// Of each rank, [kTokens, kTopk]; half of all name expert 0.
std::vector<std::vector<std::int64_t>> routes_of_ranks(unsigned seed) {
  std::mt19937 random(seed);
  std::vector<std::vector<std::int64_t>> all(kRanks);
  for (auto& routes : all) {
    for (int t = 0; t < kTokens; ++t) {
      routes.push_back(0);
      routes.push_back(static_cast<std::int64_t>(random() % (kExperts + 1)) - 1);
    }
  }
  return all;
}

ConstTensorView view_of(const std::vector<std::int64_t>& routes) {
  return {routes.data(), Dtype::i64, {kTokens, kTopk}};
}

std::vector<std::int32_t> counts_of(const BatchBalancer& balancer,
                                    const std::vector<std::vector<std::int64_t>>& all) {
  std::vector<std::int32_t> counts;
  for (const auto& routes : all) {
    const Tensor own = balancer.counts(view_of(routes));
    counts.insert(counts.end(), own.as<std::int32_t>(), own.as<std::int32_t>() + kExperts);
  }
  return counts;
}

void plan(BatchBalancer& balancer, const std::vector<std::int32_t>& counts) {
  balancer.plan({counts.data(), Dtype::i32, {kRanks, kExperts}});
}

TEST(BatchBalancer, TokensGoToCopiesInAscendingOrder) {
  BatchBalancer balancer(kExperts, kRanks, kSlots);
  ASSERT_EQ(balancer.group_experts(), kExperts + kRanks * kSlots);
  const auto all = routes_of_ranks(7);
  plan(balancer, counts_of(balancer, all));
  balancer.fetched();
  std::vector<std::int64_t> load(kRanks);
  for (int rank = 0; rank < kRanks; ++rank) {
    const Tensor places = balancer.places(view_of(all[index(rank)]), rank);
    std::vector<std::int64_t> last(kExperts, -1);
    for (std::size_t i = 0; i < all[0].size(); ++i) {
      const std::int64_t expert = all[index(rank)][i], place = places.as<std::int64_t>()[i];
      ASSERT_EQ(place < 0, expert < 0);
      if (expert < 0) continue;
      const std::int64_t at = place / (2 + kSlots), inside = place % (2 + kSlots);
      ++load[index(at)];
      const std::int64_t held =
          inside < 2 ? at * 2 + inside : balancer.table()[index(at * kSlots + inside - 2)];
      EXPECT_EQ(held, expert) << "rank " << rank << ", slot " << i;
      // Home first, then copies in ascending rank; never back.
      const std::int64_t order = inside < 2 ? 0 : 1 + at;
      EXPECT_GE(order, last[index(expert)]);
      last[index(expert)] = order;
    }
  }
  EXPECT_EQ(load, balancer.load());
}

TEST(BatchBalancer, NoTokenGoesToACopyThatMayBeMissing) {
  BatchBalancer balancer(kExperts, kRanks, kSlots);
  const auto all = routes_of_ranks(8);
  const auto counts = counts_of(balancer, all);
  const auto places = [&] { return balancer.places(view_of(all[0]), 0); };
  const auto refused = [&] {
    expect_error(ErrorKind::invalid_argument, {"places", "not fetched"}, places);
  };
  expect_error(ErrorKind::invalid_argument, {"places", "the plan", "got none"}, places);
  plan(balancer, counts);
  const auto needed = balancer.fetches();
  EXPECT_EQ(needed, balancer.table());
  refused();
  // A fetch that failed: what the slots hold is not known, so the next plan fetches again.
  plan(balancer, counts);
  EXPECT_EQ(balancer.fetches(), needed);
  balancer.fetched();
  places();
  plan(balancer, counts);
  EXPECT_EQ(balancer.fetches(), std::vector<std::int32_t>(kRanks * kSlots, -1));
  places();
  // The owner of expert 0 has changed its weights; copies of others stay.
  balancer.invalidate(0);
  plan(balancer, counts);
  for (std::size_t place = 0; place < needed.size(); ++place) {
    const std::int32_t expert = balancer.table()[place];
    EXPECT_EQ(balancer.fetches()[place], expert == 0 || expert == 1 ? expert : -1);
  }
  refused();
}

TEST(BatchBalancer, AFetchThatFailedLosesWhatTheSlotHeld) {
  BatchBalancer balancer(kExperts, kRanks, kSlots);
  const auto busy = [&](int expert) {  // the only one, for all ranks
    std::vector<std::int32_t> counts(kRanks * kExperts);
    for (int rank = 0; rank < kRanks; ++rank) counts[index(rank * kExperts + expert)] = 100;
    plan(balancer, counts);
  };
  for (const int expert : {0, 4}) {  // both slots of rank 1 are full
    busy(expert);
    balancer.fetched();
  }
  busy(6);  // its weights do not arrive
  const auto lost = balancer.fetches();
  int again = 0;
  for (const int expert : {0, 4}) {
    busy(expert);
    for (std::size_t place = 0; place < lost.size(); ++place) {
      if (lost[place] < 0 || balancer.table()[place] < 0) continue;
      EXPECT_EQ(balancer.fetches()[place], expert) << "place " << place;
      ++again;
    }
  }
  EXPECT_GT(again, 0);
}

/// The tokens of an earlier batch go where they went, though the slots hold other copies now.
TEST(BatchBalancer, ABatchIsComputedAgainAsItWas) {
  BatchBalancer balancer(kExperts, kRanks, kSlots);
  const auto batch = routes_of_ranks(10);
  const auto places = [&] {
    const Tensor made = balancer.places(view_of(batch[2]), 2);
    return std::vector(made.as<std::int64_t>(), made.as<std::int64_t>() + kTokens * kTopk);
  };
  const auto counts = counts_of(balancer, batch);
  plan(balancer, counts);
  balancer.fetched();
  const auto table = balancer.table();
  const auto first = places();
  std::vector<std::int32_t> others(kRanks * kExperts);
  for (int rank = 0; rank < kRanks; ++rank) others[index(rank * kExperts + 6)] = 100;
  plan(balancer, others);
  balancer.fetched();
  ASSERT_NE(balancer.table(), table);
  for (int rank = 0; rank < kRanks; ++rank) balancer.invalidate(rank);
  const ConstTensorView again(counts.data(), Dtype::i32, {kRanks, kExperts});
  balancer.plan(again, true);
  EXPECT_EQ(balancer.table(), table);
  EXPECT_EQ(balancer.fetches(), table);
  balancer.fetching();
  EXPECT_EQ(places(), first);
  balancer.plan(again, true);  // weights that were on their way are not counted on
  EXPECT_EQ(balancer.fetches(), table);
  ++others[0];
  expect_error(ErrorKind::invalid_argument, {"again", "none of the last 64 batches"},
               [&] { balancer.plan({others.data(), Dtype::i32, {kRanks, kExperts}}, true); });
}

/// Though the slots held other copies in between: backward passes may come in any order.
TEST(BatchBalancer, BatchesOfTheSameCountsHaveTheSamePlan) {
  BatchBalancer balancer(6, 3, 1);
  using Counts = std::array<int, 6>;
  const Counts wide = {7, 7, 0, 6, 0, 0}, hot = {16, 0, 0, 0, 0, 4};
  const auto run = [&](const Counts& each, bool again) {
    std::vector<std::int32_t> counts;
    for (int rank = 0; rank < 3; ++rank) counts.insert(counts.end(), each.begin(), each.end());
    balancer.plan({counts.data(), Dtype::i32, {3, 6}}, again);
    balancer.fetched();
    return std::pair(balancer.plan_id(), balancer.table());
  };
  const auto first = run(wide, false), between = run(hot, false);
  ASSERT_NE(first.second, between.second);
  EXPECT_EQ(run(wide, false), first);
  EXPECT_EQ(run(hot, true), between);
  EXPECT_EQ(run(wide, true), first);
  for (int other = 1; other <= 63; ++other) run({other, 0, 0, 0, 0, 20 - other % 20}, false);
  EXPECT_EQ(run(wide, true), first);  // one of 64, and the newest again
  for (int other = 64; other < 64 + 64; ++other) run({other, 0, 0, 0, 0, 1}, false);
  EXPECT_NE(run(wide, false).first, first.first);
}

TEST(BatchBalancer, RefusesWhatCannotBe) {
  const auto wrong = [](const std::vector<std::string>& words, const std::function<void()>& call) {
    expect_error(ErrorKind::invalid_argument, words, call);
  };
  wrong({"experts", "got 9", "a multiple of 4"}, [] { BatchBalancer(9, 4, 1); });
  wrong({"slots", "got 0"}, [] { BatchBalancer(8, 4, 0); });
  wrong({"domain_size", "got -1"}, [] { BatchBalancer(8, 4, 1, -1); });
  wrong({"copy_rows", "got -1"}, [] { BatchBalancer(8, 4, 1, 0, -1); });
  BatchBalancer balancer(kExperts, kRanks, kSlots);
  const auto all = routes_of_ranks(9);
  auto counts = counts_of(balancer, all);
  wrong({"counts"}, [&] { balancer.plan({counts.data(), Dtype::i32, {2, kExperts}}); });
  wrong({"counts", "got shape [" + std::to_string(kExperts) + "]",
         "expected [" + std::to_string(kRanks) + ", "},
        [&] { balancer.plan({counts.data(), Dtype::i32, {kExperts}}); });
  counts[11] = -3;
  wrong({"counts", "-3 of rank 1, expert 3"}, [&] { plan(balancer, counts); });
  counts[11] = 3;
  plan(balancer, counts_of(balancer, all));
  balancer.fetched();
  wrong({"rank", "got 4"}, [&] { balancer.places(view_of(all[0]), 4); });
  wrong({"rank", "got -1"}, [&] { balancer.invalidate(-1); });
  wrong({"topk_idx", "as the counts of rank 1 say"}, [&] { balancer.places(view_of(all[0]), 1); });
  const std::int64_t unknown[] = {8, 0};
  wrong({"topk_idx", "expert 8"}, [&] { balancer.counts({unknown, Dtype::i64, {1, 2}}); });
}

/// What a GPU keeps between batches, in memory that begins as a GPU's does.
class StateInMemory {
 public:
  explicit StateInMemory(const BatchPlanShape& shape)
      : shape_(shape), at_(make_balance_state_layout(shape)), state_(at_.bytes) {
    std::fill_n(state_.data() + at_.held, at_.load - at_.held, std::byte{0xff});
  }
  void plan(const TestTeam& team, const std::vector<std::int32_t>& counts, std::uint64_t changed,
            bool again) {
    const BatchPlanLayout layout =
        make_batch_plan_layout(shape_, TestTeam::kWarps, team.drafters());
    const auto places = index(shape_.places());
    std::vector<std::byte> memory(layout.bytes);
    std::vector<std::int32_t> held(places), table(places), load(index(shape_.ranks));
    BalanceJob job{.changed = changed, .again = again, .state = state_.data()};
    job.plan.counts = counts.data();
    job.plan.stride = shape_.experts;
    job.plan.memory = memory.data();
    job.plan.table = table.data();
    job.plan.load = load.data();
    BalanceStep(team, shape_, layout, at_, job, held.data()).run();
  }
  void fetched() {
    for (int place = 0; place < shape_.places(); ++place) {
      const std::int32_t expert = words(at_.fetches)[place];
      if (expert >= 0) words(at_.held)[place] = expert;
    }
  }
  std::vector<std::int32_t> table() {
    return {words(at_.table), words(at_.table) + shape_.places()};
  }
  std::vector<std::int32_t> fetches() {
    return {words(at_.fetches), words(at_.fetches) + shape_.places()};
  }
  std::vector<std::int64_t> load() { return {words(at_.load), words(at_.load) + shape_.ranks}; }
  BalanceHeader header() { return *reinterpret_cast<BalanceHeader*>(words(at_.header)); }
  std::int32_t quota(int place, int source) {
    const auto entry = static_cast<std::size_t>(header().current) * at_.entry_bytes;
    return words(at_.entries + entry + at_.entry_quota)[place * shape_.ranks + source];
  }

 private:
  std::int32_t* words(std::size_t offset) {
    return reinterpret_cast<std::int32_t*>(state_.data() + offset);
  }

  BatchPlanShape shape_;
  BalanceStateLayout at_;
  std::vector<std::byte> state_;
};

void expect_quotas(BatchBalancer& balancer, StateInMemory& state) {
  const int local = static_cast<int>(balancer.experts()) / balancer.ranks();
  const std::int64_t all = balancer.group_experts();
  for (int source = 0; source < balancer.ranks(); ++source) {
    const Tensor shares = balancer.shares(source);
    for (std::int64_t i = 0; i < all; ++i) {
      const std::int64_t place = shares.as<std::int64_t>()[i],
                         in_rank = place % (local + balancer.slots());
      if (in_rank < local) continue;
      const auto copy = place / (local + balancer.slots()) * balancer.slots() + in_rank - local;
      if (balancer.table()[index(copy)] < 0) continue;
      ASSERT_EQ(shares.as<std::int64_t>()[all + i], state.quota(static_cast<int>(copy), source));
    }
  }
}

/// Batches that come again, experts that change, weights that do not come.
TEST(BatchBalancer, AStateInMemoryIsTheSameBalancer) {
  std::mt19937 random(23);
  for (int run = 0; run < 3; ++run) {
    const TestBatch first = test_batch(random);
    const BatchPlanShape& shape = first.shape;
    BatchBalancer balancer(shape.experts, shape.ranks, shape.slots, shape.domain_size,
                           shape.copy_rows, shape.max_rows == INT32_MAX ? 0 : shape.max_rows);
    StateInMemory state(shape);
    std::vector<std::vector<std::int32_t>> seen;
    for (int batch = 0; batch < 96; ++batch) {
      const bool again = batch > 5 && random() % 4 == 0;
      if (!again) seen.push_back(test_counts(random, shape.ranks, shape.experts));
      const std::size_t back = again ? random() % std::min<std::size_t>(20, seen.size()) : 0;
      const auto counts = seen[seen.size() - 1 - back];
      const std::uint64_t changed = random() % 3 == 0 ? std::uint64_t{1} << random() % 4 : 0;
      for (int rank = 0; rank < 4; ++rank) {
        if ((changed >> rank & 1) != 0) balancer.invalidate(rank);
      }
      balancer.plan({counts.data(), Dtype::i32, {shape.ranks, shape.experts}}, again);
      state.plan(TestTeam(1 + batch % 20, true), counts, changed, again);
      ASSERT_EQ(state.table(), balancer.table()) << "run " << run << ", batch " << batch;
      ASSERT_EQ(state.fetches(), balancer.fetches()) << "run " << run << ", batch " << batch;
      ASSERT_EQ(state.load(), balancer.load());
      ASSERT_EQ(state.header().plan_id, balancer.plan_id());
      if (random() % 4 == 0) continue;
      balancer.fetched();
      state.fetched();
      expect_quotas(balancer, state);
    }
    const std::vector<std::int32_t> unknown(first.counts.size(), 3);
    state.plan(TestTeam(4, true), unknown, 0, true);
    EXPECT_EQ(state.header().plan_id, -1);
  }
}

}  // namespace
}  // namespace ferry::test
