#include "platform/locked_file.hpp"

#include <fcntl.h>
#include <sys/file.h>
#include <unistd.h>

#include <cerrno>

#include "platform/unique_descriptor.hpp"

namespace ferry {
namespace {

/// Of a whole transfer at the file's beginning; false: errno says why.
template <class Call, class Bytes>
bool all_of(Call call, int file, Bytes* bytes, std::size_t count, std::size_t& done) {
  done = 0;
  while (done < count) {
    const ssize_t now = call(file, bytes + done, count - done, static_cast<off_t>(done));
    if (now < 0 && errno == EINTR) continue;
    if (now < 0) return false;
    if (now == 0) break;
    done += static_cast<std::size_t>(now);
  }
  return true;
}

}  // namespace

FileChange change_locked_file(const std::string& path, bool create, std::size_t most,
                              const std::function<std::string(const std::string&)>& change) {
  const int flags = O_RDWR | O_CLOEXEC | O_NOCTTY | O_NONBLOCK | (create ? O_CREAT : 0);
  const UniqueDescriptor file(::open(path.c_str(), flags, 0600));
  if (!file) return {"opened", errno};
  while (::flock(file.get(), LOCK_EX | LOCK_NB) != 0) {
    if (errno != EINTR) return {"locked", errno};
  }
  std::string text(most, '\0');
  std::size_t done = 0;
  if (!all_of(::pread, file.get(), text.data(), most, done)) return {"read", errno};
  text.resize(done);
  const std::string next = change(text);
  if (next == text) return {};
  const bool written = all_of(::pwrite, file.get(), next.data(), next.size(), done) &&
                       done == next.size() &&
                       ::ftruncate(file.get(), static_cast<off_t>(done)) == 0 &&
                       ::fsync(file.get()) == 0;
  if (!written) return {"written", errno};
  return {};
}

}  // namespace ferry
