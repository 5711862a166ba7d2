// What ranks tell each other when an shm fabric is created.
#pragma once
#include <algorithm>
#include <cstring>
#include <ferry/error.hpp>
#include <span>
#include <vector>

#include "fabric/identity.hpp"
#include "fabric/segment_handle.hpp"

namespace ferry::fabric {

struct ShmHandshake {
  JobKey key{};  ///< rank 0's is the job's; the others send zeros
  Identity identity{};
};

inline std::vector<std::byte> to_bytes(const ShmHandshake& handshake) {
  const auto key = std::as_bytes(std::span(handshake.key));
  std::vector<std::byte> bytes(key.begin(), key.end());
  const auto identity = to_bytes(handshake.identity);
  bytes.insert(bytes.end(), identity.begin(), identity.end());
  return bytes;
}

/// Throws Error(mismatch) naming `rank` and `peer`, whose bytes these are.
inline ShmHandshake handshake_from(std::span<const std::byte> bytes, int rank, int peer) {
  ShmHandshake handshake;
  const std::size_t key_bytes = std::min(sizeof handshake.key, bytes.size());
  if (key_bytes > 0) std::memcpy(handshake.key.data(), bytes.data(), key_bytes);
  handshake.identity = identity_from(bytes.subspan(key_bytes), rank, peer);
  return handshake;
}

}  // namespace ferry::fabric
