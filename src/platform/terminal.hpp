// Output behind a file descriptor: a terminal, a file or a pipe.
#pragma once
#include <cstddef>
#include <string_view>

namespace ferry {

/// Characters of a line; 80 where nobody knows.
std::size_t columns_of(int fd);
bool is_terminal(int fd);
bool is_open(int fd);
/// False: whoever read it has gone.
bool write_all(int fd, std::string_view text);

/// Of programs: the standard error.
inline constexpr int kErrorOutput = 2;

}  // namespace ferry
