#include "fabric/memory.hpp"

#include <cstdint>
#include <cstring>
#include <ferry/error.hpp>
#include <string>

#include "base/process_limits.hpp"
#include "platform/pages.hpp"

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
  unmap_pages(data_, mapped_);
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
  int error = 0;
  std::byte* const start = private_pages(wanted, wanted >= kHugePage ? kHugePage : kPage, error);
  if (start == nullptr) {
    throw_exhausted(bytes, rank, std::strerror(error) + memory_limit_text(wanted));
  }
  try {
    return std::make_shared<Memory>(start, wanted);
  } catch (...) {
    unmap_pages(start, wanted);
    throw;
  }
}

}  // namespace ferry::fabric
