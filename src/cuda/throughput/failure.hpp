// Words for what kernels tell of a failure.
#pragma once
#include "cuda/kernels/base/group_view.hpp"

namespace ferry::cuda {

/// Where a call gave up, in the host engine's words.
const char* stage_name(Stage stage);

}  // namespace ferry::cuda
