#include "platform/random.hpp"

#include <sys/random.h>

#include <cerrno>

namespace ferry {

int random_bytes(std::span<std::byte> bytes) noexcept {
  while (!bytes.empty()) {
    const ssize_t got = ::getrandom(bytes.data(), bytes.size(), 0);
    if (got < 0 && errno == EINTR) continue;
    if (got < 0) return errno;
    bytes = bytes.subspan(static_cast<std::size_t>(got));
  }
  return 0;
}

}  // namespace ferry
