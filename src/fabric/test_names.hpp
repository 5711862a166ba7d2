// For the tests of shm: which names in /dev/shm belong to whom.
#pragma once
#include <dirent.h>
#include <unistd.h>

#include <set>
#include <string>

#include "fabric/shm/names.hpp"

namespace ferry::fabric::test {

/// Names in /dev/shm whose owner is one of `pids`.
inline std::set<std::string> names_of(const std::set<pid_t>& pids) {
  std::set<std::string> names;
  DIR* folder = opendir("/dev/shm");
  if (folder == nullptr) return names;
  while (const dirent* entry = readdir(folder)) {
    const auto owner = owner_of(entry->d_name);
    if (owner && pids.count(static_cast<pid_t>(owner->pid)) > 0) names.insert(entry->d_name);
  }
  closedir(folder);
  return names;
}

}  // namespace ferry::fabric::test
