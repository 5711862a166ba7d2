// Memory of this command and of the ranks that it starts (rank_processes.cpp): they are this
// program with the same arguments, so the n-th block of a rank is the n-th of the command.
#include <fmt/format.h>

#include <cstdint>

#include "run/shared_array.hpp"
#include "windows/ranks.hpp"

namespace ferry::cli {

void* map_shared(std::size_t bytes) {
  static int made = 0;
  const std::string name = fmt::format("Local\\ferry-command-{}-{}", command_process(), made++);
  // Never closed: a rank of a later run comes by the blocks of the earlier ones.
  HANDLE section = CreateFileMappingA(INVALID_HANDLE_VALUE, nullptr, PAGE_READWRITE,
                                      static_cast<DWORD>(std::uint64_t{bytes} >> 32),
                                      static_cast<DWORD>(bytes), name.c_str());
  void* const data =
      section == nullptr ? nullptr : MapViewOfFile(section, FILE_MAP_ALL_ACCESS, 0, 0, 0);
  if (data == nullptr) raise_last("cannot map shared memory");
  return data;
}

void unmap_shared(void* data, std::size_t /*bytes*/) {
  UnmapViewOfFile(data);
}

}  // namespace ferry::cli
