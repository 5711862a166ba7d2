// The kernels of an exchange between domains: rows into and out of a staging buffer in pinned host
// memory, in chunks that a proxy posts (engine/proxy.hpp). None of them waits for anybody. Nothing
// here needs nvcc.
#pragma once
#include <cuda_runtime_api.h>

#include <cstdint>

#include "core/crossing_layout.hpp"
#include "ferry/dtype.hpp"
#include "protocol/command.hpp"

namespace ferry::cuda {

/// The blocks of a staging buffer, one after another; the tables lie in GPU memory.
struct StagingBlocks {
  int count = 0;
  const std::int64_t* first = nullptr;  ///< [count + 1] rows before each block
};

/// Rows of this GPU with what travels beside them.
struct CrossingSource {
  const std::byte* rows = nullptr;  ///< [T, row_bytes] dense, 16-byte aligned
  const float* scales = nullptr;    ///< [T, C], any strides
  std::int64_t scale_token_stride = 0;
  std::int64_t scale_column_stride = 1;
  const float* weights = nullptr;  ///< [T, K] dense
};

/// Packs chunks [first_chunk, end_chunk) of all blocks and makes a command for each.
struct PackParameters {
  CrossingLayout layout{};
  CrossingSource from{};
  const std::int32_t* index = nullptr;  ///< [rows of all blocks] of `from`
  StagingBlocks blocks{};               ///< block b is window b of the call
  std::byte* staging = nullptr;
  protocol::CommandSlot* ring = nullptr;
  std::uint64_t ring_size = 0;
  std::uint64_t first_command = 0;  ///< the call's `begin`; chunk c is command first + 1 + c
  std::int64_t first_chunk = 0;
  std::int64_t end_chunk = 0;
  int num_sms = 1;
};
/// The portion that begins with chunk 0 makes the `begin`, too.
cudaError_t launch_pack(const PackParameters& parameters, cudaStream_t stream);

/// Where rows lie dense with what travels beside them, in GPU memory; 16-byte aligned.
struct CrossingRows {
  std::byte* rows = nullptr;  ///< [N, row_bytes]
  float* scales = nullptr;    ///< [N, C]
  float* weights = nullptr;   ///< [N, K]
};

/// Own rows `from[0, count)`, side by side.
struct GatherParameters {
  CrossingLayout layout{};
  std::int64_t count = 0;
  const std::int32_t* from = nullptr;
  CrossingSource own{};
  CrossingRows to{};
  int num_sms = 1;
};
cudaError_t launch_gather(const GatherParameters& parameters, cudaStream_t stream);

/// Portion `portion` of what has come: of each block's rows, to the same numbers as in the staging
/// buffer.
struct UnpackParameters {
  CrossingLayout layout{};
  StagingBlocks blocks{};
  const std::byte* staging = nullptr;
  int portion = 0;
  int portions = 1;
  CrossingRows to{};
  int num_sms = 1;
};
cudaError_t launch_unpack(const UnpackParameters& parameters, cudaStream_t stream);

/// DeviceDestination [V, L] of a plan whose rows lie in the whole group's order
/// (core/crossing_lists.hpp).
struct ShiftDestinationsParameters {
  void* destinations = nullptr;
  std::int64_t count = 0;     ///< V
  int destination_count = 1;  ///< L
  int ranks = 1;              ///< of the domain
  int sources = 0;
  const std::int64_t* first = nullptr;  ///< [sources + 1]
  const std::int32_t* shift = nullptr;  ///< [sources, ranks]
  std::int64_t* peer_row = nullptr;     ///< [ranks]: becomes 0, for destinations say all
};
cudaError_t launch_shift_destinations(const ShiftDestinationsParameters& parameters,
                                      cudaStream_t stream);

/// The results of own tokens [begin, end): rows from here and rows that crossed back, fp32 from +0
/// in the given order, then the biases; rounded once.
struct AddDomainsParameters {
  CrossingLayout layout{};
  std::int64_t begin = 0;
  std::int64_t end = 0;
  const std::int64_t* offset = nullptr;  ///< [T + 1]
  const std::int32_t* parts = nullptr;  ///< row v of `rows`, or −1 − i: row i of the staging buffer
  const std::byte* rows = nullptr;
  const float* weights = nullptr;  ///< [V, K]
  StagingBlocks blocks{};
  const std::byte* staging = nullptr;
  Dtype dtype = Dtype::bf16;
  const std::byte* bias0 = nullptr;
  const std::byte* bias1 = nullptr;
  std::byte* out = nullptr;      ///< [T, H], 16-byte aligned
  float* out_weights = nullptr;  ///< [T, K], or null
  int num_sms = 1;
};
cudaError_t launch_add_domains(const AddDomainsParameters& parameters, cudaStream_t stream);

/// Rows of f32, bf16 or f16 become e4m3 codes with a scale for each 128 channels.
struct QuantizeRowsParameters {
  const std::byte* x = nullptr;  ///< [T, columns] dense, 16-byte aligned
  Dtype dtype = Dtype::bf16;
  std::int64_t tokens = 0;
  std::int64_t columns = 0;
  bool round_scale = false;
  std::byte* codes = nullptr;  ///< [T, columns]
  float* scales = nullptr;     ///< [T, ceil(columns / 128)]
  int num_sms = 1;
};
cudaError_t launch_quantize_rows(const QuantizeRowsParameters& parameters, cudaStream_t stream);

}  // namespace ferry::cuda
