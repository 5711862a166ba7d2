#include "platform/owned_file.hpp"

#include <fcntl.h>
#include <sys/stat.h>
#include <unistd.h>

#include <cerrno>

#include "platform/unique_descriptor.hpp"

namespace ferry {
namespace {

const char* kind_of(mode_t mode) {
  if (S_ISREG(mode)) return nullptr;
  if (S_ISDIR(mode)) return "a directory";
  if (S_ISFIFO(mode)) return "a pipe (FIFO)";
  if (S_ISCHR(mode) || S_ISBLK(mode)) return "a device";
  if (S_ISSOCK(mode)) return "a socket";
  return "no regular file";
}

}  // namespace

FileRead read_owned_file(const std::string& path, std::size_t most) {
  FileRead out;
  // O_NONBLOCK: opening a FIFO must not wait for who writes.
  const UniqueDescriptor file(::open(path.c_str(), O_RDONLY | O_CLOEXEC | O_NONBLOCK | O_NOCTTY));
  struct stat info{};
  if (!file || ::fstat(file.get(), &info) != 0) {
    out.failed = "opened";
    out.error = errno;
    return out;
  }
  out.kind = kind_of(info.st_mode);
  out.owner = info.st_uid;
  out.mode = info.st_mode & 07777;
  out.bytes = static_cast<std::uint64_t>(info.st_size);
  if (out.kind != nullptr) return out;
  // Not as many bytes as fstat said: the file may change meanwhile.
  out.text.resize(most);
  std::size_t got = 0;
  while (got < most) {
    const ssize_t n = ::read(file.get(), out.text.data() + got, most - got);
    if (n < 0 && errno == EINTR) continue;
    if (n < 0) {
      out.failed = "read";
      out.error = errno;
      return out;
    }
    if (n == 0) break;
    got += static_cast<std::size_t>(n);
  }
  out.text.resize(got);
  return out;
}

}  // namespace ferry
