// What was compiled into this Ferry.
#pragma once
#include <string>
#include <vector>

namespace ferry::cli {

/// What was compiled into this Ferry, whatever the machine has.
struct Build {
  std::vector<std::string> engines{"host"};
  std::vector<std::string> fabrics{};
  std::vector<std::string> gpus{};  ///< kinds that kernels are compiled for: "sm_90"
};

Build look_at_build();

}  // namespace ferry::cli
