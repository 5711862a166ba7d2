#include "bootstrap/handshake.hpp"

#include <ferry/error.hpp>

#include <sys/random.h>

#include <cerrno>
#include <cstring>
#include <string>

#include "bootstrap/byte_order.hpp"

namespace ferry::bootstrap {

Nonce random_nonce() {
  Nonce nonce;
  std::size_t filled = 0;
  while (filled < nonce.size()) {
    const ssize_t n = ::getrandom(nonce.data() + filled, nonce.size() - filled, 0);
    if (n > 0) {
      filled += std::size_t(n);
    } else if (errno != EINTR) {
      throw Error(ErrorKind::system, std::string("getrandom failed: ") + std::strerror(errno) +
                                         "; the store needs random bytes for its handshake");
    }
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
