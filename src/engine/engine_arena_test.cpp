// The arena: no two regions overlap, what is given back is whole again.
#include "engine/arena.hpp"

#include <gtest/gtest.h>

#include <cstdint>
#include <random>
#include <utility>
#include <vector>

#include "engine/test_groups.hpp"

namespace ferry::engine::test {
namespace {

fabric::Segment segment(fabric::SegmentId id, std::vector<std::byte>& memory) {
  return {id, memory.data(), memory.size(), {}};
}

TEST(Arena, RegionsNeverOverlapAndComeBackWhole) {
  std::mt19937 random(kSeed);
  SCOPED_TRACE("seed " + std::to_string(kSeed));
  std::vector<std::byte> first(64 * 1024), second(96 * 1024);
  Arena arena;
  arena.add(segment(1, first));
  arena.add(segment(4, second));
  std::vector<std::pair<Region, std::byte>> held;
  std::size_t used = 0;
  for (int step = 0; step < 5000; ++step) {
    if (random() % 2 == 0 || held.empty()) {
      const std::size_t bytes = random() % 9000;
      const auto region = arena.allocate(bytes);
      if (!region) continue;
      ASSERT_GE(region->bytes, std::max<std::size_t>(bytes, 1));
      ASSERT_EQ(region->address.offset % kRegionAlignment, 0u);
      const auto mark = static_cast<std::byte>(step);
      std::fill_n(region->data, region->bytes, mark);
      used += region->bytes;
      held.emplace_back(*region, mark);
    } else {
      const std::size_t at = random() % held.size();
      const auto [region, mark] = held[at];
      for (std::size_t i = 0; i < region.bytes; ++i) ASSERT_EQ(region.data[i], mark);
      arena.release(region);
      used -= region.bytes;
      held.erase(held.begin() + static_cast<std::ptrdiff_t>(at));
    }
    ASSERT_EQ(arena.used_bytes(), used);
  }
  for (const auto& [region, mark] : held) arena.release(region);
  EXPECT_EQ(arena.used_bytes(), 0u);
  EXPECT_TRUE(arena.allocate(second.size()));
  EXPECT_TRUE(arena.allocate(first.size()));
  EXPECT_FALSE(arena.allocate(1));
}

TEST(Arena, SizesThatDoNotFitAreNothing) {
  std::vector<std::byte> memory(4096);
  Arena arena;
  arena.add(segment(0, memory));
  EXPECT_FALSE(arena.allocate(4097));
  EXPECT_FALSE(arena.allocate(SIZE_MAX));
  EXPECT_FALSE(arena.allocate(SIZE_MAX - kRegionAlignment + 2));
  EXPECT_NE(arena.allocate(0)->data, arena.allocate(0)->data);
}

TEST(Arena, HoldsBackWhatWasTakenBeforeAFailure) {
  std::vector<std::byte> memory(4 * kRegionAlignment);
  Arena arena;
  arena.add(segment(3, memory));
  const Region before = *arena.allocate(1);
  const Region both = *arena.allocate(2 * kRegionAlignment);
  arena.hold_back();
  EXPECT_TRUE(arena.holds_back());
  arena.release(before);
  const Region after = *arena.allocate(1);
  EXPECT_NE(after.data, before.data);
  EXPECT_FALSE(arena.allocate(1));
  arena.hold_back();  // another failure
  arena.release(after);
  arena.release(both);
  EXPECT_FALSE(arena.allocate(1));
  EXPECT_EQ(arena.used_bytes(), memory.size());
  arena.free_held();
  EXPECT_FALSE(arena.holds_back());
  EXPECT_EQ(arena.used_bytes(), 0u);
  EXPECT_TRUE(arena.allocate(memory.size()));
}

TEST(Arena, FindsWholeRangesOnly) {
  std::vector<std::byte> memory(4096);
  Arena arena;
  arena.add(segment(7, memory));
  const auto found = arena.find(memory.data() + 100, 3996);
  ASSERT_TRUE(found);
  EXPECT_EQ(found->segment, 7u);
  EXPECT_EQ(found->offset, 100u);
  EXPECT_FALSE(arena.find(memory.data() + 100, 3997));
  EXPECT_FALSE(arena.find(memory.data() + 4096, 0));
  EXPECT_FALSE(arena.find(nullptr, 0));
  EXPECT_FALSE(arena.find(memory.data(), SIZE_MAX));
}

}  // namespace
}  // namespace ferry::engine::test
