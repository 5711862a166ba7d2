#include "bench/nccl.hpp"

#include <gtest/gtest.h>

#include <chrono>
#include <cstdlib>
#include <stdexcept>
#include <string>

#include "platform/posix/test_threads.hpp"

namespace ferry::cli {
namespace {

/// Gone at the end of a test, whatever the user has set.
class NcclSearch : public testing::Test {
 protected:
  void SetUp() override { forget(); }
  void TearDown() override { forget(); }
  static void forget() {
    unsetenv("FERRY_NCCL");
    unsetenv("FAKE_NCCL");
  }
};

std::string refusal_of(const std::string& asked) {
  try {
    find_nccl(asked);
  } catch (const std::runtime_error& error) {
    return error.what();
  }
  return "none";
}

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

TEST_F(NcclSearch, ARefusalNamesWhatNamedTheLibrary) {
  EXPECT_EQ(refusal_of("/nowhere/a.so").rfind("--nccl: /nowhere/a.so", 0), 0u);
  setenv("FERRY_NCCL", "/nowhere/b.so", 1);
  EXPECT_EQ(refusal_of("auto").rfind("FERRY_NCCL: /nowhere/b.so", 0), 0u) << refusal_of("auto");
}

TEST_F(NcclSearch, AnotherLibraryIsNotNccl) {
  EXPECT_NE(refusal_of("libm.so.6").find("ncclGetVersion"), std::string::npos);
}

TEST_F(NcclSearch, ALibraryThatFailsIsNotUsed) {
  EXPECT_EQ(find_nccl(FERRY_FAKE_NCCL).version, "2.28.9");
  setenv("FAKE_NCCL", "fails", 1);
  EXPECT_NE(refusal_of(FERRY_FAKE_NCCL).find("ncclGetVersion failed"), std::string::npos);
}

TEST_F(NcclSearch, ASignalDoesNotEndTheSearch) {
  setenv("FAKE_NCCL", "slow", 1);
  const test::InterruptedSoon interrupted(std::chrono::milliseconds(50));
  EXPECT_EQ(refusal_of(FERRY_FAKE_NCCL), "none");
}

TEST(NcclVersion, IsRead) {
  EXPECT_EQ(nccl_version(22809), "2.28.9");
  EXPECT_EQ(nccl_version(21005), "2.10.5");
  EXPECT_EQ(nccl_version(2804), "2.8.4");
}

}  // namespace
}  // namespace ferry::cli
