// The few socket calls of the store. All sockets are nonblocking and closed on exec; failures are
// errnos, on Windows, too.
#pragma once
#include <array>
#include <chrono>
#include <cstddef>
#include <cstdint>
#include <span>
#include <string>
#include <utility>
#include <vector>

#include "platform/unique_descriptor.hpp"

namespace ferry {

/// A sockaddr.
struct SocketAddress {
  alignas(std::max_align_t) std::array<std::byte, 128> storage{};
  unsigned length = 0;
};

/// Whether there are sockets that have a name ("@name") and tell which user is at the other end.
bool user_sockets() noexcept;
/// Of such a name.
SocketAddress user_socket_address(const std::string& name);
/// Of a host, in the resolver's order. None: `error` is an errno, or 0, and `problem` says why.
std::vector<SocketAddress> resolve_host(const std::string& host, std::uint16_t port, int& error,
                                        std::string& problem);

/// None: `error` says why.
Socket listen_on(const SocketAddress& address, int& error);

/// Starts to connect; `error` is errno if that failed at once, else 0.
Socket connect_to(const SocketAddress& address, int& error);
/// After the connection is writable: 0, or the errno it failed with. A socket that was connected
/// to itself (a free port of the ephemeral range can do that) counts as refused, one of another
/// user as one without permission.
int connect_result(const Socket& socket);

/// Reset, not closed, at its end: no TIME_WAIT keeps the port.
void reset_when_closed(const Socket& socket);

/// This side's address, in numbers; empty of a socket that has a name.
std::string numeric_address(const Socket& socket);
/// The same; empty if other machines could not reach it there: loopback,
/// link-local, all interfaces.
std::string own_address(const Socket& socket);

/// The next connection, or none (another user's is closed); `error` is errno, 0 when there simply
/// is none.
Socket accept_from(const Socket& listener, int& error);

/// Two connected stream sockets of this process; none: `error` says why.
std::pair<Socket, Socket> connected_pair(int& error);

/// How reading or writing went.
struct Transfer {
  std::size_t bytes = 0;
  bool ended = false;  ///< the peer closed, or the connection broke
};
Transfer read_from(const Socket& socket, std::span<std::byte> into);
Transfer write_to(const Socket& socket, std::span<const std::byte> from);
/// Bytes that the other side's kernel has not taken yet; 0 where nobody can tell.
std::size_t unsent_bytes(const Socket& socket);
enum class Direction { sending, both };
void shut_down(const Socket& socket, Direction direction);

/// What a socket is waited for, and what came.
struct Polled {
  int socket = -1;  ///< less than 0: not waited for
  bool read = false;
  bool write = false;
  bool readable = false;  ///< bytes or a connection are there, or it has ended
  bool writable = false;  ///< or it has ended
};
/// Until something came or so long. False: nothing came. Fails, an interruption aside, only for
/// want of memory: then it has slept for a moment.
bool wait_for(std::span<Polled> polled, std::chrono::milliseconds longest);

/// Ends a `wait_for` of another thread.
class Wakeup {
 public:
  /// `error`: 0, or why it cannot be waited for.
  explicit Wakeup(int& error);
  int socket() const { return reader_.get(); }
  void wake() noexcept;
  /// Forgets the wakes until now.
  void clear() noexcept;

 private:
  Socket reader_{};
  Socket writer_{};  // where the system needs two
};

}  // namespace ferry
