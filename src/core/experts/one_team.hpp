// Who makes a plan of copies: loops over ranks, experts and copies, here on one thread. On a GPU
// the warps of a block run them (cuda/kernels/collectives/block_team.cuh); what both compute is the
// same, bit for bit.
//
// A team has warps, a warp has lanes. Code outside of loops runs on all threads alike, with the
// same values. `Lanes` are loops on one warp, `Team` has those on all of them; each ends when its
// work is seen by all that took part.
#pragma once
#include <algorithm>
#include <cstdint>
#include <functional>

#include "core/experts/batch_plan_shape.hpp"

namespace ferry {

class OneLane {
 public:
  /// Any order.
  template <class Fn>
  void each(int n, const Fn& fn) const {
    for (int i = 0; i < n; ++i) fn(i);
  }
  /// One thread does it.
  template <class Fn>
  void one(const Fn& fn) const {
    fn();
  }
  /// Of the greatest key, the first; −1: all keys are kNoKey.
  template <class Key>
  int best(int n, const Key& key) const {
    int best = -1;
    auto most = kNoKey<decltype(key(0))>;
    for (int i = 0; i < n; ++i) {
      const auto found = key(i);
      if (found <= most) continue;
      best = i;
      most = found;
    }
    return best;
  }
  /// The first for which it holds; −1: none.
  template <class Holds>
  int first(int n, const Holds& holds) const {
    for (int i = 0; i < n; ++i) {
      if (holds(i)) return i;
    }
    return -1;
  }
  template <class Value>
  std::int32_t sum(int n, const Value& value) const {
    std::int32_t sum = 0;
    for (int i = 0; i < n; ++i) sum += value(i);
    return sum;
  }
  /// All threads call visit(i) alike, in ascending order, for those for which it holds, until it
  /// returns false. `holds` may have been asked before the visits to those before.
  template <class Holds, class Visit>
  void visit(int n, const Holds& holds, const Visit& visit) const {
    for (int i = 0; i < n; ++i) {
      if (holds(i) && !visit(i)) return;
    }
  }
  /// Hands `amount` out in ascending order, to each at most left(i), by take(i, tokens > 0).
  /// Returns what is left.
  template <class Left, class Take>
  Rows deal(int n, Rows amount, const Left& left, const Take& take) const {
    for (int i = 0; i < n && amount > 0; ++i) {
      const Rows tokens = std::min(amount, left(i));
      if (tokens <= 0) continue;
      take(i, tokens);
      amount -= tokens;
    }
    return amount;
  }
};

class OneTeam {
 public:
  static constexpr int kWarps = 1;
  static constexpr int kDrafters = 1;  ///< warps that make drafts at the same time, at most

  const OneLane& lanes() const { return lanes_; }
  /// For any n. On a GPU, loops of `lanes()` over ranks, places and the experts of a rank may be
  /// those of a kernel for few of them.
  const OneLane& lanes_for_many() const { return lanes_; }
  int drafters() const { return kDrafters; }
  template <class Fn>
  void each(int n, const Fn& fn) const {
    lanes_.each(n, fn);
  }
  /// fn(i, lanes, warp): each by one warp.
  template <class Fn>
  void tasks(int n, const Fn& fn) const {
    for (int i = 0; i < n; ++i) fn(i, lanes_, 0);
  }
  /// Whether it holds for any.
  template <class Holds>
  bool any(int n, const Holds& holds) const {
    return lanes_.first(n, holds) >= 0;
  }
  /// Modulo 2⁶⁴.
  template <class Hash>
  std::uint64_t sum_of_hashes(int n, const Hash& hash) const {
    std::uint64_t sum = 0;
    for (int i = 0; i < n; ++i) sum += hash(i);
    return sum;
  }
  /// One warp does it.
  template <class Fn>
  void lead(const Fn& fn) const {
    fn(lanes_);
  }
  /// The same, for n ≤ drafters(), at the same time. `good(i)`: fn(i) says that those after it are
  /// not needed; `vain(i)`: one before i has said so.
  template <class Fn>
  void drafts(int n, const Fn& fn) const {
    for (int i = 0; i < n; ++i) fn(i, lanes_);
  }
  void good(int) const {}
  void mark(PlanStage) const {}
  bool vain(int) const { return false; }

 private:
  OneLane lanes_{};
};

}  // namespace ferry
