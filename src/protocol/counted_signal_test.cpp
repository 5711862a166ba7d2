#include "protocol/counted_signal.hpp"

#include <gtest/gtest.h>

#include <algorithm>
#include <random>
#include <vector>

namespace ferry::protocol {
namespace {

using Counted = CountedSignals<int>;

struct Released {
  std::vector<std::uint64_t> values;
  void operator()(int, const Counted::Arrived& arrived) { values.push_back(arrived.value); }
};

TEST(CountedSignals, WaitsForEveryByteOfItsTag) {
  Counted counted(2);
  Released released;
  EXPECT_TRUE(counted.signal(1, {1, 0, 7, 70, 24}, released).ok());
  counted.piece(1, 71, 100, released);  // another tag
  counted.piece(0, 70, 100, released);  // another source
  counted.piece(1, 70, 16, released);
  EXPECT_TRUE(released.values.empty());
  EXPECT_EQ(counted.waiting(1), 1u);
  counted.piece(1, 70, 8, released);
  EXPECT_EQ(released.values, std::vector<std::uint64_t>{7});
  EXPECT_EQ(counted.waiting(1), 0u);
}

TEST(CountedSignals, OneFlagTakesItsValuesInOrder) {
  Counted counted(1);
  Released released;
  EXPECT_TRUE(counted.signal(0, {2, 5, 20, 2, 0}, released).ok());
  EXPECT_TRUE(released.values.empty());
  EXPECT_TRUE(counted.signal(0, {1, 6, 99, 9, 0}, released).ok());  // another flag: no wait
  EXPECT_TRUE(counted.signal(0, {1, 5, 10, 1, 0}, released).ok());
  EXPECT_EQ(released.values, (std::vector<std::uint64_t>{99, 10, 20}));
}

TEST(CountedSignals, RefusesASequenceNumberTwice) {
  Counted counted(1);
  Released released;
  EXPECT_TRUE(counted.signal(0, {1, 0, 1, 1, 8}, released).ok());
  EXPECT_EQ(counted.signal(0, {1, 0, 1, 1, 8}, released).code, Status::Code::kMismatch);
  counted.piece(0, 1, 8, released);
  EXPECT_EQ(counted.signal(0, {1, 0, 1, 1, 8}, released).code, Status::Code::kMismatch);
  EXPECT_EQ(released.values.size(), 1u);
}

TEST(CountedSignals, AnyOrderReleasesEverythingOnceAndInOrder) {
  constexpr std::uint64_t kSeed = 20261121;
  SCOPED_TRACE(kSeed);
  std::mt19937_64 random(kSeed);
  constexpr std::uint64_t kSignals = 20;
  struct Event {
    std::uint64_t tag, bytes;
    bool signal;
  };
  for (int round = 0; round < 50; ++round) {
    std::vector<Event> events;
    std::vector<std::uint64_t> total(kSignals + 1);
    for (std::uint64_t tag = 1; tag <= kSignals; ++tag) {
      for (std::uint64_t piece = random() % 4; piece > 0; --piece) {
        events.push_back({tag, 1 + random() % 100, false});
        total[tag] += events.back().bytes;
      }
      events.push_back({tag, total[tag], true});
    }
    std::shuffle(events.begin(), events.end(), random);
    Counted counted(1);
    Released released;
    std::vector<std::uint64_t> landed(kSignals + 1);
    for (const Event& event : events) {
      if (event.signal) {
        EXPECT_TRUE(
            counted.signal(0, {event.tag, 0, event.tag, event.tag, event.bytes}, released).ok());
      } else {
        landed[event.tag] += event.bytes;
        counted.piece(0, event.tag, event.bytes, released);
      }
      for (std::size_t i = 0; i < released.values.size(); ++i) {
        ASSERT_EQ(released.values[i], i + 1);
        ASSERT_EQ(landed[i + 1], total[i + 1]) << "released before its bytes";
      }
    }
    EXPECT_EQ(released.values.size(), kSignals);
  }
}

}  // namespace
}  // namespace ferry::protocol
