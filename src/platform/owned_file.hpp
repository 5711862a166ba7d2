// Reading a small file that nobody else may read or change.
#pragma once
#include <cstddef>
#include <cstdint>
#include <string>

namespace ferry {

struct FileRead {
  const char* kind = nullptr;    ///< null: a regular file; otherwise "a directory", ...
  std::uint64_t owner = 0;       ///< user id
  unsigned mode = 0;             ///< permissions, as chmod counts them
  std::uint64_t bytes = 0;       ///< as its directory says
  const char* failed = nullptr;  ///< null: all went well; otherwise "opened" or "read"
  int error = 0;                 ///< the errno of that
  std::string text{};            ///< of a regular file: its first bytes
};

/// At most so many bytes of the file. Never waits for who writes (a FIFO).
FileRead read_owned_file(const std::string& path, std::size_t most);

}  // namespace ferry
