// One combine of the host engine, from its arguments to its results.
#pragma once
#include <cstddef>
#include <cstdint>
#include <memory>
#include <span>
#include <utility>
#include <vector>

#include "engine/regions.hpp"
#include "host/throughput/engine.hpp"

namespace ferry::host {

/// combine.cpp: its steps; combine_rows.cpp: where rows are and their sums;
/// domains/combine_direct.cpp: rows that cross; domains/combine.cpp: sums of whole domains.
class CombineJob {
 public:
  CombineJob(HostEngine& engine, const ConstTensorView& rows, std::shared_ptr<PlanState> plan,
             const CombineOptions& options)
      : engine_(engine),
        plan_(std::move(plan)),
        dispatched_(plan_->layouts.all()),
        rows_(rows),
        options_(options),
        regions_(engine.shared_memory()) {
    options_.stream = nullptr;
    const Extents own{plan_->tokens, rows_.columns()};
    if (options_.out) {
      result_.x = {*options_.out, std::shared_ptr<void>(options_.out->data, [](void*) {})};
    } else {
      result_.x = heap_tensor(own, rows_.dtype);
    }
    if (has_weights()) result_.topk_weights = heap_tensor({plan_->tokens, plan_->topk}, Dtype::f32);
  }

  /// Throws when the rows do not fit the plan. Needs the counts.
  void check() const;
  void run();
  const Combined& result() const { return result_; }

 private:
  bool expert_major() const { return options_.order == RowOrder::expert_major; }
  bool has_weights() const { return options_.topk_weights.has_value(); }
  Channel& channel() { return engine_.channel(); }
  const ExchangePlan& plan() const { return plan_->exchange; }
  bool in_domain(int peer) { return channel().pointer(peer, {0, 0}) != nullptr; }
  std::size_t weight_bytes() const {
    return has_weights() ? static_cast<std::size_t>(plan_->topk) * sizeof(float) : 0;
  }

  bool hierarchical() const { return crossing_ == Crossing::hierarchical; }
  void resolve_crossing();
  /// What all ranks must have in common.
  StepMessage head() const;
  [[noreturn]] void refuse_crossing();
  /// Rows that are pushed to this rank, and those that this rank may push to `peer`'s stage.
  std::size_t staged_rows() const;
  std::int64_t staged_rows_of(int peer) const;
  void agree();
  void check_places();
  void place_rows();
  void reduce_slots();
  void exchange_rows();
  std::int64_t first_staged_at(int owner) const;
  bool push_rows(std::int64_t first);
  void take_rows();
  void await_rows();
  void sum_complete();
  std::int64_t rows_of_chunk() const { return chunk_rows(rows_.row_bytes()); }
  void push_sums();
  void push_chunk(std::size_t feeder, std::int64_t first, std::int64_t end);
  void find_rows_of(int owner);
  void sum_lanes(std::span<const Lane> lanes, void* out) const;
  void add_weights(std::span<const Lane> lanes, float* to) const;
  void add_inside(std::span<const Lane> lanes, float* to) const;
  void wait_for_sums();
  /// Of one token at its owner, and what is kept from token to token.
  struct TokenSums {
    std::vector<Lane> lanes{};         // in the own domain
    std::vector<const void*> rows{};   // a sum for each domain, ascending
    std::vector<bool> there{};         // [D]
    std::vector<std::int64_t> next{};  // [D]: row of the stage that comes next
    std::vector<std::byte> inside{};   // the own domain's sum
  };
  void find_sums(std::int64_t token, TokenSums& sums);
  void sum_domains();
  void find_rows();
  void sum_tokens(std::int64_t first, std::int64_t end);
  void sum_weights();
  void give_back();

  HostEngine& engine_;
  std::shared_ptr<PlanState> plan_;
  std::vector<RowLayout> dispatched_;  // before this combine
  ConstTensorView rows_;
  CombineOptions options_;
  Regions regions_;
  Combined result_{};
  Crossing crossing_ = Crossing::direct;
  bool outsiders_ = false;             // some peer is outside the domain
  std::byte* mine_ = nullptr;          // rank-major rows, in registered memory
  std::byte* mine_weights_ = nullptr;  // their weights, likewise
  std::byte* stage_ = nullptr;         // rows pushed from outside, then their weights
  std::byte* stage_weights_ = nullptr;
  std::vector<std::int64_t> rows_here_{};     // for each rank: how many of its rows may be summed
  std::int64_t summed_ = 0;                   // tokens
  std::vector<const std::byte*> row_base_{};  // for each rank: its first row of mine
  std::vector<const std::byte*> weight_base_{};
};

}  // namespace ferry::host
