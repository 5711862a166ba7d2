// The version of Ferry. It is written here alone: CMakeLists.txt and pyproject.toml read it.
#pragma once
#include <string_view>

#define FERRY_VERSION_MAJOR 0
#define FERRY_VERSION_MINOR 1
#define FERRY_VERSION_PATCH 0

namespace ferry {

/// "0.1.0": of the library that the program is linked to; the constants are those of the headers.
std::string_view version();

/// Which code of the host engine serves this machine: "avx512", "avx2" or "baseline". All give the
/// same bits.
std::string_view host_kernels();

}  // namespace ferry
