// Helpers of the TCP store's tests: options, raw visitors, what this process holds.
#pragma once
#include <ferry/bootstrap.hpp>

#include <array>
#include <chrono>
#include <cstdlib>
#include <filesystem>
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

/// Whether bytes, a connection or the end have come by then, or room for what is sent.
inline bool comes(const Socket& socket, std::chrono::milliseconds within) {
  std::array<Polled, 1> polled{{{.socket = socket.get(), .read = true}}};
  return wait_for(polled, within);
}
inline bool has_room(const Socket& socket, std::chrono::milliseconds within) {
  std::array<Polled, 1> polled{{{.socket = socket.get(), .write = true}}};
  return wait_for(polled, within);
}

/// A raw connection; none if nobody listens there.
inline Socket connected_to(const TcpOptions& store) {
  int error = 0;
  std::string problem;
  const auto where = resolve_host(store.address, store.port, error, problem);
  if (where.empty()) return {};
  Socket socket = connect_to(where.front(), error);
  if (!socket || !has_room(socket, std::chrono::seconds(8)) || connect_result(socket) != 0) {
    return {};
  }
  return socket;
}

/// Sends that and reads until the store hangs up, 8 s at most.
inline std::string talk_to(const TcpOptions& store, const std::vector<std::byte>& bytes) {
  const Socket socket = connected_to(store);
  std::size_t sent = 0;
  while (sent < bytes.size()) {
    const Transfer put = write_to(socket, std::span(bytes).subspan(sent));
    if (put.ended || (put.bytes == 0 && !has_room(socket, std::chrono::seconds(8)))) break;
    sent += put.bytes;
  }
  std::string answer;
  std::vector<std::byte> buffer(4096);
  const auto due = std::chrono::steady_clock::now() + std::chrono::seconds(8);
  while (std::chrono::steady_clock::now() < due) {
    if (!comes(socket, std::chrono::milliseconds(100))) continue;
    const Transfer got = read_from(socket, buffer);
    if (got.ended) return answer;
    answer.append(reinterpret_cast<const char*>(buffer.data()), got.bytes);
  }
  return answer + "(the store did not hang up)";
}

/// Without the one that this takes.
inline std::set<int> open_descriptors() {
  const std::filesystem::path folder = "/proc/self/fd";
  const auto here = std::filesystem::canonical(folder);
  std::set<int> out;
  for (const auto& entry : std::filesystem::directory_iterator(folder)) {
    std::error_code error;
    if (std::filesystem::read_symlink(entry.path(), error) != here) {
      out.insert(std::atoi(entry.path().filename().c_str()));
    }
  }
  return out;
}

inline std::ptrdiff_t entries_of(const char* path) {
  return std::distance(std::filesystem::directory_iterator(path), {});
}

}  // namespace ferry::bootstrap
