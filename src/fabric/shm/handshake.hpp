// What ranks tell each other when an shm fabric is created.
#pragma once
#include <algorithm>
#include <cstring>
#include <ferry/error.hpp>
#include <span>
#include <string>
#include <vector>

#include "fabric/identity.hpp"
#include "fabric/segment_handle.hpp"

namespace ferry::fabric {

struct ShmGreeting {
  JobKey key{};  ///< rank 0's is the job's; the others send zeros
  Identity identity{};
};

inline std::vector<std::byte> to_bytes(const ShmGreeting& greeting) {
  const auto key = std::as_bytes(std::span(greeting.key));
  std::vector<std::byte> bytes(key.begin(), key.end());
  const auto identity = to_bytes(greeting.identity);
  bytes.insert(bytes.end(), identity.begin(), identity.end());
  return bytes;
}

/// Throws Error(mismatch) naming `rank` and `peer`, whose bytes these are.
inline ShmGreeting greeting_from(std::span<const std::byte> bytes, int rank, int peer) {
  ShmGreeting greeting;
  const std::size_t key_bytes = std::min(sizeof greeting.key, bytes.size());
  if (key_bytes > 0) std::memcpy(greeting.key.data(), bytes.data(), key_bytes);
  greeting.identity = identity_from(bytes.subspan(key_bytes), rank, peer);
  return greeting;
}

}  // namespace ferry::fabric
