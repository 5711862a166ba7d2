// What the kernels that sum rows have in common: which warp sums which piece of which row, in what
// order, whatever the architecture moves the rows with.
//
// A Source tells which rows make up sum number `token`, `entries()` of them at most, in the order
// in which they are added:
//   Raw load(token, j)              the plan's words for entry j: a plain load, early
//   Entry resolve(raw, token, j)    where that row is; null: there is none
//   kWaits                          whether rows may be missing yet; if so:
//   uint32_t due(raw, j)            what entry j waits for, in kDueBits; 0: nothing
//   bool await(due)                 until the row may be read; false: the group has failed
//   uint32_t row_of(token)          where the sum goes
// A Count is told, as `reached(token)`, that this warp has stored all its items before a token.
#pragma once
#include <cstddef>
#include <cstdint>

namespace ferry::cuda::device {

/// One row of a sum.
struct Entry {
  const std::byte* row;
  float weight;
};

inline constexpr int kDueBits = 17;

/// `rows` sums, cut in `pieces` pieces each; the items (row, piece) are dealt to warps
/// round-robin. Rows and pieces fit in 31 bits, and so do strides of a few batches past the end.
struct SumWork {
  std::byte* out = nullptr;    ///< [at least rows, row_bytes]
  std::int64_t row_bytes = 0;  ///< a multiple of 16
  std::uint32_t rows = 0;
  std::uint32_t pieces = 1;  ///< of piece_bytes; the last one may be shorter
  std::uint32_t piece_bytes = 0;
  std::uint32_t first = 0;   ///< item of this warp
  std::uint32_t stride = 1;  ///< warps in the grid

  __device__ std::int64_t offset_of(std::uint32_t piece) const {
    return static_cast<std::int64_t>(piece) * piece_bytes;
  }
  __device__ std::uint32_t bytes_of(std::uint32_t piece) const {
    const std::int64_t left = row_bytes - offset_of(piece);
    return left < piece_bytes ? static_cast<std::uint32_t>(left) : piece_bytes;
  }
};

/// An item; divisions are made once, then it only steps.
struct Item {
  std::uint32_t token;
  std::uint32_t piece;

  __device__ static Item at(std::uint64_t number, std::uint32_t pieces) {
    return {static_cast<std::uint32_t>(number / pieces),
            static_cast<std::uint32_t>(number % pieces)};
  }
  __device__ void step(const Item& by, std::uint32_t pieces) {
    token += by.token;
    piece += by.piece;
    if (piece >= pieces) {
      piece -= pieces;
      ++token;
    }
  }
};

/// The first item of this warp, of `warps` in a block that sum. Spread: neighbouring items go to
/// different blocks; else to the same.
__device__ inline std::uint32_t first_item(bool spread, std::uint32_t warps) {
  const std::uint32_t warp = threadIdx.x / 32;
  return spread ? warp * gridDim.x + blockIdx.x : blockIdx.x * warps + warp;
}

}  // namespace ferry::cuda::device
