#include "protocol/mask.hpp"

#include <gtest/gtest.h>

#include <array>

namespace ferry::protocol {
namespace {

/// Between the look at the flags and the first check rank 1 tells; then the wait ends by `code`.
struct TellsBeforeTheEnd {
  Flag flag;
  Status::Code code;
  int peer;
  std::uint64_t spin_ns() const { return 0; }
  std::uint64_t slice_ns() const { return 1000; }
  Status check() {
    flag.store(1, order::release);
    Status status;
    status.code = code;
    status.peer = peer;
    return status;
  }
};

void expect_rank_1_comes(Status::Code code, int peer) {
  alignas(kFlagStride) std::array<std::byte, 2 * kFlagStride> words{};
  const FlagArray flags{words.data(), kFlagStride, 2};
  std::array<std::uint8_t, 2> pending{1, 1}, came{};
  TellsBeforeTheEnd watch{flags[1], code, peer};
  EXPECT_TRUE(await_some(flags, 1, kAnyAhead, pending, came, watch).ok());
  EXPECT_EQ(came, (std::array<std::uint8_t, 2>{0, 1}));
  EXPECT_EQ(pending, (std::array<std::uint8_t, 2>{1, 0}));
}

TEST(AwaitSome, WhoIsGoneMayHaveToldBefore) {
  expect_rank_1_comes(Status::Code::kPeerFailed, 1);
}

/// As for a rank that was stopped itself, until its deadline was over.
TEST(AwaitSome, WhoCameBeforeTheDeadlineWasNoticedIsNotLate) {
  expect_rank_1_comes(Status::Code::kDeadline, -1);
}

}  // namespace
}  // namespace ferry::protocol
