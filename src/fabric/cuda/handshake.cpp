#include "fabric/cuda/handshake.hpp"

#include <algorithm>
#include <cstring>
#include <ferry/error.hpp>

#include "base/text.hpp"

namespace ferry::fabric {
namespace {

template <typename T>
std::vector<std::byte> bytes_of(const T& value) {
  const auto* first = reinterpret_cast<const std::byte*>(&value);
  return {first, first + sizeof value};
}

}  // namespace

std::vector<std::byte> to_bytes(const DeviceHandshake& handshake) {
  std::vector<std::byte> bytes = bytes_of(handshake.fixed);
  const auto identity = to_bytes(handshake.identity);
  bytes.insert(bytes.end(), identity.begin(), identity.end());
  return bytes;
}

DeviceHandshake device_handshake_from(std::span<const std::byte> bytes, int rank, int peer) {
  DeviceHandshake handshake;
  const std::size_t fixed = sizeof handshake.fixed;
  if (bytes.size() >= fixed) std::memcpy(&handshake.fixed, bytes.data(), fixed);
  if (bytes.size() < fixed || handshake.fixed.magic != DeviceHandshake::Fixed::kMagic) {
    throw Error(ErrorKind::mismatch,
                "rank " + std::to_string(rank) + ": what rank " + std::to_string(peer) +
                    " says about its GPU (" + std::to_string(bytes.size()) +
                    " bytes) cannot be read; use the same version and backend on all ranks",
                {.rank = rank, .peer = peer});
  }
  handshake.identity = identity_from(bytes.subspan(fixed), rank, peer);
  return handshake;
}

void put_text(std::string_view text, std::span<char> field) {
  const std::size_t count = std::min(text.size(), field.size() - 1);
  std::copy_n(text.begin(), count, field.begin());
  std::fill(field.begin() + static_cast<std::ptrdiff_t>(count), field.end(), '\0');
}

std::string text_of(std::span<const char> field) {
  const auto end = std::find(field.begin(), field.end(), '\0');
  return printable({field.data(), static_cast<std::size_t>(end - field.begin())}, field.size());
}

std::vector<std::byte> to_bytes(const DeviceHandle& handle) {
  return bytes_of(handle);
}

void throw_attach(const DeviceAttachment& attachment, std::string_view reason) {
  throw Error(ErrorKind::system,
              "rank " + std::to_string(attachment.self) + " cannot attach device segment " +
                  std::to_string(attachment.segment) + " of rank " +
                  std::to_string(attachment.peer) + " (" + std::to_string(attachment.bytes) +
                  " bytes, " + std::string(name_of(attachment.way)) + "): " + std::string(reason),
              {.rank = attachment.self, .peer = attachment.peer});
}

}  // namespace ferry::fabric
