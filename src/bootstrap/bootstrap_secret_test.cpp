// What may stand behind FERRY_SECRET_FILE: each other thing is refused in words, at once.
#include <gtest/gtest.h>

#include <fcntl.h>
#include <sys/stat.h>
#include <unistd.h>

#include <cstdlib>
#include <fstream>
#include <string>

#include "bootstrap/secret_file.hpp"
#include "bootstrap/test_ranks.hpp"

namespace ferry::bootstrap {
namespace {

/// Root as another user and group, for a while.
class AsUser {
 public:
  explicit AsUser(id_t id) : group_(::getegid()) {
    EXPECT_EQ(::setegid(id), 0);
    EXPECT_EQ(::seteuid(id), 0);
  }
  ~AsUser() {
    EXPECT_EQ(::seteuid(0), 0);
    EXPECT_EQ(::setegid(group_), 0);
  }
  AsUser(const AsUser&) = delete;
  AsUser& operator=(const AsUser&) = delete;

 private:
  const gid_t group_;
};

/// A folder of its own with one path in it, which a test fills.
class SecretFile : public ::testing::Test {
 protected:
  void SetUp() override {
    std::string folder = ::testing::TempDir() + "ferry_secret_XXXXXX";
    ASSERT_NE(::mkdtemp(folder.data()), nullptr);
    folder_ = folder;
    path_ = folder + "/secret";
  }
  void TearDown() override {
    ::rmdir(path_.c_str());
    for (const std::string& path : {path_, link()}) ::unlink(path.c_str());
    ::rmdir(folder_.c_str());
  }
  std::string link() const { return folder_ + "/link"; }
  void write(const std::string& text, mode_t mode = 0600) {
    ::unlink(path_.c_str());
    std::ofstream(path_) << text;
    ASSERT_EQ(::chmod(path_.c_str(), mode), 0);
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
  for (const mode_t mode : {0600, 0400, 0700}) {
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
  ASSERT_EQ(::symlink(path_.c_str(), link().c_str()), 0);
  EXPECT_EQ(read_secret_file(link()), "hush-hush");
  write("hush-hush", 0644);
  expect_refusal_of(link(), "which others may read or change (mode 0644)");
}

TEST_F(SecretFile, NotThere) {
  expect_refusal("which cannot be opened: No such file");
}

TEST_F(SecretFile, ADirectory) {
  ASSERT_EQ(::mkdir(path_.c_str(), 0700), 0);
  expect_refusal("which is a directory, expected a regular file");
}

TEST_F(SecretFile, APipeWithoutWriterDoesNotHoldUp) {
  ASSERT_EQ(::mkfifo(path_.c_str(), 0600), 0);
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
  ASSERT_EQ(::truncate(path_.c_str(), off_t{1} << 30), 0);  // takes no room on the disk
  expect_refusal("a file with 1073741824 bytes, expected a secret of 1 to 4096");
}

TEST_F(SecretFile, ThatOthersMayReadOrChange) {
  for (const char* mode : {"0640", "0604", "0620", "0602", "0660", "0644", "0666"}) {
    write("hush-hush", mode_t(std::strtoul(mode, nullptr, 8)));
    expect_refusal(std::string("which others may read or change (mode ") + mode + ")");
  }
}

TEST_F(SecretFile, OfAnotherUser) {
  write("hush-hush");
  if (::chown(path_.c_str(), 12345, gid_t(-1)) != 0) GTEST_SKIP() << "only root gives files away";
  expect_refusal("which belongs to user 12345, expected a file of this process's user");
}

// As Kubernetes mounts a secret: of root, and for the group of the pod.
TEST_F(SecretFile, OfRootForTheGroup) {
  write("hush-hush", 0440);
  ASSERT_EQ(::chmod(folder_.c_str(), 0755), 0);
  if (::chown(path_.c_str(), 0, 12345) != 0) GTEST_SKIP() << "only root gives files away";
  expect_refusal("which others may read or change (mode 0440)");
  const AsUser other(12345);
  if (::faccessat(AT_FDCWD, path_.c_str(), R_OK, AT_EACCESS) != 0) {
    GTEST_SKIP() << "another user does not get to " << folder_;
  }
  EXPECT_EQ(read_secret_file(path_), "hush-hush");
}

}  // namespace
}  // namespace ferry::bootstrap
