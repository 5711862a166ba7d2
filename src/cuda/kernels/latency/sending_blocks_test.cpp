// Every block of a latency dispatch has one place among those that send or among those that
// receive.
#include "cuda/kernels/latency/sending_blocks.hpp"

#include <gtest/gtest.h>

#include <vector>

namespace ferry::cuda {
namespace {

/// Of `shares`, each 0 … count - 1 is there once.
void expect_dense(const std::vector<BlockShare>& shares, int count) {
  std::vector<int> seen(static_cast<std::size_t>(count), 0);
  EXPECT_EQ(static_cast<int>(shares.size()), count);
  for (const BlockShare& share : shares) {
    EXPECT_EQ(share.blocks, count);
    ASSERT_GE(share.index, 0);
    ASSERT_LT(share.index, count);
    ++seen[static_cast<std::size_t>(share.index)];
  }
  for (const int times : seen) EXPECT_EQ(times, 1);
}

TEST(LatencyBlocks, EachHasOnePlace) {
  for (const int num_sms : {1, 3, 4, 16, 132}) {
    for (const int heads : {1, 4, 32}) {
      for (int blocks = 1; blocks <= 2 * num_sms + 3; ++blocks) {
        SCOPED_TRACE(testing::Message() << blocks << " blocks, " << num_sms << " SMs, " << heads);
        const SendingBlocks shared = sending_blocks(blocks, num_sms, 2, heads);
        std::vector<BlockShare> senders, receivers;
        for (int block = 0; block < blocks; ++block) {
          const bool sends = shared.sends_only(block);
          (sends ? senders : receivers)
              .push_back(sends ? shared.sender(block) : shared.receiver(block));
          EXPECT_FALSE(sends && block >= blocks - heads) << "a block that makes a header sends";
          // The two of an SM do the same.
          const int other = block + shared.row;
          EXPECT_TRUE(other >= blocks || shared.sends_only(other) == sends);
        }
        expect_dense(receivers, shared.receiving());
        expect_dense(senders, shared.sending());
      }
    }
  }
}

TEST(LatencyBlocks, AQuarterSends) {
  EXPECT_EQ(sending_blocks(264, 132, 2, 4).sending(), 66);
  EXPECT_EQ(sending_blocks(132, 132, 2, 4).sending(), 33);
  EXPECT_EQ(sending_blocks(3, 132, 2, 1).sending(), 0);    // too few
  EXPECT_EQ(sending_blocks(265, 132, 2, 4).sending(), 0);  // they would not run at once
  EXPECT_EQ(sending_blocks(140, 132, 2, 4).sending(), 0);  // headers would fall on those that send
}

}  // namespace
}  // namespace ferry::cuda
