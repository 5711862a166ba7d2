// The terminal behind a file descriptor.
#pragma once
#include <cstddef>

namespace ferry::cli {

/// Characters of a line; 80 where nobody knows.
std::size_t columns_of(int fd);

}  // namespace ferry::cli
