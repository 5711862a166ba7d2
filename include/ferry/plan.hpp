// What the count exchange of one set of routes yields.
#pragma once
#include <cstdint>
#include <memory>
#include <vector>

#include "ferry/network.hpp"
#include "ferry/tensor.hpp"

namespace ferry {

struct PlanState;

/// Where every row goes and what arrives. Cheap to copy and to keep: a plan owns no registered
/// memory. It serves any number of dispatches (cached dispatch) and combines of its group, with
/// any hidden size and dtype, and throws Error(destroyed) after the group is destroyed.
///
/// The first dispatch with a plan also carries the routes; combining from expert-major rows needs
/// them, so it must come after that.
class Plan {
 public:
  Plan() = default;
  /// Tokens of this rank, and slots of a route.
  std::int64_t tokens() const;
  int topk() const;
  /// Rows that this rank receives: one for each (token, this rank). Blocks until the counts are
  /// known when the plan was made on a stream; so do the calls below.
  std::int64_t recv_rows() const;
  /// Rows from each source rank, [ranks]. Receive order is ascending source rank, then token.
  std::vector<std::int64_t> recv_rows_per_rank() const;
  /// Rows that this rank sends to each rank, [ranks].
  std::vector<std::int64_t> send_rows_per_rank() const;
  /// i32 [ranks, ranks], where the group's tensors lie: rows that rank s (row) sends to rank d.
  /// Only to be read. Of a plan on a CUDA stream nothing blocks: the numbers come in the stream's
  /// order. Throws Error(unsupported) in groups on CPUs of more than 256 ranks, whose ranks know
  /// only what concerns them.
  Tensor rank_rows() const;
  /// i32 [tokens, topk]: this rank's own routes; and i32 [recv_rows, topk]: those of the rows that
  /// it receives, in local ids, −1 = not here, known after the first dispatch with the plan. Only
  /// to be read, also when the group is destroyed. Error(unsupported) for groups on GPUs.
  Tensor routes() const;
  Tensor received_routes() const;
  /// Route slots that name each expert of this rank, [local experts].
  std::vector<std::int64_t> slots_per_expert() const;
  /// Rows of the expert-major output when every expert's block is padded to `alignment` rows.
  std::int64_t expert_major_rows(std::int64_t alignment = 1) const;

  /// How tokens cross between domains where a dispatch with this plan says `automatic`: as the
  /// group's configuration says, or, where that says `automatic` too, as the cost model picks.
  Crossing crossing() const;

  explicit operator bool() const { return state_ != nullptr; }

 private:
  friend struct Access;
  explicit Plan(std::shared_ptr<PlanState> state) : state_(std::move(state)) {}
  std::shared_ptr<PlanState> state_{};
};

}  // namespace ferry
