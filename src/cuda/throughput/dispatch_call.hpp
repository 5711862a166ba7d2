// The values that the phases of a dispatch hand on: what was asked, how many rows, which memory.
#pragma once
#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>

#include "core/layout.hpp"
#include "core/wire_row.hpp"
#include "cuda/throughput/engine.hpp"
#include "cuda/throughput/exchange.hpp"
#include "cuda/throughput/plan.hpp"

namespace ferry::cuda {

/// What was asked, and what follows from that alone.
struct DispatchCall {
  CudaEngine& engine;
  Launch& launch;
  const ConstTensorView x;
  const std::shared_ptr<CudaPlan> plan;
  const DispatchOptions& options;
  /// Or none: enters the plan's call, which is prepared, directly before this one's or before its
  /// counts are waited for.
  const std::function<void()> enter_plan{};
  const SplitDispatch* split = nullptr;  ///< or one call
  const WireRow row = wire_row(x, options);
  /// They were not sent, or sent in vain and the caller knows. A rank that knows better than
  /// others, or worse, is told so by the GPU, which refuses the call on all of them.
  const bool carries_routes = !plan->routes_sent.load();
  const int num_sms = engine.tuned_sms(launch, options.num_sms, plan->tokens, split != nullptr,
                                       {.call = CallKind::dispatch,
                                        .dtype = row.dtype,
                                        .order = options.order,
                                        .hidden = row.columns,
                                        .first = carries_routes});

  bool expert_major() const { return options.order == RowOrder::expert_major; }
  bool has_weights() const { return options.topk_weights.has_value(); }
  /// Whether the plan may remember what this dispatch makes: what a graph makes is there only when
  /// it runs.
  bool lasting() const { return !launch.capture().active || plan->captured; }
  ReceiveLayout receive_layout(std::int64_t rows) const {
    return make_receive_layout(rows, row.bytes(), row.scale_columns);
  }
};

struct DispatchRows {
  std::int64_t rank = 0;  ///< of the rank-major tensors
  std::int64_t out = 0;   ///< of the result
  bool guessed = false;   ///< before the CPU has learnt the counts
};

/// The fan-out to expert-major order.
struct FanOut {
  bool beside = false;       ///< it copies the rows while they come, else after the dispatch
  bool may_be_made = false;  ///< by an earlier dispatch, unless that failed: the GPU knows
  std::uint64_t* made = nullptr;
  std::byte* scratch = nullptr;
  Tensor slot_rows{};
  Tensor expert_offsets{};
  Tensor row_weights{};  ///< if they are asked for
};

/// The memory of a dispatch.
struct DispatchBuffers {
  DispatchRows rows{};
  StepStatus status = StepStatus::ok;  ///< else there is none, which every rank must learn
  std::int64_t need_bytes = 0;
  std::int64_t granted = 0;  ///< rows of the rank-major regions
  Held rank{};
  Held side{};
  Held expert{};
  const std::byte* input = nullptr;  ///< dense and aligned to 16 bytes
  CudaPlan::Routes routes{};
  bool more_routes = false;  ///< their tensors are new: more rows than came with them
  FanOut fan_out{};
};

// dispatch_fan_out.cpp
/// Memory for so many rank-major rows, or what an earlier dispatch has made.
FanOut take_fan_out(const DispatchCall& call, std::int64_t rows);
/// SMs of the dispatch itself.
int pushing_sms(const DispatchCall& call, const FanOut& fan_out);
void launch_fan_out(const DispatchCall& call, const DispatchBuffers& buffers);

}  // namespace ferry::cuda
