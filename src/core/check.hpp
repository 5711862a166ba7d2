// Arguments are refused here, before anything moves. Every message names the call, the argument,
// what was got and what was expected.
#pragma once
#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

#include "core/exchange_plan.hpp"
#include "ferry/group.hpp"
#include "ferry/latency.hpp"

namespace ferry {

/// Throws Error(invalid_argument): "dispatch: x has …; expected …".
[[noreturn]] void refuse(std::string_view call, std::string_view argument, const std::string& got,
                         const std::string& expected);

inline constexpr int kMaxTopk = 64;
inline constexpr int kMaxRanks = 4096;

void check_config(const GroupConfig& config, int ranks);
void check_config(const LatencyConfig& config);

/// CPU memory, not null unless empty, `dims` dimensions, dense.
void check_tensor(std::string_view call, std::string_view name, const ConstTensorView& tensor,
                  int dims);
/// The same, and exactly this shape and dtype.
void check_exact(std::string_view call, std::string_view name, const ConstTensorView& tensor,
                 Dtype dtype, const Extents& shape);

/// Checks dtype, shape and every id; returns the ids as i32 [T, K]. Strides are allowed.
std::vector<std::int32_t> checked_routes(std::string_view call, const ConstTensorView& topk_idx,
                                         std::int64_t experts);

void check_dispatch(const ConstTensorView& x, std::int64_t tokens, int topk,
                    const DispatchOptions& options);
void check_combine(const ConstTensorView& rows, std::int64_t tokens, const CombineOptions& options);
void check_latency_dispatch(const ConstTensorView& x, const ConstTensorView& topk_idx,
                            const LatencyConfig& config, const LatencyDispatchOptions& options);

}  // namespace ferry
