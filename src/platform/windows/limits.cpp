#include "platform/limits.hpp"

namespace ferry {

// A job object may limit a process, but not by these.
std::optional<std::uint64_t> limit_of(Limit /*which*/) {
  return std::nullopt;
}

std::uint64_t address_space_taken() {
  return 0;
}

}  // namespace ferry
