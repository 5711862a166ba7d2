#include <sys/mman.h>

#include <cerrno>
#include <system_error>

#include "run/shared_array.hpp"

namespace ferry::cli {

void* map_shared(std::size_t bytes) {
  void* const data =
      mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0);
  if (data == MAP_FAILED) {
    throw std::system_error(errno, std::generic_category(), "cannot map shared memory");
  }
  return data;
}

void unmap_shared(void* data, std::size_t bytes) {
  munmap(data, bytes);
}

}  // namespace ferry::cli
