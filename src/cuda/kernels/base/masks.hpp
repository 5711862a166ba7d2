// What the CPU and the kernels of an exchange with masks tell each other of ranks that are left
// out. Plain data.
#pragma once
#include <cstdint>

#include "cuda/kernels/base/group_view.hpp"

namespace ferry::cuda {

/// What the host sees of masks without asking the GPU, and tells running kernels; pinned.
struct LatencyAlarm {
  std::uint64_t masked;             ///< times that a rank was masked by a deadline
  std::uint32_t ranks[kMaxDomain];  ///< not 0: the rank is masked; written before `masked`
  std::uint32_t behind;             ///< a rank, + 1, that goes on without this one; 0: none
};

/// Why a rank is not waited for until the deadline: a word in this rank's memory that others write.
enum class Gone : std::uint32_t {
  no,
  without_us,  ///< it has masked this rank, and says so itself
  dead,        ///< its process has ended, or it left, says this rank's CPU
};

}  // namespace ferry::cuda
