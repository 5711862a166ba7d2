// One dispatch of the host engine, from its arguments to its results.
#pragma once
#include <cstdint>
#include <memory>
#include <utility>
#include <vector>

#include "core/check.hpp"
#include "core/wire_row.hpp"
#include "engine/regions.hpp"
#include "host/throughput/engine.hpp"

namespace ferry::host {

inline constexpr const char* kDispatch = "dispatch";

/// dispatch.cpp: grants and results; dispatch_push.cpp: rows on their way; domains/dispatch.cpp: to
/// other domains; dispatch_finish.cpp: what has arrived.
class DispatchJob {
 public:
  DispatchJob(HostEngine& engine, const ConstTensorView& x, std::shared_ptr<PlanState> plan,
              const DispatchOptions& options)
      : engine_(engine),
        plan_(std::move(plan)),
        x_(x),
        row_(wire_row(x, options)),
        options_(options),
        regions_(engine.shared_memory()) {
    options_.stream = nullptr;
    carries_routes_ = !plan_->routes_sent.load();  // for the sizes; `run` decides
  }

  /// Learns the count if the output is exact.
  void learn_rows();
  bool fits_out() const { return !options_.out || options_.out->rows() >= out_rows_; }
  [[noreturn]] void refuse_out() const;
  /// Allocates the result tensors if there is room now. False: `run` will make room.
  bool allocate() { return allocate_regions(); }
  /// The dispatch will take place: if it is the plan's first, it brings the routes.
  void enter() {
    plan_->routes_sent.store(true);
    dispatches_ =
        plan_->layouts.add({options_.order, options_.alignment, options_.worst_case_rows});
  }

  void run();
  /// Instead of `run`: takes part, so that all ranks learn that `out` is too small here.
  void run_in_vain();
  const Received& result() const { return result_; }

 private:
  bool expert_major() const { return options_.order == RowOrder::expert_major; }
  bool has_weights() const { return options_.topk_weights.has_value(); }
  ReceiveLayout receive_layout(std::int64_t rows) const {
    return make_receive_layout(rows, row_.bytes(), row_.scale_columns);
  }
  Channel& channel() { return engine_.channel(); }
  const ExchangePlan& plan() const { return plan_->exchange; }

  /// Rows of the output that this plan fills.
  std::int64_t needed_rows() const {
    return expert_major() ? plan().expert_offsets(options_.alignment).back() : plan().recv_rows();
  }

  std::vector<std::size_t> region_sizes() const;
  bool allocate_regions();
  bool allocate_side();
  void make_tensors();
  StepMessage grant() const;
  void agree();
  void check_grants();
  bool hierarchical() const { return crossing_ == Crossing::hierarchical; }
  void resolve_crossing();
  /// Of what crosses to `rank`.
  StageShape stage_shape(int rank) const;
  bool allocate_stage();
  void check_stages();
  void push();
  void push_hierarchical(bool stream);
  void send_chunk(int domain, std::int64_t first, std::int64_t end);
  void await_domain();
  void push_rows(bool stream);
  const std::byte* encode(std::int64_t token, std::byte* codes);
  ConstTensorView scales() const;
  void push_side(int peer, const StepMessage& theirs);
  void write(int peer, fabric::Address to, const void* from, std::size_t bytes);
  void finish_side();
  void check_routes();
  void fan_out();

  HostEngine& engine_;
  std::shared_ptr<PlanState> plan_;
  ConstTensorView x_;
  WireRow row_;
  DispatchOptions options_;
  Regions regions_;
  Received result_{};
  Tensor landed_{};  // x in registered memory
  Crossing crossing_ = Crossing::direct;
  RowLayouts::Count dispatches_{};  // of this layout
  bool carries_routes_ = false;
  bool carries_forwards_ = false;  // what a hierarchical dispatch needs to be spread
  bool allocated_ = false;
  std::int64_t rank_rows_ = 0;  // of the rank-major region and tensors
  std::int64_t out_rows_ = 0;
  Region rank_region_{};
  Region side_region_{};
  Region expert_region_{};
  Region stage_{};                          // hierarchical: rows that cross to this rank
  std::vector<float> made_scales_{};        // [T, C] of quantised rows
  std::vector<std::uint64_t> put_bytes_{};  // outside the domain, for each peer
};

}  // namespace ferry::host
