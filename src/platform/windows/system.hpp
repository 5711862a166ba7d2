// What the files of this folder share.
#pragma once
#include <winsock2.h>
// After winsock2.h.
#include <windows.h>

#include <cstddef>
#include <cstdint>
#include <string_view>

namespace ferry::windows {

inline HANDLE handle_of(int number) noexcept {
  return reinterpret_cast<HANDLE>(static_cast<std::intptr_t>(number));
}
/// Handles fit 32 bits: 32-bit and 64-bit programs pass them to one another.
inline int number_of(HANDLE handle) noexcept {
  return handle == INVALID_HANDLE_VALUE || handle == nullptr
             ? -1
             : static_cast<int>(reinterpret_cast<std::intptr_t>(handle));
}

/// The errno that says the same as GetLastError or WSAGetLastError.
int errno_of(unsigned long code) noexcept;

/// FNV-1a.
inline std::uint64_t hash_of(std::string_view text,
                             std::uint64_t hash = 0xcbf29ce484222325) noexcept {
  for (const char c : text) hash = (hash ^ static_cast<unsigned char>(c)) * 0x100000001b3;
  return hash;
}

/// Names a word to all processes that may change it, never 0: by section and offset, or where it is
/// in no section, by process and address.
std::uint64_t key_of(const void* word) noexcept;

}  // namespace ferry::windows
