#include "bootstrap/socket.hpp"

#include <ferry/error.hpp>

#include <cerrno>
#include <chrono>
#include <thread>

#include "base/open_files.hpp"

namespace ferry::bootstrap {
namespace {

bool is_user_socket(const StoreAddress& store) {
  return store.address.starts_with('@');
}

[[noreturn]] void raise_listen(const StoreAddress& store, int rank, int error) {
  const std::string start =
      "rank " + std::to_string(rank) + ": the store cannot listen at " + store.text() + ": ";
  const ErrorContext context{.rank = rank, .stage = "bootstrap: listen"};
  if (error == EADDRINUSE) {
    throw Error(ErrorKind::system,
                start +
                    "another program has that port; choose a free one for all ranks: set "
                    "FERRY_PORT (under torchrun MASTER_PORT belongs to torch's own store)",
                context);
  }
  if (error == EADDRNOTAVAIL) {
    throw Error(ErrorKind::invalid_argument,
                start +
                    "got an address that is none of this machine's, expected one of them: "
                    "rank 0 runs the store, so MASTER_ADDR must be rank 0's machine",
                context);
  }
  throw Error(too_many_files(error) ? ErrorKind::exhausted : ErrorKind::system,
              start + error_text(error), context);
}

}  // namespace

std::string StoreAddress::text() const {
  if (is_user_socket(*this)) return address;
  const bool v6 = address.find(':') != std::string::npos;
  return (v6 ? "[" + address + "]" : address) + ":" + std::to_string(port);
}

std::vector<SocketAddress> resolve(const StoreAddress& store, int rank, std::string& problem) {
  if (is_user_socket(store)) return {user_socket_address(store.address)};
  int error = 0;
  auto out = resolve_host(store.address, store.port, error, problem);
  if (error != 0) problem = error_text(error);
  if (too_many_files(error)) {
    throw Error(
        ErrorKind::exhausted,
        "rank " + std::to_string(rank) + ": cannot look up \"" + store.address + "\": " + problem,
        {.rank = rank, .stage = "bootstrap: connect"});
  }
  return out;
}

Socket listen_at(const StoreAddress& store, int rank) {
  std::string problem;
  const std::vector<SocketAddress> addresses = resolve(store, rank, problem);
  if (addresses.empty()) {
    throw Error(ErrorKind::invalid_argument,
                "rank " + std::to_string(rank) + ": address is \"" + store.address +
                    "\", which does not resolve (" + problem +
                    "); expected rank 0's host name or number (MASTER_ADDR)",
                {.rank = rank, .stage = "bootstrap: listen"});
  }
  int error = 0;
  // A client's half-made connection can hold the port for a moment, so try a few times.
  for (int attempt = 0; attempt < 20; ++attempt) {
    for (const SocketAddress& address : addresses) {
      if (Socket socket = listen_on(address, error)) return socket;
    }
    if (error != EADDRINUSE) break;
    std::this_thread::sleep_for(std::chrono::milliseconds(20));
  }
  raise_listen(store, rank, error);
}

std::pair<Socket, Socket> socket_pair(int rank) {
  int error = 0;
  auto pair = connected_pair(error);
  if (error != 0) {
    throw Error(too_many_files(error) ? ErrorKind::exhausted : ErrorKind::system,
                "rank " + std::to_string(rank) + ": no sockets for the store: " + error_text(error),
                {.rank = rank, .stage = "bootstrap: listen"});
  }
  return pair;
}

}  // namespace ferry::bootstrap
