// How two sides prove the job's secret to each other without sending it.
//
//   client → store: hello (size, client nonce; its rank stands in the header)
//   store → client: challenge (store nonce)
//   client → store: proof   = HMAC(secret, "ferry store client" | transcript)
//   store → client: welcome = HMAC(secret, "ferry store server" | transcript)
// transcript = version u16 | size u32 | rank u32 | client nonce | store nonce. The client proves
// first: who does not know the secret learns nothing that helps to guess it. The keys of the
// frames that follow come from the same transcript, one for each direction.
#pragma once
#include <cstdint>
#include <string_view>

#include "bootstrap/frame.hpp"
#include "bootstrap/sha256.hpp"

namespace ferry::bootstrap {

using Nonce = Digest;  // 32 random bytes

/// From the operating system; throws Error(system) if it gives none.
Nonce random_nonce();

struct Transcript {
  std::uint32_t size = 0;
  std::uint32_t rank = 0;
  Nonce client{};
  Nonce store{};
  std::uint16_t version = kStoreVersion;
};

struct Proofs {
  Digest client;     ///< in `proof`
  Digest store;      ///< in `welcome`
  Digest to_store;   ///< key of the client's frames
  Digest to_client;  ///< key of the store's frames
};

Proofs prove(std::string_view secret, const Transcript& transcript);

}  // namespace ferry::bootstrap
