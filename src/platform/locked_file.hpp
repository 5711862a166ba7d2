// A small file that processes of several hosts change one after another.
#pragma once
#include <cstddef>
#include <functional>
#include <string>

namespace ferry {

struct FileChange {
  const char* failed = nullptr;  ///< null: all went well; otherwise "opened", "locked", ...
  int error = 0;                 ///< the errno of that
};

/// Gives at most `most` bytes of the file to `change`, and writes what that returns, if it differs,
/// through to the disk. Meanwhile nobody else does so; waits for nobody: "locked". `create`: an
/// empty file is made where there is none.
FileChange change_locked_file(const std::string& path, bool create, std::size_t most,
                              const std::function<std::string(const std::string&)>& change);

}  // namespace ferry
