// Arguments are refused here, before anything moves. Every message names the call, the argument,
// what was got and what was expected.
#pragma once
#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

#include "core/exchange_plan.hpp"
#include "core/plan_state.hpp"
#include "ferry/group.hpp"
#include "ferry/latency.hpp"

namespace ferry {

/// Throws Error(invalid_argument): "dispatch: x has …; expected …".
[[noreturn]] void refuse(std::string_view call, std::string_view argument, const std::string& got,
                         const std::string& expected);

/// "bf16", or what a number outside the enumeration is.
std::string dtype_text(Dtype dtype);
/// f32, bf16, f16: what combine adds.
bool is_float(Dtype dtype);

inline constexpr int kMaxTopk = 64;
inline constexpr int kMaxRanks = 4096;
/// Rows of one rank are numbered by 32 bits; a row has at most 1 GiB.
inline constexpr std::int64_t kMaxRows = (std::int64_t{1} << 31) - 1;
inline constexpr std::size_t kMaxRowBytes = std::size_t{1} << 30;

/// Bytes of a dense tensor. Refuses a negative extent, and sizes beyond 2^62 bytes.
std::size_t checked_bytes(std::string_view call, std::string_view name, const Extents& shape,
                          Dtype dtype);

void check_ranks(int ranks);
void check_config(const GroupConfig& config);
void check_config(const LatencyConfig& config);
/// Whether the buffers of such an exchange can be numbered and addressed at all.
void check_size(const LatencyConfig& config, std::int64_t local_experts, int ranks);

/// A multiple of 16 bytes, at most kMaxRowBytes.
void check_row_bytes(std::string_view call, std::string_view name, std::size_t bytes);
/// Memory of `where`, a known dtype, a stride for each dimension.
void check_view(std::string_view call, std::string_view name, const ConstTensorView& tensor,
                const Device& where = {});
/// Not null and aligned to its elements, unless empty.
void check_data(std::string_view call, std::string_view name, const ConstTensorView& tensor);
/// Memory of `where`, not null unless empty, aligned to its elements, `dims` dimensions, dense.
void check_tensor(std::string_view call, std::string_view name, const ConstTensorView& tensor,
                  int dims, const Device& where = {});
/// Whether they have bytes in common.
bool overlap(const ConstTensorView& a, const ConstTensorView& b);
/// The same as check_tensor, and exactly this shape and dtype.
void check_exact(std::string_view call, std::string_view name, const ConstTensorView& tensor,
                 Dtype dtype, const Extents& shape, const Device& where = {});

/// Everything about routes but the ids.
void check_routes(std::string_view call, const ConstTensorView& topk_idx, const Device& where = {});
/// A stream for work on `where`; null is fine.
void check_stream(std::string_view call, const Stream* stream, const Device& where = {});
/// Checks dtype, shape and every id; returns the ids as i32 [T, K]. Strides are allowed.
std::vector<std::int32_t> checked_routes(std::string_view call, const ConstTensorView& topk_idx,
                                         std::int64_t experts);

void check_dispatch(const ConstTensorView& x, std::int64_t tokens, int topk,
                    const DispatchOptions& options, const Device& where = {});
void check_combine(const ConstTensorView& rows, std::int64_t tokens, int topk,
                   const CombineOptions& options, const Device& where = {});
/// One weight for each expert-major row, instead of one for each slot.
inline bool weights_of_rows(const CombineOptions& options) {
  return options.order == RowOrder::expert_major && options.topk_weights &&
         options.topk_weights->dims() == 1;
}
/// After the counts are known: exactly the rows that the plan has in this layout, or the
/// max_recv_rows of one of its dispatches (`dispatched`) in this layout.
void check_combine_rows(const ExchangePlan& plan, const std::vector<RowLayout>& dispatched,
                        std::int64_t rows, const RowLayout& layout);
/// The same for the weights of received rows, shape [n, topk]; weights of expert-major rows, which
/// have one dimension, are as many as the rows.
void check_combine_weights(const ExchangePlan& plan, const std::vector<RowLayout>& dispatched,
                           const Extents& shape, int topk);
/// Of a latency exchange that is made: without masks nobody may be missing.
void check_nobody_lost(const LatencyConfig& config, const std::vector<int>& lost);
/// Of a call of an exchange without masks that was made in `epoch` of its group.
void check_nobody_lost_since(std::string_view call, std::uint64_t epoch,
                             const std::vector<int>& lost);
void check_formats(std::string_view call, WireFormat format, ScaleFormat scales);
void check_latency_dispatch(const ConstTensorView& x, const ConstTensorView& topk_idx,
                            const LatencyConfig& config, const LatencyDispatchOptions& options,
                            const Device& where = {});
/// How long a receive waited for each rank is added there.
void check_waits(std::string_view call, const std::optional<TensorView>& wait_ns, int ranks,
                 const Device& where = {});

/// Whether two tensors share memory.
bool overlap(const ConstTensorView& a, const ConstTensorView& b);

/// What a combine of latency mode must know of its dispatch.
struct LatencyDispatched {
  RowOrder order = RowOrder::expert_major;
  bool weights = false;  ///< came with it
  std::int64_t tokens = 0;
  int topk = 1;
  int ranks = 1;
  std::int64_t local_experts = 0;
};
void check_latency_combine(const ConstTensorView& rows,
                           const std::optional<ConstTensorView>& topk_weights,
                           const LatencyConfig& config, const LatencyDispatched& dispatched,
                           const LatencyCombineOptions& options, const Device& where = {});

}  // namespace ferry
