// What may stand behind FERRY_SECRET_FILE: each other thing is refused in words, at once.
#include <gtest/gtest.h>

#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <string>

#include "bootstrap/secret_file.hpp"
#include "bootstrap/test_ranks.hpp"
#include "platform/posix/test_rights.hpp"
#include "platform/process.hpp"

namespace ferry::bootstrap {
namespace {

namespace fs = std::filesystem;

/// A folder of its own with one path in it, which a test fills.
class SecretFile : public ::testing::Test {
 protected:
  void SetUp() override {
    folder_ = ::testing::TempDir() + "ferry_secret_" + std::to_string(process_id());
    ASSERT_TRUE(fs::create_directory(folder_));
    path_ = folder_ + "/secret";
  }
  void TearDown() override { fs::remove_all(folder_); }
  std::string link() const { return folder_ + "/link"; }
  void write(const std::string& text, unsigned mode = 0600) {
    fs::remove(path_);
    std::ofstream(path_) << text;
    fs::permissions(path_, static_cast<fs::perms>(mode));
  }
  void expect_refusal(const std::string& part) { expect_refusal_of(path_, part); }
  static void expect_refusal_of(const std::string& path, const std::string& part) {
    const Error e = error_from([&] { read_secret_file(path); });
    EXPECT_EQ(e.kind(), ErrorKind::invalid_argument) << e.what();
    EXPECT_TRUE(contains(e, "FERRY_SECRET_FILE names \"" + path + "\", " + part)) << e.what();
    EXPECT_FALSE(contains(e, "hush-hush")) << e.what();
  }

  std::string folder_;
  std::string path_;
};

TEST_F(SecretFile, OfTheOwnerAlone) {
  for (const unsigned mode : {0600, 0400, 0700}) {
    write("hush-hush\n", mode);
    EXPECT_EQ(read_secret_file(path_), "hush-hush");
  }
}

TEST_F(SecretFile, LosesItsLastLineEndOnly) {
  write(" a secret\n\r\n");
  EXPECT_EQ(read_secret_file(path_), " a secret\n");
  const std::string longest(4096, 'x');
  write(longest + "\r\n");
  EXPECT_EQ(read_secret_file(path_), longest);
}

TEST_F(SecretFile, MayBeReachedByALink) {
  write("hush-hush");
  fs::create_symlink(path_, link());
  EXPECT_EQ(read_secret_file(link()), "hush-hush");
  write("hush-hush", 0644);
  expect_refusal_of(link(), "which others may read or change (mode 0644)");
}

TEST_F(SecretFile, NotThere) {
  expect_refusal("which cannot be opened: No such file");
}

TEST_F(SecretFile, ADirectory) {
  ASSERT_TRUE(fs::create_directory(path_));
  expect_refusal("which is a directory, expected a regular file");
}

TEST_F(SecretFile, APipeWithoutWriterDoesNotHoldUp) {
  ASSERT_TRUE(test::make_fifo(path_));
  expect_refusal("which is a pipe (FIFO), expected a regular file");
}

TEST_F(SecretFile, Devices) {
  expect_refusal_of("/dev/zero", "which is a device, expected a regular file");
  expect_refusal_of("/dev/null", "which is a device, expected a regular file");
}

TEST_F(SecretFile, Empty) {
  for (const char* nothing : {"", "\n", "\r\n"}) {
    write(nothing);
    expect_refusal("a file with 0 bytes, expected a secret of 1 to 4096");
  }
}

TEST_F(SecretFile, TooLong) {
  std::string long_secret(4097, 'x');
  long_secret += '\n';  // not operator+: g++ 12 warns of it without a reason
  write(long_secret);
  expect_refusal("a file with 4097 bytes, expected a secret of 1 to 4096");
  write("");
  fs::resize_file(path_, std::uintmax_t{1} << 30);  // takes no room on the disk
  expect_refusal("a file with 1073741824 bytes, expected a secret of 1 to 4096");
}

TEST_F(SecretFile, ThatOthersMayReadOrChange) {
  for (const char* mode : {"0640", "0604", "0620", "0602", "0660", "0644", "0666"}) {
    write("hush-hush", unsigned(std::strtoul(mode, nullptr, 8)));
    expect_refusal(std::string("which others may read or change (mode ") + mode + ")");
  }
}

TEST_F(SecretFile, OfAnotherUser) {
  write("hush-hush");
  if (!test::give_away(path_, 12345, test::kSameUser)) GTEST_SKIP() << "only root gives files away";
  expect_refusal("which belongs to user 12345, expected a file of this process's user");
}

// As Kubernetes mounts a secret: of root, and for the group of the pod.
TEST_F(SecretFile, OfRootForTheGroup) {
  write("hush-hush", 0440);
  fs::permissions(folder_, static_cast<fs::perms>(0755));
  if (!test::give_away(path_, 0, 12345)) GTEST_SKIP() << "only root gives files away";
  expect_refusal("which others may read or change (mode 0440)");
  const test::AsUser other(12345);
  if (!test::may_read(path_)) {
    GTEST_SKIP() << "another user does not get to " << folder_;
  }
  EXPECT_EQ(read_secret_file(path_), "hush-hush");
}

}  // namespace
}  // namespace ferry::bootstrap
