// One combine of the CUDA engine, from its arguments to its launched kernels.
#pragma once
#include <cstdint>
#include <functional>
#include <memory>
#include <optional>

#include "cuda/throughput/engine.hpp"

namespace ferry::cuda {

inline constexpr const char* kCombine = "combine";

/// A combine made as two calls, each of a part of the tokens, of a plan whose rows lie in the whole
/// group's order; the same on all ranks but for the number.
struct CombineHalves {
  std::int64_t last = 0;  ///< so many tokens, the plan's first ones, are summed by the second call
  /// Launches what uses the sums of the others, [V, H], behind the first call in the stream, or in
  /// another that waits for it.
  std::function<void(const Combined&)> between{};
};

class CombineJob {
 public:
  CombineJob(CudaEngine& engine, Launch& launch, const ConstTensorView& rows,
             std::shared_ptr<CudaPlan> plan, const CombineOptions& options);
  Combined run();
  /// Before `run`, with a scattered plan.
  void in_halves(const CombineHalves& halves) { halves_ = &halves; }

 private:
  bool expert_major() const { return options_.order == RowOrder::expert_major; }
  bool has_weights() const { return options_.topk_weights.has_value(); }

  void check_rows();
  CallSignature signature() const;
  bool reserve();
  bool place_rows();
  PlanView view() const;
  /// All that the sums need, or the copies of ordinary rows, before the call is entered.
  void prepare_sums();
  /// Of this rank's SMs, which sums and combine use side by side.
  void share_sms();
  /// i64 [capacity, K]: made by a dispatch of this alignment, or now.
  Tensor slot_rows();
  Held copied(const void* from, std::size_t bytes, Held to);
  const std::byte* aligned(const std::optional<ConstTensorView>& tensor);
  void pull(bool room);
  /// Tokens [begin, end).
  void pull_tokens(bool room, std::int64_t begin, std::int64_t end);

  CudaEngine& engine_;
  Launch& launch_;
  ConstTensorView rows_;
  std::shared_ptr<CudaPlan> plan_;
  const CombineOptions& options_;
  const CombineHalves* halves_ = nullptr;
  int sms_ = 1;
  std::int64_t brought_ = 0;  // rank-major rows that peers may read
  std::int64_t need_bytes_ = 0;
  fabric::Address at_{};       // of the rank-major rows
  fabric::Address side_at_{};  // of their weights
  Held sums_{};                // of expert-major rows, or copies of ordinary ones
  SumSlotsParameters sum_{};   // of sums_
  Tensor slots_{};             // in use until the call is launched
  const std::byte* bias0_ = nullptr;
  const std::byte* bias1_ = nullptr;
  std::byte* out_ = nullptr;  // aligned
  Combined result_{};
};

}  // namespace ferry::cuda
