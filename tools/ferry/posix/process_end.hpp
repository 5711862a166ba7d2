// How a process ended, in words.
#pragma once
#include <string>

#include "platform/child_process.hpp"

namespace ferry::cli {

/// "exited with code 3", "was killed by signal 9 (SIGKILL)".
std::string describe(const ProcessEnd& end);

}  // namespace ferry::cli
