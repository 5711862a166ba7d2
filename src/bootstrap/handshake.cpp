#include "bootstrap/handshake.hpp"

#include <ferry/error.hpp>

#include <cstring>
#include <string>

#include "bootstrap/byte_order.hpp"
#include "platform/random.hpp"

namespace ferry::bootstrap {

Nonce random_nonce() {
  Nonce nonce;
  if (const int error = random_bytes(nonce); error != 0) {
    throw Error(ErrorKind::system, std::string("getrandom failed: ") + std::strerror(error) +
                                       "; the store needs random bytes for its handshake");
  }
  return nonce;
}

Proofs prove(std::string_view secret, const Transcript& transcript) {
  std::vector<std::byte> said;
  append(said, transcript.version);
  append(said, transcript.size);
  append(said, transcript.rank);
  append(said, transcript.client);
  append(said, transcript.store);
  const auto under = [&](std::string_view label) {
    HmacSha256 mac(std::as_bytes(std::span(secret)));
    mac.update(std::as_bytes(std::span(label)));
    mac.update(said);
    return mac.finish();
  };
  return {.client = under("ferry store client"),
          .store = under("ferry store server"),
          .to_store = under("ferry frames to store"),
          .to_client = under("ferry frames to client")};
}

}  // namespace ferry::bootstrap
