#include "base/open_files.hpp"

#include <cerrno>
#include <system_error>

#include "platform/limits.hpp"

namespace ferry {

bool too_many_files(int error) {
  return error == EMFILE || error == ENFILE;
}

std::string error_text(int error, std::uint64_t files_limit) {
  if (error == ENFILE) {
    return "too many open files on this machine; raise its limit (sysctl fs.file-max) or end "
           "programs that hold many";
  }
  if (error == EMFILE) {
    return "too many open files: this process may have " +
           (files_limit == 0 ? std::string("no more") : std::to_string(files_limit)) +
           "; raise the limit (ulimit -n) before it starts, or close files";
  }
  return std::generic_category().message(error);
}

std::string error_text(int error) {
  return error_text(error, limit_of(Limit::open_files).value_or(0));
}

}  // namespace ferry
