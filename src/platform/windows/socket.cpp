#include "platform/socket.hpp"

#include "platform/windows/system.hpp"
// After winsock2.h.
#include <mstcpip.h>
#include <ws2tcpip.h>

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <thread>
#include <tuple>

namespace ferry {
namespace {

int last_error() {
  return windows::errno_of(static_cast<unsigned long>(WSAGetLastError()));
}

SOCKET native(const Socket& socket) {
  return static_cast<SOCKET>(socket.get());
}

/// Once in a process; never undone: sockets may outlive statics.
void start_winsock() {
  static const int started = [] {
    WSADATA data;
    return WSAStartup(MAKEWORD(2, 2), &data);
  }();
  (void)started;  // sockets fail with the reason
}

void set(const Socket& socket, int level, int option, int value) {
  // Tuning only: a socket without it still works.
  ::setsockopt(native(socket), level, option, reinterpret_cast<const char*>(&value), sizeof value);
}

void make_nonblocking(const Socket& socket) {
  u_long yes = 1;
  ::ioctlsocket(native(socket), FIONBIO, &yes);
}

void tune(const Socket& socket) {
  set(socket, IPPROTO_TCP, TCP_NODELAY, 1);
  // A host that vanishes without a word is found in about 10 s.
  tcp_keepalive keep{.onoff = 1, .keepalivetime = 4000, .keepaliveinterval = 2000};
  DWORD bytes = 0;
  ::WSAIoctl(native(socket), SIO_KEEPALIVE_VALS, &keep, sizeof keep, nullptr, 0, &bytes, nullptr,
             nullptr);
}

const sockaddr* where_of(const SocketAddress& address) {
  return reinterpret_cast<const sockaddr*>(address.storage.data());
}

Socket owned(SOCKET made) {
  return Socket(made == INVALID_SOCKET ? -1 : static_cast<int>(made));
}

Socket stream_socket(int family) {
  start_winsock();
  return owned(::WSASocketW(family, SOCK_STREAM, IPPROTO_TCP, nullptr, 0,
                            WSA_FLAG_OVERLAPPED | WSA_FLAG_NO_HANDLE_INHERIT));
}

/// One end of it, or nothing.
bool address_of(const Socket& socket, bool peer, sockaddr_storage& out) {
  out = {};
  int length = sizeof out;
  auto* where = reinterpret_cast<sockaddr*>(&out);
  return (peer ? ::getpeername(native(socket), where, &length)
               : ::getsockname(native(socket), where, &length)) == 0;
}

/// That an attempt to connect has failed, WSAPoll does not tell before Windows 10 2004, and wine's
/// not when it failed before the call: the sockets that only wait for writing are asked.
bool mark_failed(std::vector<WSAPOLLFD>& all) {
  bool any = false;
  for (WSAPOLLFD& each : all) {
    int error = 0, length = sizeof error;
    if (each.events != POLLWRNORM ||
        ::getsockopt(each.fd, SOL_SOCKET, SO_ERROR, reinterpret_cast<char*>(&error), &length) !=
            0 ||
        error == 0) {
      continue;
    }
    each.revents = POLLERR;
    any = true;
  }
  return any;
}

/// True: something has come of it.
bool poll_all(std::vector<WSAPOLLFD>& all, std::chrono::milliseconds longest, bool connecting) {
  constexpr std::chrono::milliseconds kAskAgain{20};
  const auto due = std::chrono::steady_clock::now() + longest;
  for (;;) {
    const auto left = std::chrono::ceil<std::chrono::milliseconds>(
        std::max<std::chrono::nanoseconds>(due - std::chrono::steady_clock::now(), {}));
    const auto slice = connecting ? std::min(left, kAskAgain) : left;
    const int got = ::WSAPoll(all.data(), static_cast<ULONG>(all.size()), int(slice.count()));
    if (got > 0) return true;
    if (got < 0) std::this_thread::sleep_for(std::chrono::milliseconds(10));
    if (connecting && mark_failed(all)) return true;
    if (got < 0 || slice == left) return false;
  }
}

bool equal(const sockaddr_storage& a, const sockaddr_storage& b) {
  return std::memcmp(&a, &b, sizeof a) == 0;
}

}  // namespace

bool user_sockets() noexcept {
  return false;  // those of Windows do not tell who is at the other end
}

SocketAddress user_socket_address(const std::string& /*name*/) {
  return {};
}

std::vector<SocketAddress> resolve_host(const std::string& host, std::uint16_t port, int& error,
                                        std::string& problem) {
  start_winsock();
  error = 0;
  addrinfo hints{};
  hints.ai_family = AF_UNSPEC;
  hints.ai_socktype = SOCK_STREAM;
  addrinfo* list = nullptr;
  const int code = ::getaddrinfo(host.c_str(), std::to_string(port).c_str(), &hints, &list);
  if (code != 0) {
    problem = ::gai_strerrorA(code);
    return {};
  }
  std::vector<SocketAddress> out;
  for (const addrinfo* a = list; a != nullptr; a = a->ai_next) {
    SocketAddress address;
    std::memcpy(address.storage.data(), a->ai_addr, a->ai_addrlen);
    address.length = static_cast<unsigned>(a->ai_addrlen);
    out.push_back(address);
  }
  ::freeaddrinfo(list);
  return out;
}

Socket listen_on(const SocketAddress& address, int& error) {
  Socket socket = stream_socket(where_of(address)->sa_family);
  if (!socket) {
    error = last_error();
    return {};
  }
  // Otherwise another program could listen at the same port.
  set(socket, SOL_SOCKET, SO_EXCLUSIVEADDRUSE, 1);
  make_nonblocking(socket);
  if (::bind(native(socket), where_of(address), static_cast<int>(address.length)) != 0 ||
      ::listen(native(socket), SOMAXCONN) != 0) {
    error = last_error();
    return {};
  }
  error = 0;
  return socket;
}

Socket connect_to(const SocketAddress& address, int& error) {
  error = 0;
  Socket socket = stream_socket(where_of(address)->sa_family);
  if (!socket) {
    error = last_error();
    return {};
  }
  make_nonblocking(socket);
  tune(socket);
  if (::connect(native(socket), where_of(address), static_cast<int>(address.length)) == 0 ||
      WSAGetLastError() == WSAEWOULDBLOCK) {
    return socket;
  }
  error = last_error();
  return {};
}

int connect_result(const Socket& socket) {
  int error = 0;
  int length = sizeof error;
  if (::getsockopt(native(socket), SOL_SOCKET, SO_ERROR, reinterpret_cast<char*>(&error),
                   &length) != 0) {
    return last_error();
  }
  if (error != 0) return windows::errno_of(static_cast<unsigned long>(error));
  sockaddr_storage own{}, peer{};
  if (!address_of(socket, false, own) || !address_of(socket, true, peer)) return last_error();
  if (equal(own, peer)) {
    reset_when_closed(socket);
    return ECONNREFUSED;
  }
  return 0;
}

void reset_when_closed(const Socket& socket) {
  const linger at_once{.l_onoff = 1, .l_linger = 0};
  ::setsockopt(native(socket), SOL_SOCKET, SO_LINGER, reinterpret_cast<const char*>(&at_once),
               sizeof at_once);
}

std::string numeric_address(const Socket& socket) {
  sockaddr_storage own{};
  char text[NI_MAXHOST];
  if (!address_of(socket, false, own) ||
      ::getnameinfo(reinterpret_cast<const sockaddr*>(&own), sizeof own, text, sizeof text, nullptr,
                    0, NI_NUMERICHOST) != 0) {
    return {};
  }
  return text;
}

Socket accept_from(const Socket& listener, int& error) {
  Socket socket = owned(::accept(native(listener), nullptr, nullptr));
  error = 0;
  if (socket) {
    SetHandleInformation(windows::handle_of(socket.get()), HANDLE_FLAG_INHERIT, 0);
    make_nonblocking(socket);
    tune(socket);
    return socket;
  }
  const int failed = last_error();
  if (failed == EMFILE || failed == ENOBUFS || failed == ENOMEM) error = failed;
  return socket;
}

std::pair<Socket, Socket> connected_pair(int& error) {
  SocketAddress address;
  auto* where = reinterpret_cast<sockaddr_in*>(address.storage.data());
  where->sin_family = AF_INET;
  where->sin_addr.s_addr = htonl(INADDR_LOOPBACK);
  int length = sizeof *where;
  address.length = sizeof *where;
  const Socket listener = listen_on(address, error);
  if (!listener) return {};
  ::getsockname(native(listener), reinterpret_cast<sockaddr*>(where), &length);
  Socket one = connect_to(address, error);
  if (!one) return {};
  for (;;) {
    Polled polled{.socket = listener.get(), .read = true};
    if (!wait_for({&polled, 1}, std::chrono::seconds(10))) {
      error = ETIMEDOUT;
      return {};
    }
    Socket other = accept_from(listener, error);
    if (error != 0) return {};
    sockaddr_storage own{}, peer{};
    if (!other || !address_of(one, false, own) || !address_of(other, true, peer)) continue;
    if (equal(own, peer)) return {std::move(one), std::move(other)};  // and not somebody else
  }
}

Transfer read_from(const Socket& socket, std::span<std::byte> into) {
  const int n = ::recv(native(socket), reinterpret_cast<char*>(into.data()),
                       static_cast<int>(into.size()), 0);
  if (n > 0) return {.bytes = std::size_t(n)};
  if (n == 0) return {.ended = true};
  return {.ended = WSAGetLastError() != WSAEWOULDBLOCK};
}

Transfer write_to(const Socket& socket, std::span<const std::byte> from) {
  constexpr std::size_t kMost = std::size_t{1} << 30;
  const int n = ::send(native(socket), reinterpret_cast<const char*>(from.data()),
                       static_cast<int>(std::min(from.size(), kMost)), 0);
  if (n >= 0) return {.bytes = std::size_t(n)};
  return {.ended = WSAGetLastError() != WSAEWOULDBLOCK};
}

std::size_t unsent_bytes(const Socket& /*socket*/) {
  return 0;  // the system sends on after a close, and after the process's end
}

void shut_down(const Socket& socket, Direction direction) {
  ::shutdown(native(socket), direction == Direction::both ? SD_BOTH : SD_SEND);
}

bool wait_for(std::span<Polled> polled, std::chrono::milliseconds longest) {
  std::vector<WSAPOLLFD> all;
  std::vector<std::size_t> places;  // a socket that is not waited for would be an error
  bool connecting = false;
  for (std::size_t i = 0; i < polled.size(); ++i) {
    Polled& one = polled[i];
    one.readable = one.writable = false;
    const short events = short((one.read ? POLLRDNORM : 0) | (one.write ? POLLWRNORM : 0));
    if (events == 0 || one.socket < 0) continue;
    all.push_back({.fd = static_cast<SOCKET>(one.socket), .events = events, .revents = 0});
    places.push_back(i);
    connecting = connecting || !one.read;
  }
  if (all.empty()) {
    std::this_thread::sleep_for(longest);
    return false;
  }
  if (!poll_all(all, longest, connecting)) return false;
  for (std::size_t i = 0; i < all.size(); ++i) {
    const short ended = POLLHUP | POLLERR | POLLNVAL;
    polled[places[i]].readable = (all[i].revents & (POLLRDNORM | ended)) != 0;
    polled[places[i]].writable = (all[i].revents & (POLLWRNORM | ended)) != 0;
  }
  return true;
}

Wakeup::Wakeup(int& error) {
  std::tie(reader_, writer_) = connected_pair(error);
}

void Wakeup::wake() noexcept {
  // A full buffer would mean that the thread has been woken already.
  const char one = 1;
  ::send(native(writer_), &one, 1, 0);
}

void Wakeup::clear() noexcept {
  char woken[64];
  while (::recv(native(reader_), woken, sizeof woken, 0) > 0) {
  }
}

}  // namespace ferry
