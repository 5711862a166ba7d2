#include "protocol/delivery.hpp"

#include <gtest/gtest.h>

#include <vector>

#include "protocol/credit.hpp"
#include "protocol/swap.hpp"
#include "protocol/thread_ranks_test.hpp"

namespace ferry::protocol {
namespace {

constexpr Generation kDeliveries = 1000;
constexpr std::uint64_t kRowWords = 24;
constexpr std::uint64_t kRowBytes = kRowWords * sizeof(std::uint64_t);

std::vector<std::uint64_t> row_of(int source, int target, Generation g) {
  std::vector<std::uint64_t> row(kRowWords);
  for (std::uint64_t i = 0; i < kRowWords; ++i) row[i] = word_of(source, target, g, i);
  return row;
}

std::vector<std::uint64_t> read_row(const std::byte* at) {
  std::vector<std::uint64_t> row(kRowWords);
  read_bytes(row.data(), at, kRowBytes);
  return row;
}

class DeliveryOnThreads : public testing::TestWithParam<int> {};
class CreditOnThreads : public testing::TestWithParam<int> {};

TEST_P(DeliveryOnThreads, PushesIntoGrantsAndPullsFromLoans) {
  const int ranks = GetParam();
  const auto n = static_cast<std::uint64_t>(ranks);
  SwapLayout swaps;
  swaps.message_bytes = sizeof(std::uint64_t);
  swaps.slot_stride = 64;
  swaps.flags = {ranks, Place{0, 0}, kFlagStride};
  const FlagLayout delivered{ranks, Place{0, n * 64}, kFlagStride};
  const FlagLayout done{ranks, Place{0, 2 * n * 64}, kFlagStride};
  swaps.slots = Place{0, 3 * n * 64};
  const Place region = swaps.slots.at(swaps.slots_bytes());
  const Place rows = region.at(n * kRowBytes);
  const ThreadRanks group(ranks, rows.offset + kRowBytes);
  group.run([&](int rank, auto& reach) {
    const Swap<> swap(swaps, rank, group.address(rank, swaps.slots),
                      group.address(rank, swaps.flags.flags));
    const Delivery<> delivery(delivered, rank, group.address(rank, delivered.flags));
    const Loan<> loan(done, rank, group.address(rank, done.flags));
    DeadlineWatch watch = long_wait();
    for (Generation g = 1; g <= kDeliveries; ++g) {
      for (int peer = 0; peer < ranks; ++peer) {
        const std::uint64_t offset = region.at(static_cast<std::uint64_t>(peer) * kRowBytes).offset;
        swap.post(reach, peer, g, &offset);
      }
      if (g > 1) {
        ASSERT_TRUE(loan.await(g - 1, watch).ok());
      }
      write_bytes(group.address(rank, rows), row_of(rank, 99, g).data(), kRowBytes);
      ASSERT_TRUE(swap.await(g, watch).ok());
      for (int peer = 0; peer < ranks; ++peer) {
        std::uint64_t offset = 0;
        read_bytes(&offset, swap.message(peer, g), sizeof(offset));
        reach.write(peer, Place{0, offset}, row_of(rank, peer, g).data(), kRowBytes,
                    Delivery<>::tag(g));
        delivery.deliver(reach, peer, g, kRowBytes);
      }
      ASSERT_TRUE(delivery.await(g, watch).ok());
      for (int source = 0; source < ranks; ++source) {
        ASSERT_EQ(read_row(group.address(
                      rank, region.at(static_cast<std::uint64_t>(source) * kRowBytes))),
                  row_of(source, rank, g));
        // delivered[source] of this generation also says that its rows to lend are written.
        ASSERT_EQ(read_row(group.address(source, rows)), row_of(source, 99, g));
        loan.give_back(reach, source, g);
      }
    }
  });
}

TEST_P(CreditOnThreads, TwoBuffersInFlight) {
  const int ranks = GetParam();
  const auto n = static_cast<std::uint64_t>(ranks);
  const CreditLayout layout{{ranks, Place{0, 0}, kFlagStride},
                            {ranks, Place{0, n * 64}, kFlagStride}};
  const Place buffers{0, 2 * n * 64};
  const auto slot = [&](Generation g, int source) {
    return buffers.at((Credit<>::buffer(g) * n + static_cast<std::uint64_t>(source)) * kRowBytes);
  };
  const ThreadRanks group(ranks, buffers.offset + 2 * n * kRowBytes);
  group.run([&](int rank, auto& reach) {
    const Credit<> credit(layout, rank, group.address(rank, layout.arrived.flags),
                          group.address(rank, layout.released.flags));
    DeadlineWatch watch = long_wait();
    DropOrder<> order;
    for (Generation g = 1; g <= kDeliveries; ++g) {
      for (int peer = 0; peer < ranks; ++peer) {
        ASSERT_TRUE(credit.await_credit(peer, g, watch).ok());
        reach.write(peer, slot(g, rank), row_of(rank, peer, g).data(), kRowBytes, Credit<>::tag(g));
        credit.announce(reach, peer, g, kRowBytes);
      }
      if (g % 2 != 0) continue;  // hold both, look at the newer first
      for (const Generation held : {g, g - 1}) {
        ASSERT_TRUE(credit.await_arrivals(held, watch).ok());
        for (int source = 0; source < ranks; ++source) {
          ASSERT_EQ(read_row(group.address(rank, slot(held, source))), row_of(source, rank, held));
        }
        if (const Generation upto = order.drop(held); upto > 0) credit.release(reach, upto);
      }
    }
  });
}

INSTANTIATE_TEST_SUITE_P(Ranks, DeliveryOnThreads, testing::Values(1, 2, 3, 5));
INSTANTIATE_TEST_SUITE_P(Ranks, CreditOnThreads, testing::Values(1, 2, 3, 5));

TEST(DropOrder, HoldsBackWhatIsStillAlive) {
  DropOrder<> order;
  EXPECT_EQ(order.drop(2), 0u);
  EXPECT_EQ(order.drop(1), 2u);
  EXPECT_EQ(order.drop(1), 2u);  // dropped twice: no effect
  EXPECT_EQ(order.drop(3), 3u);
  EXPECT_EQ(order.drop(6), 3u);
  EXPECT_EQ(order.drop(5), 3u);
  EXPECT_EQ(order.drop(4), 6u);
}

}  // namespace
}  // namespace ferry::protocol
