#include "nccl.hpp"

#include <gtest/gtest.h>

#include <cstdlib>
#include <stdexcept>
#include <string>

namespace ferry::cli {
namespace {

/// Gone at the end of a test, whatever the user has set.
class NcclSearch : public testing::Test {
 protected:
  void SetUp() override { unsetenv("FERRY_NCCL"); }
  void TearDown() override { unsetenv("FERRY_NCCL"); }
};

TEST_F(NcclSearch, OffSaysSo) {
  const Nccl found = find_nccl("off");
  EXPECT_EQ(found.library, "");
  EXPECT_EQ(found.reason, "--nccl off");
}

TEST_F(NcclSearch, AutomaticFindsItOrSaysWhyNot) {
  const Nccl found = find_nccl("auto");
  EXPECT_NE(found.library.empty(), found.reason.empty());
  EXPECT_EQ(found.library.empty(), found.version.empty());
}

TEST_F(NcclSearch, ALibraryThatWasNamedMustBeThere) {
  EXPECT_THROW(find_nccl("/nowhere/libnccl.so.2"), std::runtime_error);
  setenv("FERRY_NCCL", "/nowhere/libnccl.so.2", 1);
  EXPECT_THROW(find_nccl("auto"), std::runtime_error);
  EXPECT_EQ(find_nccl("off").reason, "--nccl off");
}

TEST_F(NcclSearch, AnotherLibraryIsNotNccl) {
  try {
    find_nccl("libm.so.6");
    FAIL() << "found NCCL in libm";
  } catch (const std::runtime_error& error) {
    EXPECT_NE(std::string(error.what()).find("ncclGetVersion"), std::string::npos) << error.what();
  }
}

TEST(NcclVersion, IsRead) {
  EXPECT_EQ(nccl_version(22809), "2.28.9");
  EXPECT_EQ(nccl_version(21005), "2.10.5");
  EXPECT_EQ(nccl_version(2804), "2.8.4");
}

}  // namespace
}  // namespace ferry::cli
