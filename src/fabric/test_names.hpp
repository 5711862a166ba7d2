// For the tests of shm: which names in /dev/shm belong to whom.
#pragma once
#include <cstdint>
#include <filesystem>
#include <set>
#include <string>

#include "fabric/shm/names.hpp"
#include "platform/process.hpp"

namespace ferry::fabric::test {

/// Names in /dev/shm whose owner is one of `pids`.
inline std::set<std::string> names_of(const std::set<std::int64_t>& pids) {
  std::set<std::string> names;
  for (const auto& entry : std::filesystem::directory_iterator("/dev/shm")) {
    const std::string name = entry.path().filename().string();
    const auto owner = owner_of(name.c_str());
    if (owner && pids.count(owner->pid) > 0) names.insert(name);
  }
  return names;
}
inline std::set<std::string> own_names() {
  return names_of({process_id()});
}

}  // namespace ferry::fabric::test
