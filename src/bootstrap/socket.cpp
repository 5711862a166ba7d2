#include "bootstrap/socket.hpp"

#include <ferry/error.hpp>

#include <netdb.h>
#include <netinet/in.h>
#include <netinet/tcp.h>
#include <sys/ioctl.h>
#include <sys/resource.h>
#include <sys/un.h>
#include <unistd.h>

#include <linux/sockios.h>

#include <algorithm>
#include <cerrno>
#include <chrono>
#include <cstddef>
#include <cstring>
#include <thread>

#include "base/open_files.hpp"

namespace ferry::bootstrap {
namespace {

constexpr int kBacklog = 4096;  // the kernel cuts it to its own limit

void set(const Descriptor& socket, int level, int option, int value) {
  // Tuning only: a socket without it still works.
  ::setsockopt(socket.get(), level, option, &value, sizeof value);
}

void tune(const Descriptor& socket) {
  set(socket, IPPROTO_TCP, TCP_NODELAY, 1);
  // A host that vanishes without a word is found by the kernel in about 10 s.
  set(socket, SOL_SOCKET, SO_KEEPALIVE, 1);
  set(socket, IPPROTO_TCP, TCP_KEEPIDLE, 4);
  set(socket, IPPROTO_TCP, TCP_KEEPINTVL, 2);
  set(socket, IPPROTO_TCP, TCP_KEEPCNT, 3);
}

bool is_unix(const StoreAddress& store) {
  return store.address.starts_with('@');
}

Descriptor stream_socket(const Address& address) {
  return Descriptor(
      ::socket(address.storage.ss_family, SOCK_STREAM | SOCK_NONBLOCK | SOCK_CLOEXEC, 0));
}

// Abstract: the name goes with the last descriptor, and no file system shows it.
Address unix_address(const std::string& name) {
  Address address;
  auto* where = reinterpret_cast<sockaddr_un*>(&address.storage);
  where->sun_family = AF_UNIX;
  const std::size_t length = std::min(name.size(), sizeof where->sun_path);
  std::copy_n(name.begin() + 1, length - 1, where->sun_path + 1);
  address.length = socklen_t(offsetof(sockaddr_un, sun_path) + length);
  return address;
}

int family_of(const Descriptor& socket) {
  int family = AF_UNSPEC;
  socklen_t length = sizeof family;
  ::getsockopt(socket.get(), SOL_SOCKET, SO_DOMAIN, &family, &length);
  return family;
}

// Who listened or connected at the other end of a Unix socket, as the kernel knows it.
bool peer_is_another_user(const Descriptor& socket) {
  if (family_of(socket) != AF_UNIX) return false;
  ucred peer{};
  socklen_t length = sizeof peer;
  return ::getsockopt(socket.get(), SOL_SOCKET, SO_PEERCRED, &peer, &length) != 0 ||
         peer.uid != ::geteuid();
}

Descriptor listen_on(const Address& address, int& error) {
  const auto* where = reinterpret_cast<const sockaddr*>(&address.storage);
  Descriptor socket = stream_socket(address);
  if (!socket) {
    error = errno;
    return {};
  }
  set(socket, SOL_SOCKET, SO_REUSEADDR, 1);  // old connections in TIME_WAIT do not block the port
  if (::bind(socket.get(), where, address.length) != 0 || ::listen(socket.get(), kBacklog) != 0) {
    error = errno;
    return {};
  }
  error = 0;
  return socket;
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

std::string error_text(int error) {
  rlimit limit{};
  const bool known = getrlimit(RLIMIT_NOFILE, &limit) == 0 && limit.rlim_cur != RLIM_INFINITY;
  return ferry::error_text(error, known ? limit.rlim_cur : 0);
}

void Descriptor::reset() {
  if (fd_ >= 0) ::close(fd_);
  fd_ = -1;
}

std::string StoreAddress::text() const {
  if (is_unix(*this)) return address;
  const bool v6 = address.find(':') != std::string::npos;
  return (v6 ? "[" + address + "]" : address) + ":" + std::to_string(port);
}

std::vector<Address> resolve(const StoreAddress& store, int rank, std::string& problem) {
  if (is_unix(store)) return {unix_address(store.address)};
  addrinfo hints{};
  hints.ai_family = AF_UNSPEC;
  hints.ai_socktype = SOCK_STREAM;
  hints.ai_flags = AI_NUMERICSERV;
  addrinfo* list = nullptr;
  errno = 0;
  const int code =
      ::getaddrinfo(store.address.c_str(), std::to_string(store.port).c_str(), &hints, &list);
  if (code != 0) {
    // Without a descriptor for its files the resolver may say that there is no such name.
    const bool short_of_files = too_many_files(errno);
    problem = code == EAI_SYSTEM || short_of_files ? error_text(errno) : ::gai_strerror(code);
    if (short_of_files) {
      throw Error(
          ErrorKind::exhausted,
          "rank " + std::to_string(rank) + ": cannot look up \"" + store.address + "\": " + problem,
          {.rank = rank, .stage = "bootstrap: connect"});
    }
    return {};
  }
  std::vector<Address> out;
  for (const addrinfo* a = list; a != nullptr; a = a->ai_next) {
    Address address;
    std::memcpy(&address.storage, a->ai_addr, a->ai_addrlen);
    address.length = a->ai_addrlen;
    out.push_back(address);
  }
  ::freeaddrinfo(list);
  return out;
}

Descriptor listen_at(const StoreAddress& store, int rank) {
  std::string problem;
  const std::vector<Address> addresses = resolve(store, rank, problem);
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
    for (const Address& address : addresses) {
      if (Descriptor socket = listen_on(address, error)) return socket;
    }
    if (error != EADDRINUSE) break;
    std::this_thread::sleep_for(std::chrono::milliseconds(20));
  }
  raise_listen(store, rank, error);
}

Descriptor connect_to(const Address& address, int& error) {
  const auto* where = reinterpret_cast<const sockaddr*>(&address.storage);
  Descriptor socket = stream_socket(address);
  error = 0;
  if (!socket) {
    error = errno;
    return {};
  }
  tune(socket);
  if (::connect(socket.get(), where, address.length) == 0 || errno == EINPROGRESS ||
      errno == EINTR) {
    return socket;
  }
  error = errno;
  return {};
}

int connect_result(const Descriptor& socket) {
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
    const linger at_once{.l_onoff = 1, .l_linger = 0};
    ::setsockopt(socket.get(), SOL_SOCKET, SO_LINGER, &at_once, sizeof at_once);
    return ECONNREFUSED;
  }
  return 0;
}

std::string own_address(const Descriptor& socket) {
  Address own;
  own.length = sizeof own.storage;
  auto* where = reinterpret_cast<sockaddr*>(&own.storage);
  char text[NI_MAXHOST];
  if (family_of(socket) == AF_UNIX || ::getsockname(socket.get(), where, &own.length) != 0 ||
      ::getnameinfo(where, own.length, text, sizeof text, nullptr, 0, NI_NUMERICHOST) != 0) {
    return {};
  }
  const std::string address = text;
  const bool reached = address != "0.0.0.0" && address != "::" && address != "::1" &&
                       !address.starts_with("127.") && !address.starts_with("fe80");
  return reached ? address : std::string();
}

Descriptor accept_from(const Descriptor& listener, int& error) {
  Descriptor socket(::accept4(listener.get(), nullptr, nullptr, SOCK_NONBLOCK | SOCK_CLOEXEC));
  error = 0;
  if (socket) {
    if (peer_is_another_user(socket)) return {};
    tune(socket);
  } else if (errno == EMFILE || errno == ENFILE || errno == ENOBUFS || errno == ENOMEM) {
    error = errno;
  }
  return socket;
}

std::pair<Descriptor, Descriptor> socket_pair(int rank) {
  int fds[2];
  if (::socketpair(AF_UNIX, SOCK_STREAM | SOCK_NONBLOCK | SOCK_CLOEXEC, 0, fds) != 0) {
    throw Error(too_many_files(errno) ? ErrorKind::exhausted : ErrorKind::system,
                "rank " + std::to_string(rank) + ": no sockets for the store: " + error_text(errno),
                {.rank = rank, .stage = "bootstrap: listen"});
  }
  return {Descriptor(fds[0]), Descriptor(fds[1])};
}

Transfer read_from(const Descriptor& socket, std::span<std::byte> into) {
  for (;;) {
    const ssize_t n = ::recv(socket.get(), into.data(), into.size(), 0);
    if (n > 0) return {.bytes = std::size_t(n)};
    if (n == 0) return {.ended = true};
    if (errno == EINTR) continue;
    return {.ended = errno != EAGAIN && errno != EWOULDBLOCK};
  }
}

Transfer write_to(const Descriptor& socket, std::span<const std::byte> from) {
  for (;;) {
    const ssize_t n = ::send(socket.get(), from.data(), from.size(), MSG_NOSIGNAL);
    if (n >= 0) return {.bytes = std::size_t(n)};
    if (errno == EINTR) continue;
    return {.ended = errno != EAGAIN && errno != EWOULDBLOCK};
  }
}

std::size_t unsent_bytes(const Descriptor& socket) {
  if (family_of(socket) == AF_UNIX) return 0;  // what was written is at the other side already
  int bytes = 0;
  if (::ioctl(socket.get(), SIOCOUTQ, &bytes) != 0 || bytes < 0) return 0;
  return std::size_t(bytes);
}

}  // namespace ferry::bootstrap
