// Where the store is, and its sockets with errors in words.
#pragma once
#include <cstdint>
#include <string>
#include <utility>
#include <vector>

#include "platform/socket.hpp"

namespace ferry::bootstrap {

/// Where the store is, as the user wrote it: a host, or "@name", an abstract Unix socket, which
/// only processes of this user (SO_PEERCRED) in this network namespace reach.
struct StoreAddress {
  std::string address;
  std::uint16_t port = 0;
  std::string text() const;  ///< "127.0.0.1:29500", "[::1]:29500", "@name"
};

/// The store's addresses, in the resolver's order. None: `problem` says why. Throws
/// Error(exhausted) naming `rank` when no file can be opened to look it up.
std::vector<SocketAddress> resolve(const StoreAddress& store, int rank, std::string& problem);

/// Listens at exactly that address. Throws Error: invalid_argument if it is none of this machine,
/// system (with what to do) if the port is taken or the system refuses.
Socket listen_at(const StoreAddress& store, int rank);

/// Two connected stream sockets of this process.
std::pair<Socket, Socket> socket_pair(int rank);

}  // namespace ferry::bootstrap
