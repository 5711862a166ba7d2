// Arguments of collectives, refused before anything moves.
#pragma once
#include <cstdint>
#include <span>
#include <string_view>

#include "core/engine.hpp"
#include "ferry/collectives.hpp"

namespace ferry {

/// Dense, in memory of `where`, of a known dtype.
void check_dense(std::string_view call, std::string_view name, const ConstTensorView& tensor,
                 const Device& where = {});
/// Another rank than `rank`.
void check_peer(std::string_view call, int peer, int rank, int ranks);
/// What can be reduced so.
void check_reduction(std::string_view call, const ConstTensorView& x, const ReduceOptions& options);
/// What GPUs of one domain run for an all_reduce: one_shot of up to `one_shot_bytes`, or direct.
/// Refuses other algorithms, and shares.
Algorithm gpu_algorithm(const ReduceOptions& options, std::int64_t bytes,
                        std::int64_t one_shot_bytes);
/// `whole` has `ranks` blocks of the elements of `block`, of its dtype; they share no memory,
/// unless `block` is block `rank` of `whole`.
void check_blocks(std::string_view call, std::string_view whole_name, const ConstTensorView& whole,
                  std::string_view block_name, const ConstTensorView& block, int rank, int ranks,
                  const Device& where = {});
/// Of all_to_all: equal blocks where no counts were given.
BlockCounts checked_counts(const ConstTensorView& x, std::span<const std::int64_t> to,
                           const ConstTensorView& out, std::span<const std::int64_t> from,
                           int ranks, const Device& where = {});
BlockCounts equal_counts(const ConstTensorView& x, const ConstTensorView& out, int ranks,
                         const Device& where = {});

/// Rows are that many at most.
inline constexpr std::int64_t kMostTableRows = 4096;
/// Of copy_rows, or of add_rows, where `adds`.
RowTable checked_table(bool adds, const ConstTensorView& x, const ConstTensorView& out,
                       std::span<const std::int32_t> table, int ranks, const Device& where = {});
/// The same of a table that the CPU does not read: nothing is known of its entries.
GpuRowTable checked_gpu_table(bool adds, const ConstTensorView& x, const ConstTensorView& out,
                              const ConstTensorView& table, int ranks, const Device& where);

}  // namespace ferry
