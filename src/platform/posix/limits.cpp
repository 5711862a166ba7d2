#include "platform/limits.hpp"

#include <sys/resource.h>

#include <cstdio>

namespace ferry {

std::optional<std::uint64_t> limit_of(Limit which) {
  rlimit limit{};
  const auto get = [&] {
    switch (which) {
      case Limit::address_space: return getrlimit(RLIMIT_AS, &limit);
      case Limit::data: return getrlimit(RLIMIT_DATA, &limit);
      case Limit::locked: return getrlimit(RLIMIT_MEMLOCK, &limit);
      case Limit::file_size: return getrlimit(RLIMIT_FSIZE, &limit);
      case Limit::open_files: return getrlimit(RLIMIT_NOFILE, &limit);
      case Limit::threads: return getrlimit(RLIMIT_NPROC, &limit);
      case Limit::stack: return getrlimit(RLIMIT_STACK, &limit);
    }
    return -1;
  };
  if (get() != 0 || limit.rlim_cur == RLIM_INFINITY) return std::nullopt;
  return limit.rlim_cur;
}

std::uint64_t address_space_taken() {
  unsigned long long kib = 0;
  if (std::FILE* const file = std::fopen("/proc/self/status", "re")) {
    char line[128];
    while (kib == 0 && std::fgets(line, sizeof line, file) != nullptr) {
      if (std::sscanf(line, "VmSize: %llu kB", &kib) != 1) kib = 0;
    }
    std::fclose(file);
  }
  return kib * 1024;
}

}  // namespace ferry
