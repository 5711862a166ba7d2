#include "core/experts/balance.hpp"

#include <gtest/gtest.h>

#include <algorithm>
#include <functional>
#include <random>
#include <set>

#include "core/test_errors.hpp"

namespace ferry {
namespace {

constexpr unsigned kBalanceSeed = 21;

struct BalanceShape {
  int seats, domain_size, slots, copies;
  std::vector<std::uint8_t> live;
  std::vector<double> load;
};

/// Of random sizes; the experts fit.
BalanceShape random_shape(std::mt19937& random, int most_seats, int most_slots) {
  const auto below = [&](int n) { return static_cast<int>(random() % static_cast<unsigned>(n)); };
  BalanceShape shape{1 + below(most_seats), below(4), 1 + below(most_slots), 1 + below(3), {}, {}};
  shape.live.resize(index(shape.seats));
  for (auto& live : shape.live) live = below(4) != 0;
  shape.live[index(below(shape.seats))] = 1;
  const int places = static_cast<int>(std::ranges::count(shape.live, 1)) * shape.slots;
  shape.load.resize(index(1 + below(places)));
  for (auto& load : shape.load) load = below(5) == 0 ? 0 : below(1000);
  return shape;
}
BalanceRequest request_of(const BalanceShape& shape, const Domains& domains) {
  return {&domains, shape.live, shape.slots, shape.load, shape.copies, nullptr};
}
double heaviest(const ExpertTable& table, const std::vector<double>& load) {
  std::vector<double> seats(index(table.seats()));
  for (std::int32_t e = 0; e < table.experts(); ++e) {
    for (const std::int32_t place : table.places(e)) {
      seats[index(table.seat_of(place))] +=
          load[index(e)] / static_cast<double>(table.places(e).size());
    }
  }
  return *std::ranges::max_element(seats);
}
void expect_valid(const ExpertTable& table, const BalanceRequest& request) {
  const std::vector<int> copies = copies_for(request);
  EXPECT_TRUE(table.orphans(request.live).empty());
  for (std::int32_t e = 0; e < table.experts(); ++e) {
    std::set<int> seats;
    for (const std::int32_t place : table.places(e)) {
      EXPECT_EQ(table.expert_at(place), e);
      EXPECT_NE(request.live[index(table.seat_of(place))], 0);
      EXPECT_TRUE(seats.insert(table.seat_of(place)).second) << "twice on a seat";
    }
    EXPECT_EQ(static_cast<int>(seats.size()), copies[index(e)]);
  }
}

TEST(Balance, PlacesEveryExpertOnLiveSeats) {
  std::mt19937 random(kBalanceSeed);
  for (int i = 0; i < 400; ++i) {
    SCOPED_TRACE(i);
    const BalanceShape shape = random_shape(random, 12, 5);
    const Domains domains = Domains::blocks(shape.seats, shape.domain_size);
    const BalanceRequest request = request_of(shape, domains);
    const ExpertTable table = balance(request);
    expect_valid(table, request);
    EXPECT_EQ(table, balance(request));
  }
}

/// The least that the heaviest copy can have to do, by trying all numbers of copies.
double lightest_copy(const std::vector<double>& load, std::size_t expert, int left, int seats) {
  if (expert == load.size()) return 0;
  double best = 1e300;
  for (int more = 0; more <= left && more < seats; ++more) {
    const double rest = lightest_copy(load, expert + 1, left - more, seats);
    best = std::min(best, std::max(load[expert] / (1 + more), rest));
  }
  return best;
}
TEST(Balance, CopiesAreAsLightAsCanBe) {
  std::mt19937 random(kBalanceSeed);
  for (int i = 0; i < 200; ++i) {
    SCOPED_TRACE(i);
    BalanceShape shape = random_shape(random, 4, 3);
    shape.copies = 1;
    const Domains domains = Domains::blocks(shape.seats, 0);
    const std::vector<int> copies = copies_for(request_of(shape, domains));
    double heaviest_copy = 0;
    for (std::size_t e = 0; e < copies.size(); ++e) {
      heaviest_copy = std::max(heaviest_copy, shape.load[e] / copies[e]);
    }
    const int seats = static_cast<int>(std::ranges::count(shape.live, 1));
    const int left = seats * shape.slots - static_cast<int>(shape.load.size());
    EXPECT_DOUBLE_EQ(heaviest_copy, lightest_copy(shape.load, 0, left, seats));
  }
}

/// The least that the busiest seat can have to do with one copy of each expert, by trying all.
double best_packing(const std::vector<double>& load, int seats, int slots) {
  std::vector<double> of(index(seats));
  std::vector<int> used(index(seats));
  const std::function<double(std::size_t)> place = [&](std::size_t expert) {
    if (expert == load.size()) return *std::ranges::max_element(of);
    double best = 1e300;
    for (std::size_t s = 0; s < of.size(); ++s) {
      if (used[s] == slots) continue;
      ++used[s];
      of[s] += load[expert];
      best = std::min(best, place(expert + 1));
      of[s] -= load[expert];
      --used[s];
    }
    return best;
  };
  return place(0);
}
TEST(Balance, TheBusiestSeatIsNearTheBest) {
  std::mt19937 random(kBalanceSeed);
  for (int i = 0; i < 60; ++i) {
    SCOPED_TRACE(i);
    const int seats = 2 + static_cast<int>(random() % 2),
              slots = 2 + static_cast<int>(random() % 2);
    std::vector<double> load(index(seats * slots));
    for (auto& it : load) it = 1 + static_cast<double>(random() % 100);
    const std::vector<std::uint8_t> live(index(seats), 1);
    const Domains domains = Domains::blocks(seats, 0);
    const ExpertTable table = balance({&domains, live, slots, load});
    EXPECT_LE(heaviest(table, load), 1.15 * best_packing(load, seats, slots));
  }
}

TEST(Balance, SurvivesAnyDeath) {
  std::mt19937 random(kBalanceSeed);
  for (int i = 0; i < 100; ++i) {
    SCOPED_TRACE(i);
    BalanceShape shape = random_shape(random, 8, 4);
    const Domains domains = Domains::blocks(shape.seats, shape.domain_size);
    const ExpertTable before = balance(request_of(shape, domains));
    const int seats = static_cast<int>(std::ranges::count(shape.live, 1));
    const auto experts = static_cast<int>(shape.load.size());
    const bool twice = shape.copies > 1 && seats > 1 && seats * shape.slots >= 2 * experts;
    for (int victim = 0; victim < shape.seats; ++victim) {
      if (shape.live[index(victim)] == 0) continue;
      std::vector<std::uint8_t> live = shape.live;
      live[index(victim)] = 0;
      if (twice) {
        EXPECT_TRUE(before.orphans(live).empty()) << "seat " << victim;
      }
      if ((seats - 1) * shape.slots < experts) continue;
      BalanceRequest after = request_of(shape, domains);
      after.live = live;
      after.old = &before;
      expect_valid(balance(after), after);
    }
  }
}

TEST(Balance, CopiesAreInBothDomains) {
  std::mt19937 random(kBalanceSeed);
  const Domains domains = Domains::blocks(8, 4);
  const std::vector<std::uint8_t> live(8, 1);
  for (int i = 0; i < 20; ++i) {
    SCOPED_TRACE(i);
    std::vector<double> load(8);
    for (auto& it : load) it = static_cast<double>(1u << random() % 10);
    const ExpertTable table = balance({&domains, live, 3, load, 2});
    for (std::int32_t e = 0; e < table.experts(); ++e) {
      std::set<int> in;
      for (const std::int32_t place : table.places(e)) in.insert(domains.of(table.seat_of(place)));
      EXPECT_EQ(in.size(), 2u) << "expert " << e;
    }
  }
}

TEST(Balance, MovesNoMoreThanItMust) {
  std::mt19937 random(kBalanceSeed);
  for (int i = 0; i < 200; ++i) {
    SCOPED_TRACE(i);
    BalanceShape shape = random_shape(random, 8, 4);
    const Domains domains = Domains::blocks(shape.seats, shape.domain_size);
    const ExpertTable before = balance(request_of(shape, domains));
    BalanceRequest again = request_of(shape, domains);
    again.old = &before;
    EXPECT_EQ(balance(again), before);
    std::vector<double> load = shape.load;
    for (auto& it : load) it = static_cast<double>(random() % 1000);
    again.load = load;
    const ExpertTable after = balance(again);
    expect_valid(after, again);
    const std::vector<int> copies = copies_for(again);
    int moved = 0, least = 0;
    for (std::int32_t e = 0; e < after.experts(); ++e) {
      const auto had = static_cast<int>(before.places(e).size());
      least += std::max(0, copies[index(e)] - had);
      for (const std::int32_t place : after.places(e)) moved += before.expert_at(place) != e;
    }
    // A move more where the only free slot is on a seat that has the expert already.
    EXPECT_LE(moved, least + after.seats());
    EXPECT_GE(moved, least);
  }
}

TEST(ExpertTable, SourcesSendToTheirOwnDomainFirst) {
  const Domains domains = Domains::blocks(4, 2);
  ExpertTable table(3, 4, 2);
  for (const std::int32_t place : {0, 2, 5}) table.put(place, 0);
  table.put(7, 1);
  for (const int source : {0, 3}) {
    const CopyChoice choice = table.choice(source, domains);
    std::vector<int> hits(8);
    for (std::int64_t token = 0; token < 1000; ++token) {
      ++hits[index(choice.place(source, token, 0))];
      EXPECT_EQ(choice.place(source, token, 1), 7);
      EXPECT_EQ(choice.place(source, token, 2), -1);
    }
    if (source == 0) {
      EXPECT_NEAR(hits[0], 500, 60);
      EXPECT_NEAR(hits[2], 500, 60);
    } else {
      EXPECT_EQ(hits[5], 1000);
    }
  }
  const std::vector<std::uint8_t> live{1, 1, 1, 0};
  EXPECT_EQ(table.orphans(live), (std::vector<std::int32_t>{1, 2}));
}

TEST(Balance, RefusesWhatDoesNotFit) {
  const Domains domains = Domains::blocks(2, 0);
  const std::vector<std::uint8_t> live{1, 0};
  const std::vector<double> load{1, 2, 3};
  const auto refused = [](const std::vector<std::string>& words, const BalanceRequest& request) {
    test::expect_error(ErrorKind::invalid_argument, words, [&] { balance(request); });
  };
  refused({"slots", "2 on the 1 of 2 ranks", "at least 3"}, {&domains, live, 2, load});
  const std::vector<double> negative{1, -2};
  refused({"load", "-2"}, {&domains, live, 2, negative});
  const ExpertTable old(2, 3, 2);
  const std::vector<double> two{1, 2};
  refused({"old"}, {&domains, live, 2, two, 1, &old});
}

}  // namespace
}  // namespace ferry
