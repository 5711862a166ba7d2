#include "platform/socket.hpp"

#include <linux/sockios.h>
#include <netdb.h>
#include <netinet/in.h>
#include <netinet/tcp.h>
#include <poll.h>
#include <sys/eventfd.h>
#include <sys/ioctl.h>
#include <sys/socket.h>
#include <sys/un.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstddef>
#include <cstring>
#include <thread>

namespace ferry {
namespace {

constexpr int kBacklog = 4096;  // the kernel cuts it to its own limit

void set(const Socket& socket, int level, int option, int value) {
  // Tuning only: a socket without it still works.
  ::setsockopt(socket.get(), level, option, &value, sizeof value);
}

void tune(const Socket& socket) {
  set(socket, IPPROTO_TCP, TCP_NODELAY, 1);
  // A host that vanishes without a word is found by the kernel in about 10 s.
  set(socket, SOL_SOCKET, SO_KEEPALIVE, 1);
  set(socket, IPPROTO_TCP, TCP_KEEPIDLE, 4);
  set(socket, IPPROTO_TCP, TCP_KEEPINTVL, 2);
  set(socket, IPPROTO_TCP, TCP_KEEPCNT, 3);
}

const sockaddr* where_of(const SocketAddress& address) {
  return reinterpret_cast<const sockaddr*>(address.storage.data());
}

Socket stream_socket(const SocketAddress& address) {
  return Socket(
      ::socket(where_of(address)->sa_family, SOCK_STREAM | SOCK_NONBLOCK | SOCK_CLOEXEC, 0));
}

int family_of(const Socket& socket) {
  int family = AF_UNSPEC;
  socklen_t length = sizeof family;
  ::getsockopt(socket.get(), SOL_SOCKET, SO_DOMAIN, &family, &length);
  return family;
}

// Who listened or connected at the other end of a Unix socket, as the kernel knows it.
bool peer_is_another_user(const Socket& socket) {
  if (family_of(socket) != AF_UNIX) return false;
  ucred peer{};
  socklen_t length = sizeof peer;
  return ::getsockopt(socket.get(), SOL_SOCKET, SO_PEERCRED, &peer, &length) != 0 ||
         peer.uid != ::geteuid();
}

}  // namespace

// Abstract: the name goes with the last descriptor, and no file system shows it.
SocketAddress user_socket_address(const std::string& name) {
  SocketAddress address;
  auto* where = reinterpret_cast<sockaddr_un*>(address.storage.data());
  where->sun_family = AF_UNIX;
  const std::size_t length = std::min(name.size(), sizeof where->sun_path);
  std::copy_n(name.begin() + 1, length - 1, where->sun_path + 1);
  address.length = socklen_t(offsetof(sockaddr_un, sun_path) + length);
  return address;
}

bool user_sockets() noexcept {
  return true;
}

std::vector<SocketAddress> resolve_host(const std::string& host, std::uint16_t port, int& error,
                                        std::string& problem) {
  addrinfo hints{};
  hints.ai_family = AF_UNSPEC;
  hints.ai_socktype = SOCK_STREAM;
  hints.ai_flags = AI_NUMERICSERV;
  addrinfo* list = nullptr;
  errno = 0;
  const int code = ::getaddrinfo(host.c_str(), std::to_string(port).c_str(), &hints, &list);
  // Without a descriptor for its files the resolver may say that there is no such name.
  error = code == EAI_SYSTEM || (code != 0 && (errno == EMFILE || errno == ENFILE)) ? errno : 0;
  if (code != 0) {
    problem = ::gai_strerror(code);
    return {};
  }
  std::vector<SocketAddress> out;
  for (const addrinfo* a = list; a != nullptr; a = a->ai_next) {
    SocketAddress address;
    std::memcpy(address.storage.data(), a->ai_addr, a->ai_addrlen);
    address.length = a->ai_addrlen;
    out.push_back(address);
  }
  ::freeaddrinfo(list);
  return out;
}

Socket listen_on(const SocketAddress& address, int& error) {
  Socket socket = stream_socket(address);
  if (!socket) {
    error = errno;
    return {};
  }
  set(socket, SOL_SOCKET, SO_REUSEADDR, 1);  // old connections in TIME_WAIT do not block the port
  if (::bind(socket.get(), where_of(address), address.length) != 0 ||
      ::listen(socket.get(), kBacklog) != 0) {
    error = errno;
    return {};
  }
  error = 0;
  return socket;
}

Socket connect_to(const SocketAddress& address, int& error) {
  Socket socket = stream_socket(address);
  error = 0;
  if (!socket) {
    error = errno;
    return {};
  }
  tune(socket);
  if (::connect(socket.get(), where_of(address), address.length) == 0 || errno == EINPROGRESS ||
      errno == EINTR) {
    return socket;
  }
  error = errno;
  return {};
}

int connect_result(const Socket& socket) {
  int error = 0;
  socklen_t length = sizeof error;
  if (::getsockopt(socket.get(), SOL_SOCKET, SO_ERROR, &error, &length) != 0) return errno;
  if (error != 0) return error;
  if (peer_is_another_user(socket)) return EPERM;
  sockaddr_storage own{};
  sockaddr_storage peer{};
  socklen_t own_length = sizeof own;
  socklen_t peer_length = sizeof peer;
  if (::getsockname(socket.get(), reinterpret_cast<sockaddr*>(&own), &own_length) != 0 ||
      ::getpeername(socket.get(), reinterpret_cast<sockaddr*>(&peer), &peer_length) != 0) {
    return errno;
  }
  if (own_length == peer_length && std::memcmp(&own, &peer, own_length) == 0) {
    // Reset, not closed: no TIME_WAIT may keep the port from rank 0.
    reset_when_closed(socket);
    return ECONNREFUSED;
  }
  return 0;
}

void reset_when_closed(const Socket& socket) {
  const linger at_once{.l_onoff = 1, .l_linger = 0};
  ::setsockopt(socket.get(), SOL_SOCKET, SO_LINGER, &at_once, sizeof at_once);
}

std::string numeric_address(const Socket& socket) {
  sockaddr_storage own{};
  socklen_t length = sizeof own;
  auto* where = reinterpret_cast<sockaddr*>(&own);
  char text[NI_MAXHOST];
  if (family_of(socket) == AF_UNIX || ::getsockname(socket.get(), where, &length) != 0 ||
      ::getnameinfo(where, length, text, sizeof text, nullptr, 0, NI_NUMERICHOST) != 0) {
    return {};
  }
  return text;
}

Socket accept_from(const Socket& listener, int& error) {
  Socket socket(::accept4(listener.get(), nullptr, nullptr, SOCK_NONBLOCK | SOCK_CLOEXEC));
  error = 0;
  if (socket) {
    if (peer_is_another_user(socket)) return {};
    tune(socket);
  } else if (errno == EMFILE || errno == ENFILE || errno == ENOBUFS || errno == ENOMEM) {
    error = errno;
  }
  return socket;
}

std::pair<Socket, Socket> connected_pair(int& error) {
  int fds[2];
  error = 0;
  if (::socketpair(AF_UNIX, SOCK_STREAM | SOCK_NONBLOCK | SOCK_CLOEXEC, 0, fds) != 0) {
    error = errno;
    return {};
  }
  return {Socket(fds[0]), Socket(fds[1])};
}

Transfer read_from(const Socket& socket, std::span<std::byte> into) {
  for (;;) {
    const ssize_t n = ::recv(socket.get(), into.data(), into.size(), 0);
    if (n > 0) return {.bytes = std::size_t(n)};
    if (n == 0) return {.ended = true};
    if (errno == EINTR) continue;
    return {.ended = errno != EAGAIN && errno != EWOULDBLOCK};
  }
}

Transfer write_to(const Socket& socket, std::span<const std::byte> from) {
  for (;;) {
    const ssize_t n = ::send(socket.get(), from.data(), from.size(), MSG_NOSIGNAL);
    if (n >= 0) return {.bytes = std::size_t(n)};
    if (errno == EINTR) continue;
    return {.ended = errno != EAGAIN && errno != EWOULDBLOCK};
  }
}

std::size_t unsent_bytes(const Socket& socket) {
  if (family_of(socket) == AF_UNIX) return 0;  // what was written is at the other side already
  int bytes = 0;
  if (::ioctl(socket.get(), SIOCOUTQ, &bytes) != 0 || bytes < 0) return 0;
  return std::size_t(bytes);
}

void shut_down(const Socket& socket, Direction direction) {
  ::shutdown(socket.get(), direction == Direction::both ? SHUT_RDWR : SHUT_WR);
}

bool wait_for(std::span<Polled> polled, std::chrono::milliseconds longest) {
  std::vector<pollfd> all;
  all.reserve(polled.size());
  for (Polled& one : polled) {
    one.readable = one.writable = false;
    const short events = short((one.read ? POLLIN : 0) | (one.write ? POLLOUT : 0));
    all.push_back({.fd = events != 0 ? one.socket : -1, .events = events, .revents = 0});
  }
  const int got = ::poll(all.data(), all.size(), int(longest.count()));
  if (got < 0) {
    // EINTR, or no memory for a moment: the caller polls again, but must not burn the processor.
    if (errno != EINTR) std::this_thread::sleep_for(std::chrono::milliseconds(10));
    return false;
  }
  for (std::size_t i = 0; i < all.size(); ++i) {
    polled[i].readable = (all[i].revents & (POLLIN | POLLHUP | POLLERR)) != 0;
    polled[i].writable = (all[i].revents & (POLLOUT | POLLHUP | POLLERR)) != 0;
  }
  return got > 0;
}

Wakeup::Wakeup(int& error) : reader_(::eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK)) {
  error = reader_ ? 0 : errno;
}

void Wakeup::wake() noexcept {
  // A full counter would mean that the thread has been woken already.
  (void)::eventfd_write(reader_.get(), 1);
}

void Wakeup::clear() noexcept {
  eventfd_t woken = 0;
  (void)::eventfd_read(reader_.get(), &woken);
}

}  // namespace ferry
