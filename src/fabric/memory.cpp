#include "fabric/memory.hpp"

#include <sys/mman.h>

#include <cerrno>
#include <cstdint>
#include <cstring>
#include <ferry/error.hpp>
#include <string>

#include "base/process_limits.hpp"

namespace ferry::fabric {
namespace {

constexpr std::size_t kPage = 4096;

[[noreturn]] void throw_exhausted(std::size_t bytes, int rank, const std::string& reason) {
  throw Error(ErrorKind::exhausted,
              "rank " + std::to_string(rank) + " cannot register " + std::to_string(bytes) +
                  " bytes: " + reason + "; use smaller batches or give this process more memory",
              {.rank = rank});
}

}  // namespace

Memory::~Memory() {
  munmap(data_, mapped_);
}

std::size_t whole_pages(std::size_t bytes, int rank) {
  // Room for rounding up to a page and for aligning to a huge page.
  if (bytes > static_cast<std::size_t>(PTRDIFF_MAX) - kHugePage - kPage) {
    throw_exhausted(bytes, rank, "more than an address space holds");
  }
  return bytes == 0 ? kPage : (bytes + kPage - 1) / kPage * kPage;
}

std::shared_ptr<Memory> anonymous_memory(std::size_t bytes, int rank) {
  const std::size_t wanted = whole_pages(bytes, rank);
  const bool huge = wanted >= kHugePage;
  const std::size_t mapped = huge ? wanted + kHugePage - kPage : wanted;
  void* const at =
      mmap(nullptr, mapped, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
  if (at == MAP_FAILED) {
    throw_exhausted(bytes, rank, std::strerror(errno) + memory_limit_text(mapped));
  }
  auto* start = static_cast<std::byte*>(at);
  if (huge) {  // keep the aligned part, give back both ends
    const std::size_t before =
        (kHugePage - reinterpret_cast<std::uintptr_t>(at) % kHugePage) % kHugePage;
    const std::size_t after = mapped - before - wanted;
    if (before > 0) munmap(start, before);
    if (after > 0) munmap(start + before + wanted, after);
    start += before;
    madvise(start, wanted, MADV_HUGEPAGE);  // only advice
  }
  try {
    return std::make_shared<Memory>(start, wanted);
  } catch (...) {
    munmap(start, wanted);
    throw;
  }
}

}  // namespace ferry::fabric
