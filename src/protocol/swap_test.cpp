#include "protocol/swap.hpp"

#include <gtest/gtest.h>

#include <array>

#include "protocol/barrier.hpp"
#include "protocol/thread_ranks_test.hpp"

namespace ferry::protocol {
namespace {

constexpr Generation kSwaps = 1500;
constexpr std::uint64_t kMessageWords = 5;
using Message = std::array<std::uint64_t, kMessageWords>;

SwapLayout layout_for(int ranks) {
  SwapLayout layout;
  layout.message_bytes = sizeof(Message);
  layout.slot_stride = 64;
  layout.flags = {ranks, Place{0, 0}, kFlagStride};
  layout.slots = Place{0, layout.flags.bytes()};
  return layout;
}

class SwapOnThreads : public testing::TestWithParam<int> {};

TEST_P(SwapOnThreads, CarriesEveryMessageOfEveryGeneration) {
  const int ranks = GetParam();
  const SwapLayout layout = layout_for(ranks);
  const ThreadRanks group(ranks, layout.flags.bytes() + layout.slots_bytes());
  group.run([&](int rank, auto& reach) {
    const Swap<> swap(layout, rank, group.address(rank, layout.slots),
                      group.address(rank, layout.flags.flags));
    DeadlineWatch watch = long_wait();
    std::vector<Message> messages(static_cast<std::size_t>(ranks));
    for (Generation g = 1; g <= kSwaps; ++g) {
      for (int peer = 0; peer < ranks; ++peer) {
        for (std::uint64_t i = 0; i < kMessageWords; ++i) {
          messages[static_cast<std::size_t>(peer)][i] = word_of(rank, peer, g, i);
        }
      }
      swap.post_all(reach, g, messages.data(), sizeof(Message));
      const Status status = swap.await(g, watch);
      ASSERT_TRUE(status.ok()) << "rank " << rank << " peer " << status.peer << " seen "
                               << status.seen << " of " << g;
      for (int source = 0; source < ranks; ++source) {
        Message got;
        read_bytes(&got, swap.message(source, g), sizeof(got));
        for (std::uint64_t i = 0; i < kMessageWords; ++i) {
          ASSERT_EQ(got[i], word_of(source, rank, g, i)) << "generation " << g;
        }
      }
    }
  });
}

TEST_P(SwapOnThreads, BarrierKeepsRoundsApart) {
  const int ranks = GetParam();
  const FlagLayout flags{ranks, Place{0, 0}, kFlagStride};
  const Place cell{0, flags.bytes()};
  const ThreadRanks group(ranks, flags.bytes() + 64);
  group.run([&](int rank, auto& reach) {
    const Barrier<> barrier(flags, rank, group.address(rank, flags.flags));
    DeadlineWatch watch = long_wait();
    for (Generation g = 1; g <= kSwaps; ++g) {
      if (g % 2 == 1) {
        write(reinterpret_cast<Generation*>(group.address(rank, cell)), g);
      } else {
        for (int peer = 0; peer < ranks; ++peer) {
          ASSERT_EQ(read(reinterpret_cast<const Generation*>(group.address(peer, cell))), g - 1);
        }
      }
      barrier.arrive(reach, g);
      ASSERT_TRUE(barrier.await(g, watch).ok());
    }
  });
}

INSTANTIATE_TEST_SUITE_P(Ranks, SwapOnThreads, testing::Values(1, 2, 3, 5));

TEST(Swap, NamesTheLowestMissingRank) {
  constexpr int kRanks = 4;
  const SwapLayout layout = layout_for(kRanks);
  const ThreadRanks group(kRanks, layout.flags.bytes() + layout.slots_bytes());
  MemoryReach reach([&](int peer, Place place) { return group.address(peer, place); });
  const Message message{};
  for (const int rank : {0, 1}) {  // ranks 2 and 3 stay away
    const Swap<> swap(layout, rank, group.address(rank, layout.slots),
                      group.address(rank, layout.flags.flags));
    swap.post_all(reach, 1, message.data(), 0);
  }
  const Swap<> swap(layout, 0, group.address(0, layout.slots),
                    group.address(0, layout.flags.flags));
  DeadlineWatch watch(std::chrono::milliseconds(20));
  const Status status = swap.await(1, watch);
  EXPECT_EQ(status.code, Status::Code::kDeadline);
  EXPECT_EQ(status.peer, 2);
  EXPECT_EQ(status.expected, 1u);
  EXPECT_EQ(status.seen, 0u);
}

TEST(Swap, SeesThatItWasOvertaken) {
  constexpr int kRanks = 2;
  const SwapLayout layout = layout_for(kRanks);
  const ThreadRanks group(kRanks, layout.flags.bytes() + layout.slots_bytes());
  MemoryReach reach([&](int peer, Place place) { return group.address(peer, place); });
  const Message message{};
  for (const int rank : {0, 1}) {
    const Swap<> swap(layout, rank, group.address(rank, layout.slots),
                      group.address(rank, layout.flags.flags));
    for (Generation g = 1; g <= (rank == 1 ? 3u : 1u); ++g) {
      swap.post_all(reach, g, message.data(), 0);
    }
  }
  const Swap<> swap(layout, 0, group.address(0, layout.slots),
                    group.address(0, layout.flags.flags));
  DeadlineWatch watch(std::chrono::milliseconds(20));
  const Status status = swap.await(1, watch);
  EXPECT_EQ(status.code, Status::Code::kOvertaken);
  EXPECT_EQ(status.peer, 1);
  EXPECT_EQ(status.seen, 3u);
}

TEST(Swap, TwoSlotsAndSeparateLines) {
  const SwapLayout layout = layout_for(72);
  EXPECT_EQ(layout.slots_bytes(), 2u * 72 * 64);
  EXPECT_EQ(layout.flags.place(71).offset, 71u * 64);
}

}  // namespace
}  // namespace ferry::protocol
