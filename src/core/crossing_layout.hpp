// How rows lie in a staging buffer on their way between domains: in blocks, one for each pair of
// ranks, and each block in chunks, which cross as one write. For host and device alike.
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

/// Rows of a call are used in portions, each as soon as it is there: so many, for what comes in at
/// most `chunks` from one rank. Few, because a stream waits for each, and large.
FERRY_FN constexpr int crossing_portions(std::int64_t chunks) {
  constexpr std::int64_t kMost = 8, kLeastChunks = 4;
  const std::int64_t portions = chunks / kLeastChunks;
  return static_cast<int>(portions < 1 ? 1 : portions > kMost ? kMost : portions);
}
/// A portion is an equal share of the chunks of every block: so many of a block have come with it.
FERRY_FN constexpr std::int64_t chunks_after(std::int64_t chunks, int portion, int portions) {
  return chunks * (portion + 1) / portions;
}
/// And so many of its rows; with portion −1: none.
FERRY_FN constexpr std::int64_t rows_after(const CrossingLayout& layout, std::int64_t rows,
                                           int portion, int portions) {
  const std::int64_t end = chunks_after(layout.chunks(rows), portion, portions) * layout.chunk_rows;
  return end < rows ? end : rows;
}

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

/// A chunk of a block.
struct CrossingChunk {
  int block = 0;
  std::int64_t chunk = 0;
};

/// In what order chunks leave: one of each block in turn, as long as it has some, so that all peers
/// get theirs at the same pace. `first`: [blocks + 1] rows before each block; `number` is below the
/// sum of their chunks.
FERRY_FN constexpr CrossingChunk chunk_in_turn(const CrossingLayout& layout,
                                               const std::int64_t* first, int blocks,
                                               std::int64_t number) {
  const auto chunks = [&](int block) { return layout.chunks(first[block + 1] - first[block]); };
  const auto before = [&](std::int64_t round) {
    std::int64_t all = 0;
    for (int block = 0; block < blocks; ++block) {
      all += chunks(block) < round ? chunks(block) : round;
    }
    return all;
  };
  std::int64_t round = 0, end = number + 1;  // before(round) <= number < before(end)
  while (end - round > 1) {
    const std::int64_t middle = round + (end - round) / 2;
    if (before(middle) <= number) {
      round = middle;
    } else {
      end = middle;
    }
  }
  std::int64_t left = number - before(round);
  int block = 0;
  for (; block < blocks; ++block) {
    if (chunks(block) <= round) continue;
    if (left == 0) break;
    --left;
  }
  return {block, round};
}

}  // namespace ferry
