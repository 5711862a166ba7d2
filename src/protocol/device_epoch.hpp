// What a rank whose calls run on a GPU does at the border of two epochs, as rules over plain
// values: its kernels count generations, post the head of a dispatch while the plan before it runs,
// and take every word for what its generation says (cuda/throughput/regroup.cpp).
#pragma once
#include <cstdint>

#include "core/device.hpp"

namespace ferry::protocol {

/// What these rules rely on, as parameters, so that the model can break it.
struct DeviceEpochTraits {
  /// Calls after the last one that has ended here of which any rank may have posted messages: as
  /// many as a mailbox holds. This rank posts two; a peer that was early, too, may be two ahead.
  static constexpr std::uint64_t kUnderWay = 4;
  static constexpr bool kPlansOfEpoch = true;
};

template <class Traits = DeviceEpochTraits>
struct DeviceEpoch {
  /// The newest generation that any rank may have used, as far as one knows of which no kernel
  /// runs any more: a lost rank cannot be asked.
  /// `ended`: its last call that has ended; `made`: what its CPU counted, which failure broadcasts
  /// say: with graphs that may be more or less.
  static constexpr std::uint64_t newest_used(std::uint64_t ended, std::uint64_t made) {
    const std::uint64_t posted = ended + Traits::kUnderWay;
    return posted > made ? posted : made;
  }
  /// Whether a plan that was made in this generation, 0: refused, is of the epoch that comes after
  /// the generation `before`.
  static constexpr FERRY_FN bool holds(std::uint64_t made, std::uint64_t before) {
    return Traits::kPlansOfEpoch ? made > before : made != 0;
  }
};

}  // namespace ferry::protocol
