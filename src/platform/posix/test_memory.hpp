// For tests: memory that is not what it seems.
#pragma once
#include <sys/mman.h>
#include <unistd.h>

#include <algorithm>
#include <cstddef>
#include <span>
#include <stdexcept>

namespace ferry::test {

/// Zeroed memory whose second half ends whoever touches it. Never given back.
inline std::byte* half_memory(std::size_t bytes) {
  void* const at = mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
  if (at == MAP_FAILED ||
      mprotect(static_cast<std::byte*>(at) + bytes / 2, bytes / 2, PROT_NONE) != 0) {
    throw std::runtime_error("no such memory");
  }
  return static_cast<std::byte*>(at);
}

/// `bytes` to read that take the memory of `pattern` (whole pages): the same pages, many times.
class PatternMemory {
 public:
  PatternMemory(std::span<const std::byte> pattern, std::size_t bytes) : bytes_(bytes) {
    const int file = memfd_create("ferry pattern", MFD_CLOEXEC);
    bool ok = file >= 0 && ftruncate(file, static_cast<off_t>(pattern.size())) == 0;
    ok = ok &&
         pwrite(file, pattern.data(), pattern.size(), 0) == static_cast<ssize_t>(pattern.size());
    data_ = mmap(nullptr, bytes, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    for (std::size_t at = 0; ok && at < bytes; at += pattern.size()) {
      ok = mmap(static_cast<std::byte*>(data_) + at, std::min(pattern.size(), bytes - at),
                PROT_READ, MAP_SHARED | MAP_FIXED, file, 0) != MAP_FAILED;
    }
    if (file >= 0) close(file);
    if (!ok) throw std::runtime_error("the pattern could not be mapped");
  }
  ~PatternMemory() { munmap(data_, bytes_); }
  PatternMemory(const PatternMemory&) = delete;
  PatternMemory& operator=(const PatternMemory&) = delete;

  const void* data() const { return data_; }

 private:
  std::size_t bytes_;
  void* data_ = nullptr;
};

}  // namespace ferry::test
