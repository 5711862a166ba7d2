// Helpers of the TCP store's tests: options, raw visitors, what this process holds.
#pragma once
#include <ferry/bootstrap.hpp>

#include <arpa/inet.h>
#include <dirent.h>
#include <fcntl.h>
#include <netinet/in.h>
#include <poll.h>
#include <sys/socket.h>
#include <unistd.h>

#include <chrono>
#include <cstdlib>
#include <iterator>
#include <set>
#include <string>
#include <vector>

#include "bootstrap/socket.hpp"
#include "bootstrap/test_port.hpp"

namespace ferry::bootstrap {

inline TcpOptions fresh_options(int size) {
  TcpOptions options;
  options.size = size;
  options.port = test::free_port();
  options.secret = "a-secret-of-the-tests";
  options.deadline = std::chrono::seconds(30);
  return options;
}

inline TcpOptions as_rank(TcpOptions options, int rank) {
  options.rank = rank;
  return options;
}

/// A raw connection, blocking; none if nobody listens there.
inline Socket connected_to(const TcpOptions& store) {
  Socket socket(::socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0));
  sockaddr_in where{};
  where.sin_family = AF_INET;
  where.sin_port = htons(store.port);
  ::inet_pton(AF_INET, store.address.c_str(), &where.sin_addr);
  if (::connect(socket.get(), reinterpret_cast<sockaddr*>(&where), sizeof where) != 0) return {};
  return socket;
}

/// Sends that and reads until the store hangs up, 8 s at most.
inline std::string talk_to(const TcpOptions& store, const std::vector<std::byte>& bytes) {
  const Socket socket = connected_to(store);
  std::size_t sent = 0;
  while (sent < bytes.size()) {
    const Transfer put = write_to(socket, std::span(bytes).subspan(sent));
    if (put.ended || put.bytes == 0) break;
    sent += put.bytes;
  }
  std::string answer;
  std::vector<std::byte> buffer(4096);
  const auto due = std::chrono::steady_clock::now() + std::chrono::seconds(8);
  while (std::chrono::steady_clock::now() < due) {
    pollfd polled{.fd = socket.get(), .events = POLLIN, .revents = 0};
    if (::poll(&polled, 1, 100) <= 0) continue;
    const Transfer got = read_from(socket, buffer);
    if (got.ended) return answer;
    answer.append(reinterpret_cast<const char*>(buffer.data()), got.bytes);
  }
  return answer + "(the store did not hang up)";
}

inline std::set<int> open_descriptors() {
  std::set<int> out;
  DIR* const folder = ::opendir("/proc/self/fd");
  while (const dirent* entry = ::readdir(folder)) {
    const int fd = std::atoi(entry->d_name);
    if (entry->d_name[0] != '.' && fd != ::dirfd(folder)) out.insert(fd);
  }
  ::closedir(folder);
  return out;
}

inline std::size_t entries_of(const char* path) {
  DIR* const folder = ::opendir(path);
  std::size_t count = 0;
  while (::readdir(folder) != nullptr) ++count;
  ::closedir(folder);
  return count;
}

}  // namespace ferry::bootstrap
