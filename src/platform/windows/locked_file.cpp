#include "platform/locked_file.hpp"

#include <cerrno>

namespace ferry {

// Groups of several hosts, which need it, are not to be had there.
FileChange change_locked_file(const std::string& /*path*/, bool /*create*/, std::size_t /*most*/,
                              const std::function<std::string(const std::string&)>& /*change*/) {
  return {"locked on Windows", ENOTSUP};
}

}  // namespace ferry
