// Bytes of handshakes and cards: how they are made, and read with checks.
#pragma once
#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <ferry/error.hpp>
#include <span>
#include <string>
#include <vector>

namespace ferry::fabric::ofi {

constexpr std::size_t kMaxText = 1000;

inline void append(std::vector<std::byte>& bytes, const void* data, std::size_t count) {
  const auto* first = static_cast<const std::byte*>(data);
  bytes.insert(bytes.end(), first, first + count);
}

inline void append_counted(std::vector<std::byte>& bytes, const void* data, std::size_t count) {
  const auto length = static_cast<std::uint32_t>(count);
  append(bytes, &length, sizeof length);
  append(bytes, data, count);
}

inline void append_texts(std::vector<std::byte>& bytes, const std::vector<std::string>& texts,
                         std::size_t most) {
  const auto count = static_cast<std::uint32_t>(std::min(texts.size(), most));
  append(bytes, &count, sizeof count);
  for (std::uint32_t i = 0; i < count; ++i) {
    append_counted(bytes, texts[i].data(), std::min(texts[i].size(), kMaxText));
  }
}

/// Reads from the front; `ok` turns false at what cannot be.
struct Reader {
  std::span<const std::byte> left;
  bool ok = true;

  void read(void* to, std::size_t count) {
    if (!ok || left.size() < count) {
      ok = false;
      return;
    }
    std::memcpy(to, left.data(), count);
    left = left.subspan(count);
  }
  std::span<const std::byte> counted(std::size_t most) {
    std::uint32_t length = 0;
    read(&length, sizeof length);
    ok = ok && length <= most && length <= left.size();
    if (!ok) return {};
    const auto taken = left.first(length);
    left = left.subspan(length);
    return taken;
  }
  std::string text(std::size_t most) {
    const auto taken = counted(most);
    return {reinterpret_cast<const char*>(taken.data()), taken.size()};
  }
  std::uint32_t count(std::uint32_t most) {
    std::uint32_t number = 0;
    read(&number, sizeof number);
    ok = ok && number <= most;
    return ok ? number : 0;
  }
  std::vector<std::string> texts(std::uint32_t most) {
    std::vector<std::string> all;
    const std::uint32_t number = count(most);
    for (std::uint32_t i = 0; ok && i < number; ++i) all.push_back(text(kMaxText));
    return all;
  }
};

[[noreturn]] inline void throw_unreadable(std::size_t bytes, int rank, int peer) {
  throw Error(ErrorKind::mismatch,
              "rank " + std::to_string(rank) + ": what rank " + std::to_string(peer) +
                  " says about its network (" + std::to_string(bytes) +
                  " bytes) cannot be read; use the same version of Ferry, built with libfabric, on "
                  "all ranks, and give all the same fabric",
              {.rank = rank, .peer = peer});
}

}  // namespace ferry::fabric::ofi
