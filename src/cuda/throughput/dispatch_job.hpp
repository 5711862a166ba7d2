// One dispatch of the CUDA engine, from its arguments to its launched kernels.
#pragma once
#include <cstdint>
#include <exception>
#include <functional>
#include <memory>
#include <optional>
#include <vector>

#include "core/wire_row.hpp"
#include "cuda/throughput/engine.hpp"
#include "engine/regions.hpp"

namespace ferry::cuda {

inline constexpr const char* kDispatch = "dispatch";

/// What every rank's dispatch must agree on. `plan`: its number.
CallSignature dispatch_signature(const WireRow& row, int topk, const DispatchOptions& options,
                                 bool carries_routes, std::uint64_t plan);

/// A dispatch made as two calls, each with a part of the tokens, of rows that lie in the whole
/// group's order; the same on all ranks but for the number.
struct DispatchHalves {
  std::int64_t first = 0;  ///< so many tokens go in the first call
  /// Launches what brings the rows of the others, behind the first call in the stream, or so that
  /// the stream waits for it.
  std::function<void()> between{};
};

class DispatchJob {
 public:
  /// Learns or guesses the count if the output is exact. `make_plan`: enters the plan's call, which
  /// is prepared, directly before this one's or before its counts are waited for.
  DispatchJob(CudaEngine& engine, Launch& launch, const ConstTensorView& x,
              std::shared_ptr<CudaPlan> plan, const DispatchOptions& options,
              std::function<void()> make_plan = {});
  Received run();
  /// Before `run`, with a scattered plan.
  void in_halves(const DispatchHalves& halves) { halves_ = &halves; }

 private:
  bool expert_major() const { return options_.order == RowOrder::expert_major; }
  bool has_weights() const { return options_.topk_weights.has_value(); }
  ReceiveLayout receive_layout(std::int64_t rows) const {
    return make_receive_layout(rows, row_.bytes(), row_.scale_columns);
  }

  bool make_plan();
  void check_out();

  // dispatch_rows.cpp: how many rows there will be.
  void learn_counts();
  void know_rows();
  bool guess_rows();
  bool reserve_guess();
  bool settle_guess();
  void narrow(std::int64_t rows);
  bool grant_again(std::int64_t rows);
  [[noreturn]] void fail_with_plan();

  bool reserve(CudaEngine::Pieces pieces);
  bool take_regions(CudaEngine::Pieces pieces);
  CallSignature signature() const;
  /// Dense and aligned to 16 bytes.
  const std::byte* input();
  void push(StepStatus status);
  /// Tokens [begin, end).
  void push_tokens(StepStatus status, std::int64_t begin, std::int64_t end);
  void make_rows();
  void use_of_others();
  /// Whether the plan may remember what this dispatch makes: what a graph makes is there only when
  /// it runs.
  bool lasting() const { return !launch_.capture().active || plan_->captured; }

  // dispatch_routes.cpp
  WideSideLayout side_layout() const;
  void place_routes();
  bool extend_routes();
  void remember_routes();
  void remember_layout();
  void bring_routes();

  // dispatch_fan_out.cpp
  void make_slot_tensors();
  int parts() const;
  bool follows() const;
  bool take_known_slots();
  FanOutParameters fan_out_parameters() const;
  void follow();
  void fan_out();
  void remember_slots();

  CudaEngine& engine_;
  Launch& launch_;
  ConstTensorView x_;
  WireRow row_;
  std::shared_ptr<CudaPlan> plan_;
  const DispatchOptions& options_;
  std::function<void()> make_plan_;
  const DispatchHalves* halves_ = nullptr;
  bool makes_plan_ = false;
  int sms_ = 1;
  bool carries_routes_ = false;
  bool guessed_ = false;
  std::exception_ptr plan_error_{};  // the plan's own call failed, on all ranks
  std::int64_t rank_rows_ = 0;       // of the rank-major tensors
  std::int64_t out_rows_ = 0;
  std::int64_t granted_rows_ = 0;  // of the rank-major regions
  std::int64_t need_bytes_ = 0;
  CudaPlan::Routes routes_{};
  Held rank_{};
  Held side_{};
  Held expert_{};
  const std::byte* input_ = nullptr;
  bool more_routes_ = false;  // their tensors are new: more rows than came with them
  std::byte* scratch_ = nullptr;
  bool followed_ = false;    // the fan-out runs beside the dispatch
  bool slots_made_ = false;  // by an earlier dispatch, unless that failed: the GPU knows
  std::uint64_t* made_ = nullptr;
  Received result_{};
};

}  // namespace ferry::cuda
