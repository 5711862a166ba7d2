// A collective over dense tensors in GPU memory as the engine launches it. Nothing here needs nvcc.
//
// Small tensors ride in the inboxes of all ranks, each 4 bytes beside its generation (one_shot.cu).
// Large ones are read and written in place where every rank's lies in registered memory, else they
// pass through inboxes in rounds (inbox.cuh). Sums of very large ones go through the inboxes in any
// case: links carry stores faster than loads and stores at once.
#pragma once
#include <cuda_runtime_api.h>

#include <algorithm>
#include <cstddef>
#include <cstdint>

#include "cuda/kernels/base/group_view.hpp"
#include "ferry/collectives.hpp"
#include "ferry/dtype.hpp"

namespace ferry::cuda {

/// A part of a tensor for each rank, in bytes.
struct Pieces {
  std::int64_t stride = 0;              ///< from one rank's to the next one's
  std::int64_t bytes = 0;               ///< of each
  std::int64_t end = INT64_MAX;         ///< of the tensor: pieces are cut off there
  std::int32_t only = -1;               ///< only this rank has one; −1: all
  const std::int64_t* table = nullptr;  ///< pinned [2, ranks]: offsets, then bytes; or null

  FERRY_FN std::int64_t offset(int rank) const {
    return table != nullptr ? table[rank] : rank * stride;
  }
  FERRY_FN std::int64_t size(int rank, int ranks) const {
    if (table != nullptr) return table[ranks + rank];
    if (only >= 0 && only != rank) return 0;
    const std::int64_t rest = end - rank * stride;
    return rest < bytes ? (rest < 0 ? 0 : rest) : bytes;
  }
};

/// Rounds whose data lie in an inbox at the same time.
inline constexpr int kInboxDepth = 4;
/// What a block moves in a round is a multiple of this.
inline constexpr std::size_t kInboxUnit = 512;

/// Offers of a rank to another one that are not answered yet, at most; more wait.
inline constexpr int kMostOffers = 32;
/// What a sender writes to the receiver (transfer.hpp); `number` is stored last. 0: none.
struct TransferOffer {
  std::uint64_t number;
  std::uint64_t tag;
  std::uint64_t bytes;
  std::uint64_t offset;
  std::uint64_t segment;
};
/// And the receiver to the sender; `number` is stored last.
struct TransferAnswer {
  std::uint64_t number;
  std::uint64_t bytes;  ///< that it expects
};

/// One rank's segment of collectives, the same layout and number on all ranks; peers write it.
struct CollectiveLayout {
  std::size_t one_shot = 0;        ///< [2, R, one_shot_slot]: by parity of the generation
  std::size_t one_shot_bytes = 0;  ///< of a piece, at most
  std::size_t one_shot_slot = 0;
  /// u64 [R, kMaxBlocks] each: rounds whose pieces have come; whose results have come, or whose
  /// pieces the receiver has read.
  std::size_t come = 0;
  std::size_t back = 0;
  std::size_t pieces = 0;   ///< [kInboxDepth, R, round_bytes]
  std::size_t results = 0;  ///< the same
  std::size_t round_bytes = 0;
  std::size_t offers = 0;   ///< TransferOffer [R, kMostOffers], from each rank
  std::size_t answers = 0;  ///< TransferAnswer [R, kMostOffers], from each rank
  std::size_t arrived = 0;  ///< u32 [R, kMostOffers]: blocks that have read; 0 between
  std::size_t bytes = 0;
};

FERRY_FN constexpr CollectiveLayout make_collective_layout(int ranks) {
  const auto r = static_cast<std::size_t>(ranks);
  constexpr std::size_t kMost = std::size_t{256} << 10, kLeast = std::size_t{16} << 10;
  constexpr std::size_t kTogether = std::size_t{1} << 20;  // of all ranks' pieces
  constexpr std::size_t kInbox = std::size_t{64} << 20;    // of an inbox
  CollectiveLayout layout{};
  const std::size_t share = kTogether / r / 1024 * 1024;
  layout.one_shot_bytes = share > kMost ? kMost : (share < kLeast ? kLeast : share);
  layout.one_shot_slot = 2 * layout.one_shot_bytes;
  layout.round_bytes = kInbox / static_cast<std::size_t>(kInboxDepth) / r / 1024 * 1024;
  Carver carver{};
  layout.come = carver.take(r * kMaxBlocks * sizeof(std::uint64_t));
  layout.back = carver.take(r * kMaxBlocks * sizeof(std::uint64_t));
  layout.one_shot = carver.take(2 * r * layout.one_shot_slot);
  layout.pieces = carver.take(kInboxDepth * r * layout.round_bytes);
  layout.results = carver.take(kInboxDepth * r * layout.round_bytes);
  layout.offers = carver.take(r * kMostOffers * sizeof(TransferOffer));
  layout.answers = carver.take(r * kMostOffers * sizeof(TransferAnswer));
  layout.arrived = carver.take(r * kMostOffers * sizeof(std::uint32_t));
  layout.bytes = round_up(carver.end, 4096);
  return layout;
}

/// Where a tensor lies that peers touch, in registered memory of this rank.
struct CollectivePlace {
  std::int64_t bytes = -1;  ///< −1: elsewhere
  std::uint64_t offset = 0;
  std::uint32_t segment = 0;
};

struct CollectiveParameters {
  GroupView group{};
  CallSignature call{};
  Stage stage = Stage::none;
  Failure* failure = nullptr;
  CollectiveLayout layout{};
  std::uint32_t segment = 0;  ///< of that layout, on all ranks

  const std::byte* x = nullptr;
  std::byte* out = nullptr;
  Pieces to{};    ///< of x, for each rank
  Pieces from{};  ///< of out, from each rank; not of a reduction
  /// pinned [2, ranks]: elements for each rank and from each, which all ranks compare; or null.
  const std::int64_t* counts = nullptr;
  std::int64_t element_bytes = 1;

  bool reduces = false;  ///< else it copies
  bool spreads = false;  ///< every rank takes the results of all pieces: all_reduce
  bool pushes = false;   ///< with spreads: pieces go through inboxes, wherever the tensors lie
  ReduceOp op = ReduceOp::sum;
  Dtype dtype = Dtype::u8;
  CollectivePlace place{};  ///< what peers read (of a reduction: x) or write (else: out)
  int blocks = 1;           ///< the same on all ranks; all run at once
  std::int64_t chunk = 0;   ///< bytes of a piece that a block moves in a round; alike
};

/// Every piece has at most layout.one_shot_bytes. A reduction that spreads: `to` is all of x for
/// each rank.
cudaError_t launch_one_shot(const CollectiveParameters& parameters, cudaStream_t stream);
/// A reduction that spreads: `to` is the share of each rank, whose offsets are multiples of 16.
cudaError_t launch_large(const CollectiveParameters& parameters, cudaStream_t stream);

/// f32 and bf16 or f16, in memory of this GPU.
struct Conversion {
  const std::byte* from = nullptr;
  std::byte* to = nullptr;
  std::int64_t count = 0;
  Dtype from_dtype = Dtype::f32;
  Dtype to_dtype = Dtype::f32;
};
cudaError_t launch_convert(const Conversion& conversion, int most_blocks, cudaStream_t stream);

/// copy_rows and add_rows by a table in GPU memory. Of the parameters `group`, `call`, `stage`,
/// `failure`, `x`, `out`, `place` and `blocks` count: of copies what peers write is `out`, of sums
/// what they read is `x`, in registered memory on all ranks.
struct RowsParameters {
  CollectiveParameters base{};
  const std::int32_t* table = nullptr;  ///< [ranks, slots], in this GPU's memory
  std::int32_t rows = 0;                ///< of a rank, which others copy
  std::int32_t slots = 0;
  std::int64_t row_bytes = 0;
  bool adds = false;
};
inline constexpr std::int64_t kMostTableEntries = 4096;
cudaError_t launch_rows(const RowsParameters& parameters, cudaStream_t stream);

/// Loads the kernels on the current device.
cudaError_t load_collective_kernels();
// One for each file of kernels.
cudaError_t load_one_shot_kernels();
cudaError_t load_large_kernels();
cudaError_t load_convert_kernels();
cudaError_t load_rows_kernels();
cudaError_t load_transfer_kernels();

}  // namespace ferry::cuda
