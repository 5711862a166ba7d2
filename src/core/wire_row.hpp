// What a dispatch moves of each token: its row as it arrives, and the row's scales.
#pragma once
#include <cstddef>
#include <cstdint>

#include "core/number/quantize.hpp"
#include "ferry/group.hpp"

namespace ferry {

struct WireRow {
  Dtype dtype = Dtype::bf16;
  std::int64_t columns = 0;
  std::int64_t scale_columns = 0;  ///< 0: no scales
  bool quantized = false;          ///< made on the way, scales too
  bool round_scale = false;        ///< then: to powers of two

  std::size_t bytes() const { return static_cast<std::size_t>(columns) * size_of(dtype); }
};

/// Of arguments that check_dispatch has passed.
inline WireRow wire_row(const ConstTensorView& x, const DispatchOptions& options) {
  WireRow row{x.dtype, x.columns()};
  if (options.scales) row.scale_columns = options.scales->columns();
  if (options.format == WireFormat::e4m3) {
    row.dtype = Dtype::e4m3;
    row.scale_columns =
        static_cast<std::int64_t>(scale_count(static_cast<std::size_t>(row.columns)));
    row.quantized = true;
    row.round_scale = options.scale_format != ScaleFormat::f32;
  }
  return row;
}

}  // namespace ferry
