// The tuner of calls whose times come late, over the swap that brings them: ranks that run ahead of
// each other, on calls that end when all ranks have made them.
#include "engine/late_tuner.hpp"

#include <algorithm>
#include <cmath>
#include <deque>
#include <functional>
#include <memory>
#include <optional>
#include <random>

#include "engine/test_groups.hpp"
#include "engine/time_swap.hpp"
#include "fabric/local/local.hpp"

namespace ferry::engine::test {
namespace {

constexpr TuningKey kCombine{.call = CallKind::combine};

GroupConfig tuned_config(int fewest = 1, int most = 24) {
  GroupConfig config;
  config.tune = true;
  config.fewest_sms = fewest;
  config.most_sms = most;
  return config;
}

/// A rank with what it needs to swap times.
struct TimedRank {
  std::shared_ptr<Memory> memory;
  fabric::Segment control;
  GroupConfig config;
  std::unique_ptr<Channel> channel;
  std::unique_ptr<TimeSwap> swap;
  std::unique_ptr<LateTuner> tuner;
  std::deque<LateTuner::Choice> flying{};  // launched
  std::uint64_t launched = 0;
  int timed = 0;

  TimedRank(Bootstrap& bootstrap, const GroupConfig& of) : config(of) {
    memory = std::make_shared<Memory>(fabric::make_local_fabric(bootstrap, 20s));
    const ControlLayout layout =
        make_control_layout(bootstrap.size(), sizeof(StepMessage) + fabric::kMaxHandleBytes);
    const std::size_t bytes = layout.bytes + TimeSwap::bytes(bootstrap.size());
    control = memory->fabric->register_memory(bytes);
    const auto handles = bootstrap.all_gather(control.handle, 20s);
    for (int peer = 0; peer < bootstrap.size(); ++peer) {
      if (peer == bootstrap.rank()) continue;
      memory->fabric->attach(peer, 0, bytes, handles[static_cast<std::size_t>(peer)]);
    }
    bootstrap.all_gather({}, 20s);
    channel = std::make_unique<Channel>(memory, config, control, layout);
    swap = std::make_unique<TimeSwap>(*channel, *memory->fabric, control, layout.bytes);
    tuner = std::make_unique<LateTuner>(config, bootstrap.size());
  }
};

/// All ranks, driven by one thread.
struct TimedRanks {
  /// Seconds of a call with so many SMs.
  std::function<double(int)> cost = [](int num_sms) {
    return 1e-6 * (100 + std::max(400.0 / num_sms, 25.0));
  };
  std::function<std::int64_t(std::size_t)> tokens = [](std::size_t) { return 4096; };
  /// How many calls a rank may have launched that have not ended.
  std::uint64_t ahead = 4;
  /// Whether this rank gives this call a number of SMs of its own.
  std::function<bool(std::size_t, std::uint64_t)> asks = [](std::size_t, std::uint64_t) {
    return false;
  };
  std::vector<std::unique_ptr<TimedRank>> ranks;
  std::mt19937 random{kSeed};
  std::uint64_t ended = 0;
  int mixed = 0;  // calls in which ranks differed

  TimedRanks(int count, const GroupConfig& config) : ranks(static_cast<std::size_t>(count)) {
    const auto bootstraps = thread_bootstrap(count);
    on_ranks(count, [&](int r) {
      const auto at = static_cast<std::size_t>(r);
      ranks[at] = std::make_unique<TimedRank>(*bootstraps[at], config);
    });
  }

  void launch(std::size_t r) {
    TimedRank& rank = *ranks[r];
    rank.swap->go_on(*rank.tuner);
    const std::uint64_t number = ++rank.launched;
    LateTuner::Choice made{.num_sms = 7, .number = number};
    if (!asks(r, number)) {
      TuningKey key = kCombine;
      key.tokens_class = tokens_class_of(tokens(r));
      made = rank.tuner->next(key, tokens(r), number);
      EXPECT_GE(made.num_sms, rank.config.fewest_sms);
      EXPECT_LE(made.num_sms, rank.config.most_sms);
    }
    rank.timed += made.timed ? 1 : 0;
    rank.flying.push_back(made);
  }

  /// The next call ends, if all have launched it.
  void end() {
    for (const auto& rank : ranks) {
      if (rank->flying.empty()) return;
    }
    ++ended;
    int fewest = 1 << 10, most = 0;
    for (const auto& rank : ranks) {
      fewest = std::min(fewest, rank->flying.front().num_sms);
      most = std::max(most, rank->flying.front().num_sms);
    }
    mixed += fewest < most ? 1 : 0;
    std::uniform_real_distribution<double> noise(1, 1.01);
    const std::size_t last = random() % ranks.size();  // the others wait for it
    for (std::size_t r = 0; r < ranks.size(); ++r) {
      TimedRank& rank = *ranks[r];
      const LateTuner::Choice made = rank.flying.front();
      rank.flying.pop_front();
      if (!made.timed) continue;
      const double waits = r == last ? 0 : 1e-6 * static_cast<double>(random() % 500);
      if (random() % 50 == 0) {
        rank.tuner->lost(made.number);
      } else {
        rank.tuner->took(made.number, cost(fewest) * noise(random) + waits);
      }
    }
  }

  void run(std::uint64_t calls) {
    const std::uint64_t until = ended + calls;
    while (ended < until) {
      const std::size_t r = random() % (ranks.size() + 1);
      if (r == ranks.size()) {
        end();
      } else if (ranks[r]->launched < ended + ahead) {
        launch(r);
      }
    }
    const auto flies = [](const auto& rank) { return !rank->flying.empty(); };
    while (std::any_of(ranks.begin(), ranks.end(), flies)) {
      for (std::size_t i = 0; i < ranks.size(); ++i) {
        if (ranks[i]->launched < until + ahead) launch(i);
      }
      end();
    }
    for (int i = 0; i < 200; ++i) {
      for (const auto& rank : ranks) rank->swap->go_on(*rank->tuner);
    }
  }

  TunedCall tuned() const { return ranks.front()->tuner->tuned().front(); }
  void expect_alike() const {
    for (const auto& rank : ranks) {
      const std::vector<TunedCall> first = ranks.front()->tuner->tuned();
      const std::vector<TunedCall> calls = rank->tuner->tuned();
      ASSERT_EQ(calls.size(), first.size());
      for (std::size_t i = 0; i < calls.size(); ++i) {
        EXPECT_EQ(calls[i].num_sms, first[i].num_sms);
        EXPECT_EQ(calls[i].probes, first[i].probes);
        EXPECT_EQ(calls[i].tokens, first[i].tokens);
        EXPECT_EQ(calls[i].seconds, first[i].seconds);  // to the bit
        EXPECT_EQ(calls[i].why, first[i].why);
      }
    }
  }
};

TEST(LateTuner, RanksThatRunAheadSettleAlike) {
  for (const int count : {1, 2, 3}) {
    for (const std::uint64_t ahead : {1, 4, 40}) {
      TimedRanks all(count, tuned_config());
      all.ahead = ahead;
      all.run(60 * (ahead + 10));
      all.expect_alike();
      const TunedCall tuned = all.tuned();
      EXPECT_TRUE(tuned.settled) << ahead << " ahead: " << tuned.why;
      EXPECT_EQ(tuned.num_sms, 16);  // the fewest of those that are as fast
      EXPECT_LE(tuned.probes, 30);
      // Of one that comes last: without the time for which the others waited for it.
      EXPECT_NEAR(tuned.seconds, all.cost(tuned.num_sms), 0.02 * tuned.seconds);
    }
  }
}

TEST(LateTuner, CallsInWhichRanksDifferDoNotCount) {
  TimedRanks all(2, tuned_config());
  all.ahead = 8;
  // Were they counted, so many SMs would seem to be slow as one, whatever they are.
  all.cost = [](int num_sms) { return num_sms == 24 ? 1e-6 : 1e-3; };
  all.run(1500);
  EXPECT_GT(all.mixed, 0);
  all.expect_alike();
  EXPECT_EQ(all.tuned().num_sms, 24);
  EXPECT_NEAR(all.tuned().seconds, 1e-6, 1e-7);
}

TEST(LateTuner, ARankThatAsksForItsOwnNumberNowAndThen) {
  TimedRanks all(3, tuned_config(2, 8));
  all.asks = [](std::size_t rank, std::uint64_t number) { return number % (rank + 2) == 0; };
  all.run(1500);
  all.expect_alike();
  EXPECT_TRUE(all.tuned().settled);
  EXPECT_EQ(all.tuned().num_sms, 8);
}

TEST(LateTuner, OneWhoNeverTellsKeepsTheOthersFromTiming) {
  TimedRanks all(2, tuned_config());
  all.asks = [](std::size_t rank, std::uint64_t) { return rank == 1; };
  all.run(500);
  EXPECT_LE(all.ranks[0]->timed, 80);
  EXPECT_TRUE(all.ranks[0]->tuner->tuned().empty());
}

TEST(LateTuner, RanksOfDifferentTokensAreOfOneKind) {
  TimedRanks all(3, tuned_config());
  all.tokens = [](std::size_t rank) { return rank == 2 ? 0 : 4096 >> rank; };
  all.run(1500);
  all.expect_alike();
  ASSERT_EQ(all.ranks.front()->tuner->tuned().size(), 1u);
  EXPECT_EQ(all.tuned().tokens, 4096);
  EXPECT_TRUE(all.tuned().settled);
  const int before = all.mixed;
  all.run(100);
  EXPECT_EQ(all.mixed, before);
}

TEST(LateTuner, OfSettledCallsOneInEightIsTimed) {
  TimedRanks all(2, tuned_config());
  all.run(1000);
  ASSERT_TRUE(all.tuned().settled);
  const int before = all.ranks[0]->timed, other = all.ranks[1]->timed;
  all.run(800);
  EXPECT_NEAR(all.ranks[0]->timed - before, 100, 30);
  EXPECT_EQ(all.ranks[0]->timed - before, all.ranks[1]->timed - other);
  all.cost = [](int num_sms) { return 1e-6 * (500 + 40.0 * num_sms); };  // others on the SMs
  all.run(4000);
  all.expect_alike();
  EXPECT_TRUE(all.tuned().settled);
  EXPECT_EQ(all.tuned().num_sms, 1);
  EXPECT_NE(all.tuned().why.find("begun again"), std::string::npos);
}

TEST(LateTuner, OffNothingIsChosen) {
  GroupConfig config = tuned_config();
  config.tune = false;
  LateTuner tuner(config, 2);
  EXPECT_FALSE(tuner.on());
  EXPECT_EQ(tuner.as_started(kCombine), 0);
  EXPECT_TRUE(tuner.tuned().empty());
}

TEST(LateTuner, BeginsWithTheFileWithinTheBounds) {
  GroupConfig config = tuned_config(2, 10);
  TunedCall start{.call = "combine"};
  start.num_sms = 6;
  config.tuning = {start};
  EXPECT_EQ(LateTuner(config, 2).next(kCombine, 1, 1).num_sms, 6);
  EXPECT_EQ(LateTuner(config, 2).best(kCombine), 6);
  EXPECT_EQ(LateTuner(config, 2).as_started(kCombine), 6);
  config.tuning.front().num_sms = 16;
  EXPECT_EQ(LateTuner(config, 2).next(kCombine, 1, 1).num_sms, 10);
  EXPECT_EQ(LateTuner(config, 2).as_started(kCombine), 10);
}

TEST(LateTuner, AfterARankIsLostTheOthersBeginAnew) {
  TimedRanks all(3, tuned_config());
  all.run(100);
  const Epoch next{.number = 2, .first = 1000, .ranks = {0, 2}};
  all.ranks.erase(all.ranks.begin() + 1);
  for (const auto& rank : all.ranks) {
    rank->channel->begin_epoch(next);
    rank->swap->begin_epoch(next.number);
    rank->tuner->forget();
    EXPECT_TRUE(rank->tuner->tuned().empty());
  }
  all.run(1000);
  all.expect_alike();
  EXPECT_TRUE(all.tuned().settled);
}

// What comes from others is not trusted: neither how many there are, nor what they say.
TEST(LateTuner, WhatCannotBeIsNotCounted) {
  LateTuner tuner(tuned_config(), 2);
  const auto made = tuner.next(kCombine, 16, 1);
  tuner.took(made.number, 1e-3);
  CallTimes mine = tuner.tell(), theirs = mine;
  theirs.count = ~std::uint64_t{0};
  theirs.calls[0].seconds = std::nanf("");
  theirs.calls[1].num_sms = ~0u;
  tuner.heard({mine, theirs});
  for (const TunedCall& one : tuner.tuned()) EXPECT_EQ(one.probes, 0);
  mine.count = 0;
  for (int i = 0; i < 1000; ++i) tuner.heard({mine, theirs});  // is not kept for ever
}

}  // namespace
}  // namespace ferry::engine::test
