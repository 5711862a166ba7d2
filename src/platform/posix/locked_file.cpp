#include "platform/locked_file.hpp"

#include <fcntl.h>
#include <sys/file.h>
#include <sys/stat.h>
#include <unistd.h>

#include <cerrno>

namespace ferry {
namespace {

/// Moves all bytes between memory and the file's beginning, or up to its end; returns how many.
/// Negative: errno says why.
template <class Call, class Byte>
ssize_t move_all(Call call, int file, Byte* bytes, std::size_t count) {
  std::size_t done = 0;
  while (done < count) {
    const ssize_t now = call(file, bytes + done, count - done, static_cast<off_t>(done));
    if (now < 0 && errno == EINTR) continue;
    if (now < 0) return now;
    if (now == 0) break;
    done += static_cast<std::size_t>(now);
  }
  return static_cast<ssize_t>(done);
}

}  // namespace

LockedFile::LockedFile(const std::string& path, bool make) {
  // O_NONBLOCK: opening a FIFO must not wait.
  const int flags = O_RDWR | O_CLOEXEC | O_NOCTTY | O_NONBLOCK | O_NOFOLLOW;
  file_ = UniqueDescriptor(::open(path.c_str(), flags | (make ? O_CREAT | O_EXCL : 0), 0600));
  if (!file_) fail("opened");
  while (failed_ == nullptr && ::flock(file_.get(), LOCK_EX | LOCK_NB) != 0) {
    if (errno == EINTR) continue;
    busy_ = errno == EWOULDBLOCK;
    fail("locked");
  }
  struct stat now{};
  gone_ = failed_ == nullptr && ::fstat(file_.get(), &now) == 0 && now.st_nlink == 0;
  if (gone_) {
    errno = ENOENT;
    fail("opened");
  }
}

void LockedFile::fail(const char* what) {
  error_ = errno;
  failed_ = what;
}

std::string LockedFile::read(std::size_t most) {
  if (failed_ != nullptr) return {};
  std::string text(most, '\0');
  const ssize_t got = move_all(::pread, file_.get(), text.data(), most);
  if (got < 0) fail("read");
  text.resize(got < 0 ? 0 : static_cast<std::size_t>(got));
  return text;
}

void LockedFile::write(const std::string& text) {
  if (failed_ != nullptr) return;
  errno = ENOSPC;
  const ssize_t put = move_all(::pwrite, file_.get(), text.data(), text.size());
  if (put != static_cast<ssize_t>(text.size()) || ::fsync(file_.get()) != 0) fail("written");
}

}  // namespace ferry
