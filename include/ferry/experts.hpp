// Which ranks hold which experts, when that may change: after a loss, or with the load.
#pragma once
#include <cstdint>
#include <memory>
#include <span>
#include <vector>

#include "ferry/stream.hpp"
#include "ferry/tensor.hpp"

namespace ferry {

class BatchHistory;
class BatchPlanner;
class ExpertTable;
class GpuBalancing;
template <class Traits>
class CopySlots;
struct CopySlotsTraits;

/// Logical experts in places. Each rank has `slots` places, each of which is empty or holds a copy
/// of one expert. A group that is made with `experts` = ranks · slots carries rows to places: slot
/// s of rank r is what it calls expert r · slots + s. Computed without any exchange: ranks that
/// make the same calls have the same placement.
class ExpertPlacement {
 public:
  /// Balanced for equal loads, one copy of each expert. Throws Error(invalid_argument) when there
  /// are fewer places than experts.
  ExpertPlacement(std::int64_t experts, int ranks, int slots);
  ~ExpertPlacement();
  ExpertPlacement(ExpertPlacement&&) noexcept;
  ExpertPlacement& operator=(ExpertPlacement&&) noexcept;

  std::int64_t experts() const;
  int ranks() const;
  int slots() const;

  /// Places the experts on these ranks of the group alone (GroupView::ranks), at least `copies`
  /// times each if the slots suffice; slots that are left go to further copies of the heaviest.
  /// What need not move stays. `load`: [experts], of each, 0 or more; empty: all equal. By the
  /// policy that DeepSeek published as EPLB (core/experts/balance.hpp). Throws
  /// Error(invalid_argument), and changes nothing, when these ranks have fewer places than there
  /// are experts.
  void balance(std::span<const int> ranks, std::span<const double> load = {}, int copies = 1);

  /// [slots]: the experts that the rank holds, −1: none.
  std::vector<std::int32_t> held_by(int rank) const;
  /// Of the table, never 0: for PlanOptions::placement_digest.
  std::uint64_t digest() const;
  /// What Group::plan takes for routes to experts: topk_idx, i64 or i32 [T, K], with the place of a
  /// copy for each expert, i64 [T, K]. Tokens spread over copies by a hash of `rank`, whose tokens
  /// they are, and their number. `masked`: [ranks] as LatencyExchange::masked says, or empty;
  /// copies there get no tokens. Ranks may differ in it. Throws Error(invalid_argument) for a route
  /// to an expert of which no other copy is left.
  Tensor places(const ConstTensorView& topk_idx, int rank,
                const std::vector<bool>& masked = {}) const;

 private:
  std::unique_ptr<ExpertTable> table_;
};

/// Copies of busy experts, planned anew for each batch, so that all ranks work on as many rows.
/// Expert e lives on rank e / (experts / ranks) and never moves; besides, each rank has `slots`
/// slots for copies of others'. Computed without any exchange, in integers: ranks that make the
/// same calls have the same plan. For each batch, on all ranks:
///
///   1. `counts` of the own routes; an all-gather brings those of all ranks.
///   2. `invalidate` each rank whose experts have changed since they were copied.
///   3. `plan` says which copies are needed; weights of `fetches` go to the slots; then `fetched`.
///   4. `places` of the routes go to Group::plan, or to a latency exchange. The group is made with
///      `experts` = `group_experts()`: rank r's block begins with its own experts, its slots
///      follow.
///
/// Weights may come while tokens go out: `fetching` once they are on their way, and `fetched`
/// before anything is computed with a copy.
///
/// Gradients that slots hold belong to the experts of `table`. See docs/balance.md.
class BatchBalancer {
 public:
  /// `experts`: a multiple of `ranks`. `domain_size`: as of GroupConfig. `copy_rows`: rows of work
  /// that moving the weights and the gradient of a copy costs. Copies are made where they save
  /// more, and where a rank would have more than `max_rows` (> 0); the search goes on to that
  /// number then, or to the mean, where 1.02 of it is more. `load` says what was found.
  BatchBalancer(std::int64_t experts, int ranks, int slots, int domain_size = 0,
                std::int64_t copy_rows = 0, std::int64_t max_rows = 0);
  ~BatchBalancer();
  BatchBalancer(BatchBalancer&&) noexcept;
  BatchBalancer& operator=(BatchBalancer&&) noexcept;

  std::int64_t experts() const { return experts_; }
  int ranks() const { return ranks_; }
  int slots() const { return slots_; }
  /// Places of the group: its experts and all slots.
  std::int64_t group_experts() const { return experts_ + std::int64_t{ranks_} * slots_; }

  /// i32 [experts]: how many slots of the routes, i64 or i32 [T, K], name each expert.
  Tensor counts(const ConstTensorView& topk_idx) const;
  /// The weights of experts that live on this rank have changed: no copy of them is valid.
  void invalidate(int rank);
  /// counts: i32 [ranks, experts], in CPU memory, of all ranks in order. The heaviest rank has at
  /// most 1.02 of the mean load if the planner finds a way (else the least that it finds), with
  /// few copies to fetch, but for `copy_rows`. From here on what the slots of `fetches` held is
  /// lost. Counts of one of the last 64 batches that differ get the plan that it had. `again`: that
  /// must be so, as this is a batch that activation checkpointing computes once more. Throws
  /// Error(invalid_argument) where there is none.
  void plan(const ConstTensorView& counts, bool again = false);
  /// [ranks, slots]: the expert whose tokens go to each slot in this batch; −1: no tokens do.
  const std::vector<std::int32_t>& table() const;
  /// The same where the slot does not hold a valid copy yet; else −1.
  const std::vector<std::int32_t>& fetches() const;
  /// The weights of all `fetches` are on their way: `places` may be asked for, and `fetched` must
  /// follow before a copy is used. Else the next plan takes their slots for empty.
  void fetching();
  /// The weights of all `fetches` are in their slots, on all ranks.
  void fetched();
  /// [ranks]: slots of routes that each rank works on in this batch.
  std::vector<std::int64_t> load() const;
  /// Equal where the plan is the same one; 0: nothing was planned.
  std::int64_t plan_id() const;
  /// What Group::plan takes for routes of `rank` to experts: i64 [T, K]. They must be those that
  /// were counted. Tokens go home first, then to copies in ascending rank, in ascending order.
  /// Throws Error(invalid_argument) before `fetching` or `fetched`: no token goes to a copy that
  /// may be missing.
  Tensor places(const ConstTensorView& topk_idx, int rank) const;
  /// The same for routes in memory that this does not read, as of a GPU: i64
  /// [2, experts + ranks · slots], places and how many of the slots of `rank` go to each. Its slots
  /// that name an expert, sorted by it (stably), go to the places in this order. Throws as
  /// `places`.
  Tensor shares(int rank) const;

 private:
  void check_places(const char* call, int rank) const;
  std::int64_t place_of(std::int64_t expert) const;
  std::int64_t slot_place(std::int64_t copy) const;

  std::int64_t experts_;
  int ranks_;
  int slots_;
  std::unique_ptr<BatchPlanner> planner_;
  std::unique_ptr<CopySlots<CopySlotsTraits>> slots_held_;
  std::unique_ptr<BatchHistory> history_;
};

/// BatchBalancer for routes in the memory of a GPU: the same plans, bit for bit, made by a kernel.
/// Each call but the constructor submits work to its stream and returns: nothing waits for the GPU,
/// and all of it can be captured into a CUDA graph. Calls of one balancer, and replays of its
/// graphs, must be ordered by their streams; `invalidate` and `again` of captured calls hold in
/// every replay. The steps are those of BatchBalancer.
class GpuBalancer {
 public:
  /// Of the `memory` that a balancer keeps its plans in.
  static std::size_t memory_bytes(std::int64_t experts, int ranks, int slots);

  /// Up to 64 ranks; the others as of BatchBalancer. memory: u8 [memory_bytes], on a GPU, at a
  /// multiple of 256; it must outlive the balancer and its work. Throws Error(unsupported) in a
  /// build without CUDA, and Error(invalid_argument) where the shared memory of a block does not
  /// hold a plan of so many experts and slots: thousands of them.
  GpuBalancer(std::int64_t experts, int ranks, int slots, int domain_size, std::int64_t copy_rows,
              std::int64_t max_rows, const TensorView& memory, Stream& stream);

  std::int64_t experts() const { return experts_; }
  int ranks() const { return ranks_; }
  int slots() const { return slots_; }
  std::int64_t group_experts() const { return experts_ + std::int64_t{ranks_} * slots_; }

  /// out: i32 [experts], overwritten. topk_idx: dense; ids that are no expert are not counted.
  void counts(const ConstTensorView& topk_idx, const TensorView& out, Stream& stream) const;
  /// Before the next `plan`.
  void invalidate(int rank);
  /// counts: i32 [ranks, experts], of the GPU, 0 or more, INT32_MAX at most in all; or
  /// [ranks, experts + 1], whose last column is not 0 for ranks whose experts have changed. again:
  /// where the batch is forgotten, `plan_id` is −1 and `places` name no expert.
  void plan(const ConstTensorView& counts, Stream& stream, bool again = false);
  void fetching();
  void fetched(Stream& stream);
  /// out: i64 [T, K]. The routes are not compared with the counts. An id that is no expert gets a
  /// place that no group has, so that Group::plan refuses it.
  void places(const ConstTensorView& topk_idx, int rank, const TensorView& out,
              Stream& stream) const;

  // Parts of `memory`, as of the last work of a stream.
  ConstTensorView table() const;    ///< i32 [ranks, slots]
  ConstTensorView fetches() const;  ///< i32 [ranks, slots]
  ConstTensorView load() const;     ///< i32 [ranks]
  ConstTensorView plan_id() const;  ///< i64 [1]

 private:
  enum class State { none, missing, there };
  ConstTensorView part(std::size_t offset, Dtype dtype, Extents shape) const;

  std::int64_t experts_;
  int ranks_;
  int slots_;
  TensorView memory_;
  std::shared_ptr<GpuBalancing> gpu_;
  std::uint64_t changed_ = 0;
  State state_ = State::none;
};

}  // namespace ferry
