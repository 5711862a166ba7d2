// The ways of an all_reduce beside that of all_reduce.cpp, and what they have in common.
#pragma once
#include <vector>

#include "host/collectives/engine.hpp"

namespace ferry::host {

/// Elements of one rank as partial results, and sums of partial results, in memory of its own.
class PartialSums {
 public:
  /// Valid until the next: the elements themselves where they are partial results.
  const void* own(const Reduction& reduction, const void* row, std::int64_t count) {
    if (reduction.partial_dtype() == reduction.dtype || count == 0) return row;
    own_.resize(reduction.partial_bytes(count));
    reduce_ranks(reduction, {&row, 1}, count, own_.data());
    return own_.data();
  }
  /// In the order of the rows; not rounded.
  const void* sum(const Reduction& reduction, std::span<const void* const> partials,
                  std::int64_t count) {
    sum_.resize(reduction.partial_bytes(count));
    const ReduceOp op = reduction.op == ReduceOp::mean ? ReduceOp::sum : reduction.op;
    reduce_ranks({op, reduction.partial_dtype(), reduction.ranks}, partials, count, sum_.data());
    return sum_.data();
  }

 private:
  std::vector<std::byte> own_{}, sum_{};
};

/// Meets the ranks itself, with the data in the messages.
void reduce_in_one_shot(HostCollectives& all, const TensorView& x, const Reduction& reduction,
                        const StepMessage& head);

/// These run after the ranks have met in the call, so that all earlier calls have ended everywhere
/// and the whole staging buffer is free.
void reduce_along_ring(HostCollectives& all, const TensorView& x, ReduceOp op);
void reduce_by_tree(HostCollectives& all, const TensorView& x, ReduceOp op);

}  // namespace ferry::host
