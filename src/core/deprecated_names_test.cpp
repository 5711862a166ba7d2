// Public names of earlier releases still compile, and mean the same.
#include <gtest/gtest.h>

#include <concepts>
#include <ferry/error.hpp>
#include <ferry/group.hpp>
#include <ferry/network.hpp>

namespace ferry {
namespace {

#pragma GCC diagnostic ignored "-Wdeprecated-declarations"
static_assert(std::same_as<MemoryUse, MemoryStats>);
static_assert(std::same_as<TimeUse, TimeStats>);
static_assert(std::same_as<NetworkUse, NetworkStats>);
static_assert(std::same_as<NicUse, NicStats>);

TEST(DeprecatedNames, AnErrorIsCaughtByItsOldKind) {
  EXPECT_EQ(Error(ErrorKind::evicted, "masked").kind(), ErrorKind::left_behind);
}

}  // namespace
}  // namespace ferry
