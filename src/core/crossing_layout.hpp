// How rows lie in a stage on their way between domains: in blocks, one for each pair of ranks, and
// each block in chunks, which cross as one piece. For host and device alike.
#pragma once
#include <cstddef>
#include <cstdint>

#include "core/layout.hpp"

namespace ferry {

/// What crosses of each row.
struct CrossingRow {
  std::size_t bytes = 0;            ///< of the row, a multiple of 16
  std::int64_t scale_columns = 0;   ///< f32
  std::int64_t weight_columns = 0;  ///< f32
};

/// A chunk of n rows holds n rows, then their scales, then their weights, all dense: what crosses
/// is exactly that, and the gap behind it does not. Chunks begin at multiples of a line.
struct CrossingLayout {
  std::size_t row_bytes = 0;
  std::size_t scale_bytes = 0;  ///< of a row
  std::size_t weight_bytes = 0;
  std::int64_t chunk_rows = 1;  ///< of a full chunk
  std::size_t chunk_bytes = 0;  ///< from one chunk to the next

  FERRY_FN constexpr std::size_t each() const { return row_bytes + scale_bytes + weight_bytes; }
  FERRY_FN constexpr std::int64_t chunks(std::int64_t rows) const {
    return (rows + chunk_rows - 1) / chunk_rows;
  }
  FERRY_FN constexpr std::size_t block_bytes(std::int64_t rows) const {
    return static_cast<std::size_t>(chunks(rows)) * chunk_bytes;
  }
  /// Rows of chunk `chunk` of a block of `rows`.
  FERRY_FN constexpr std::int64_t rows_of(std::int64_t rows, std::int64_t chunk) const {
    const std::int64_t left = rows - chunk * chunk_rows;
    return left < chunk_rows ? left : chunk_rows;
  }
};

/// Where the parts of one row lie, from the beginning of its block.
struct CrossingPlace {
  std::size_t row = 0;
  std::size_t scales = 0;
  std::size_t weights = 0;
};

FERRY_FN constexpr CrossingPlace crossing_place(const CrossingLayout& layout, std::int64_t rows,
                                                std::int64_t row) {
  const std::int64_t chunk = row / layout.chunk_rows;
  const auto in = static_cast<std::size_t>(row % layout.chunk_rows);
  const auto n = static_cast<std::size_t>(layout.rows_of(rows, chunk));
  const std::size_t begin = static_cast<std::size_t>(chunk) * layout.chunk_bytes;
  const std::size_t scales = begin + n * layout.row_bytes;
  return {begin + in * layout.row_bytes, scales + in * layout.scale_bytes,
          scales + n * layout.scale_bytes + in * layout.weight_bytes};
}

FERRY_FN constexpr CrossingLayout make_crossing_layout(const CrossingRow& row) {
  CrossingLayout layout{};
  layout.row_bytes = row.bytes;
  layout.scale_bytes = static_cast<std::size_t>(row.scale_columns) * sizeof(float);
  layout.weight_bytes = static_cast<std::size_t>(row.weight_columns) * sizeof(float);
  layout.chunk_rows = chunk_rows(row.bytes);
  layout.chunk_bytes =
      round_up(static_cast<std::size_t>(layout.chunk_rows) * layout.each(), kLineBytes);
  return layout;
}

}  // namespace ferry
