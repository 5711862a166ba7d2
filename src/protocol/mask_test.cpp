#include "protocol/mask.hpp"

#include <gtest/gtest.h>

#include <array>

namespace ferry::protocol {
namespace {

/// Between the look at the flags and the first check rank 1 tells, and is gone.
struct TellsAndGoes {
  Flag flag;
  std::uint64_t spin_ns() const { return 0; }
  std::uint64_t slice_ns() const { return 1000; }
  Status check() {
    flag.store(1, order::release);
    Status status;
    status.code = Status::Code::kPeerFailed;
    status.peer = 1;
    return status;
  }
};

TEST(AwaitSome, WhoIsGoneMayHaveToldBefore) {
  alignas(kFlagStride) std::array<std::byte, 2 * kFlagStride> flags{};
  const FlagRow row{flags.data(), kFlagStride, 2};
  std::array<std::uint8_t, 2> pending{1, 1}, came{};
  TellsAndGoes watch{row[1]};
  EXPECT_TRUE(await_some(row, 1, kAnyAhead, pending, came, watch).ok());
  EXPECT_EQ(came, (std::array<std::uint8_t, 2>{0, 1}));
  EXPECT_EQ(pending, (std::array<std::uint8_t, 2>{1, 0}));
}

}  // namespace
}  // namespace ferry::protocol
