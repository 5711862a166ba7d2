#include "bootstrap/secret_file.hpp"

#include <ferry/error.hpp>

#include <fcntl.h>
#include <sys/stat.h>
#include <unistd.h>

#include <array>
#include <cerrno>
#include <cstdio>

#include "base/text.hpp"
#include "bootstrap/socket.hpp"

namespace ferry::bootstrap {
namespace {

constexpr std::size_t kLongestSecret = 4096;
constexpr std::size_t kLineEnd = 2;
constexpr std::size_t kMostShown = 80;

[[noreturn]] void refuse(const std::string& path, const std::string& what) {
  throw Error(ErrorKind::invalid_argument, "environment variable FERRY_SECRET_FILE names \"" +
                                               printable(path, kMostShown) + "\", " + what);
}

std::string kind_of(mode_t mode) {
  if (S_ISDIR(mode)) return "a directory";
  if (S_ISFIFO(mode)) return "a pipe (FIFO)";
  if (S_ISCHR(mode) || S_ISBLK(mode)) return "a device";
  if (S_ISSOCK(mode)) return "a socket";
  return "no regular file";
}

std::string octal(mode_t mode) {
  std::array<char, 16> text{};
  std::snprintf(text.data(), text.size(), "%04o", static_cast<unsigned>(mode & 07777));
  return text.data();
}

[[noreturn]] void refuse_length(const std::string& path, const std::string& bytes) {
  refuse(path, "a file with " + bytes + " bytes, expected a secret of 1 to " +
                   std::to_string(kLongestSecret));
}

void check(const std::string& path, const struct stat& info) {
  if (!S_ISREG(info.st_mode)) {
    refuse(path, "which is " + kind_of(info.st_mode) + ", expected a regular file with the secret");
  }
  const uid_t self = ::geteuid();
  if (info.st_uid != self && info.st_uid != 0) {
    refuse(path, "which belongs to user " + std::to_string(info.st_uid) +
                     ", expected a file of this process's user (" + std::to_string(self) +
                     ") or of root; change its owner (chown)");
  }
  // As libpq judges keys: a file of root's may be for a group, which is how this user reads it.
  const bool group_may_read = info.st_uid == 0 && self != 0;
  const mode_t forbidden = group_may_read ? S_IWGRP | S_IXGRP | S_IRWXO : S_IRWXG | S_IRWXO;
  if ((info.st_mode & forbidden) != 0) {
    refuse(path, "which others may read or change (mode " + octal(info.st_mode) +
                     "), expected a file for its owner alone; chmod 600 it, and make a new secret "
                     "if others may have read it");
  }
  if (info.st_size > off_t(kLongestSecret + kLineEnd)) {
    refuse_length(path, std::to_string(info.st_size));
  }
}

}  // namespace

std::string read_secret_file(const std::string& path) {
  // O_NONBLOCK: opening a FIFO must not wait for who writes.
  const Descriptor file(::open(path.c_str(), O_RDONLY | O_CLOEXEC | O_NONBLOCK | O_NOCTTY));
  struct stat info{};
  if (!file || ::fstat(file.get(), &info) != 0) {
    refuse(path, "which cannot be opened: " + error_text(errno));
  }
  check(path, info);
  // Not as many bytes as fstat said: the file may change meanwhile.
  std::string text(kLongestSecret + kLineEnd + 1, '\0');
  std::size_t got = 0;
  while (got < text.size()) {
    const ssize_t n = ::read(file.get(), text.data() + got, text.size() - got);
    if (n < 0 && errno == EINTR) continue;
    if (n < 0) refuse(path, "which cannot be read: " + error_text(errno));
    if (n == 0) break;
    got += std::size_t(n);
  }
  text.resize(got);
  if (text.ends_with('\n')) text.pop_back();
  if (text.ends_with('\r')) text.pop_back();
  if (text.empty() || text.size() > kLongestSecret) {
    const bool all = got <= kLongestSecret + kLineEnd;
    refuse_length(path, all ? std::to_string(text.size()) : "more");
  }
  return text;
}

}  // namespace ferry::bootstrap
