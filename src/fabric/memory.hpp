// Zeroed memory of this process that is worth registering.
#pragma once
#include <cstddef>
#include <memory>

namespace ferry::fabric {

/// A mapping of this process, unmapped at the end. Not copied, not moved: shared by pointer.
class Memory {
 public:
  Memory(std::byte* data, std::size_t mapped) : data_(data), mapped_(mapped) {}
  ~Memory();
  Memory(const Memory&) = delete;
  Memory& operator=(const Memory&) = delete;

  std::byte* data() const noexcept { return data_; }
  std::size_t mapped() const noexcept { return mapped_; }

 private:
  std::byte* data_;
  std::size_t mapped_;
};

/// `bytes` rounded up to whole pages, at least one. Throws Error(exhausted), naming `rank`, where
/// the sum would not fit.
std::size_t whole_pages(std::size_t bytes, int rank);

/// Zeroed private memory, aligned to 4096 bytes; from 2 MiB on aligned to 2 MiB, and what is behind
/// the first 4 MiB offered to the kernel for huge pages. Untouched pages take no memory. Throws
/// Error(exhausted) naming `rank`.
std::shared_ptr<Memory> anonymous_memory(std::size_t bytes, int rank);

inline constexpr std::size_t kHugePage = std::size_t{2} << 20;

}  // namespace ferry::fabric
