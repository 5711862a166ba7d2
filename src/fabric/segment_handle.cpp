#include "fabric/segment_handle.hpp"

#include <cstring>
#include <ferry/error.hpp>
#include <string>

#include "platform/random.hpp"

namespace ferry::fabric {

JobKey random_key(int rank) {
  JobKey key{};
  if (const int error = random_bytes(std::as_writable_bytes(std::span(key))); error != 0) {
    throw Error(ErrorKind::system,
                "rank " + std::to_string(rank) + ": getrandom failed: " + std::strerror(error),
                {.rank = rank});
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
