#include "bootstrap/secret_file.hpp"

#include <ferry/error.hpp>

#include <array>
#include <cstdio>

#include "base/open_files.hpp"
#include "base/text.hpp"
#include "platform/host.hpp"
#include "platform/owned_file.hpp"

namespace ferry::bootstrap {
namespace {

constexpr std::size_t kLongestSecret = 4096;
constexpr std::size_t kLineEnd = 2;
constexpr std::size_t kMostShown = 80;

[[noreturn]] void refuse(const std::string& path, const std::string& what) {
  throw Error(ErrorKind::invalid_argument, "environment variable FERRY_SECRET_FILE names \"" +
                                               printable(path, kMostShown) + "\", " + what);
}

std::string octal(unsigned mode) {
  std::array<char, 16> text{};
  std::snprintf(text.data(), text.size(), "%04o", mode);
  return text.data();
}

[[noreturn]] void refuse_length(const std::string& path, const std::string& bytes) {
  refuse(path, "a file with " + bytes + " bytes, expected a secret of 1 to " +
                   std::to_string(kLongestSecret));
}

void check(const std::string& path, const FileRead& file) {
  if (file.kind != nullptr) {
    refuse(path,
           std::string("which is ") + file.kind + ", expected a regular file with the secret");
  }
  const std::uint64_t self = user_id();
  if (file.owner != self && file.owner != 0) {
    refuse(path, "which belongs to user " + std::to_string(file.owner) +
                     ", expected a file of this process's user (" + std::to_string(self) +
                     ") or of root; change its owner (chown)");
  }
  // As libpq judges keys: a file of root's may be for a group, which is how this user reads it.
  const bool group_may_read = file.owner == 0 && self != 0;
  const unsigned forbidden = group_may_read ? 037 : 077;
  if ((file.mode & forbidden) != 0) {
    refuse(path, "which others may read or change (mode " + octal(file.mode) +
                     "), expected a file for its owner alone; chmod 600 it, and make a new secret "
                     "if others may have read it");
  }
  if (file.bytes > kLongestSecret + kLineEnd) refuse_length(path, std::to_string(file.bytes));
}

}  // namespace

std::string read_secret_file(const std::string& path) {
  const FileRead file = read_owned_file(path, kLongestSecret + kLineEnd + 1);
  if (file.failed != nullptr) {
    refuse(path, std::string("which cannot be ") + file.failed + ": " + error_text(file.error));
  }
  check(path, file);
  std::string text = file.text;
  const std::size_t got = text.size();
  if (text.ends_with('\n')) text.pop_back();
  if (text.ends_with('\r')) text.pop_back();
  if (text.empty() || text.size() > kLongestSecret) {
    const bool all = got <= kLongestSecret + kLineEnd;
    refuse_length(path, all ? std::to_string(text.size()) : "more");
  }
  return text;
}

}  // namespace ferry::bootstrap
