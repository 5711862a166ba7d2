#include "fabric/segment_handle.hpp"

#include <sys/random.h>

#include <cerrno>
#include <cstring>
#include <ferry/error.hpp>
#include <string>

namespace ferry::fabric {

JobKey random_key(int rank) {
  JobKey key{};
  auto* at = reinterpret_cast<std::byte*>(key.data());
  std::size_t left = sizeof key;
  while (left > 0) {
    const ssize_t got = getrandom(at, left, 0);
    if (got < 0 && errno == EINTR) continue;
    if (got < 0) {
      throw Error(ErrorKind::system,
                  "rank " + std::to_string(rank) + ": getrandom failed: " + std::strerror(errno),
                  {.rank = rank});
    }
    at += got;
    left -= static_cast<std::size_t>(got);
  }
  return key;
}

std::vector<std::byte> to_bytes(const SegmentHandle& handle) {
  const auto* first = reinterpret_cast<const std::byte*>(&handle);
  return {first, first + sizeof handle};
}

void throw_attach(const Attachment& attachment, std::string_view reason) {
  throw Error(ErrorKind::system,
              "rank " + std::to_string(attachment.self) + " cannot attach segment " +
                  std::to_string(attachment.segment) + " of rank " +
                  std::to_string(attachment.peer) + " (" + std::to_string(attachment.bytes) +
                  " bytes): " + std::string(reason),
              {.rank = attachment.self, .peer = attachment.peer});
}

}  // namespace ferry::fabric
