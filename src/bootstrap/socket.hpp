// The few socket calls of the store, with errors in words. All sockets are nonblocking and closed
// on exec.
#pragma once
#include <sys/socket.h>

#include <cstddef>
#include <cstdint>
#include <span>
#include <string>
#include <utility>
#include <vector>

namespace ferry::bootstrap {

/// Owns a descriptor.
class Descriptor {
 public:
  Descriptor() = default;
  explicit Descriptor(int fd) : fd_(fd) {}
  ~Descriptor() { reset(); }
  Descriptor(Descriptor&& other) noexcept : fd_(std::exchange(other.fd_, -1)) {}
  Descriptor& operator=(Descriptor&& other) noexcept {
    std::swap(fd_, other.fd_);
    return *this;
  }
  int get() const { return fd_; }
  explicit operator bool() const { return fd_ >= 0; }
  void reset();

 private:
  int fd_ = -1;
};

/// Where the store is, as the user wrote it: a host, or "@name", an abstract Unix socket, which
/// only processes of this user (SO_PEERCRED) in this network namespace reach.
struct StoreAddress {
  std::string address;
  std::uint16_t port = 0;
  std::string text() const;  ///< "127.0.0.1:29500", "[::1]:29500", "@name"
};

struct Address {
  sockaddr_storage storage{};
  socklen_t length = 0;
};
/// What an errno says; where descriptors are short, with the limit and what to do.
std::string error_text(int error);

/// The store's addresses, in the resolver's order. None: `problem` says why. Throws
/// Error(exhausted) naming `rank` when no file can be opened to look it up.
std::vector<Address> resolve(const StoreAddress& store, int rank, std::string& problem);

/// Listens at exactly that address. Throws Error: invalid_argument if it is none of this machine,
/// system (with what to do) if the port is taken or the system refuses.
Descriptor listen_at(const StoreAddress& store, int rank);

/// Starts to connect; `error` is errno if that failed at once, else 0.
Descriptor connect_to(const Address& address, int& error);
/// After the connection is writable: 0, or the errno it failed with. A socket that was connected
/// to itself (a free port of the ephemeral range can do that) counts as refused, a Unix socket of
/// another user as one without permission.
int connect_result(const Descriptor& socket);

/// This side's address, in numbers; empty if other machines could not reach it there: loopback,
/// link-local, all interfaces.
std::string own_address(const Descriptor& socket);

/// The next connection, or none (another user's is closed); `error` is errno, 0 when there simply
/// is none.
Descriptor accept_from(const Descriptor& listener, int& error);

/// Two connected stream sockets of this process.
std::pair<Descriptor, Descriptor> socket_pair(int rank);

/// How reading or writing went.
struct Transfer {
  std::size_t bytes = 0;
  bool ended = false;  ///< the peer closed, or the connection broke
};
Transfer read_from(const Descriptor& socket, std::span<std::byte> into);
Transfer write_to(const Descriptor& socket, std::span<const std::byte> from);
/// Bytes that the other side's kernel has not taken yet.
std::size_t unsent_bytes(const Descriptor& socket);

}  // namespace ferry::bootstrap
