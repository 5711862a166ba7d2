// A process that this command has started as a rank of its own.
#pragma once
#include <cstdint>
#include <string>

#include "windows/system.hpp"

namespace ferry::cli {

/// What its starter tells a rank by the environment.
struct OwnRank {
  std::uint32_t command = 0;  ///< process id of the starter; 0: this process is no rank
  int call = 0;               ///< which of its run_processes, from 0
  int rank = 0;
  std::uint16_t port = 0;
  std::string secret{};
};
const OwnRank& own_rank();

/// The process that has the memory: the starter of this rank, or this one.
inline std::uint32_t command_process() {
  return own_rank().command != 0 ? own_rank().command : GetCurrentProcessId();
}

}  // namespace ferry::cli
