// A block of a GPU as one thread plays it: warps whose lanes take every 32nd, reductions by
// butterflies, conditions asked for 32 at a time, and what has no order in the worst one. It finds
// a plan that depends on who makes it.
#pragma once
#include <algorithm>
#include <array>
#include <cstdint>

#include "core/experts/one_team.hpp"

namespace ferry {

class TestLanes {
 public:
  static constexpr int kLanes = 32;

  template <class Fn>
  void each(int n, const Fn& fn) const {
    for (int i = n - 1; i >= 0; --i) fn(i);
  }
  template <class Fn>
  void one(const Fn& fn) const {
    fn();
  }
  template <class Key>
  int best(int n, const Key& key) const {
    using Value = decltype(key(0));
    struct Best {
      Value key = kNoKey<Value>;
      int at = INT32_MAX;
    };
    std::array<Best, kLanes> lanes{};
    for (int i = 0; i < n; ++i) {
      Best& mine = lanes[index(i % kLanes)];
      if (const Value found = key(i); found > mine.key) mine = {found, i};
    }
    for (int step = kLanes / 2; step > 0; step /= 2) {
      const auto before = lanes;
      for (int lane = 0; lane < kLanes; ++lane) {
        const Best& other = before[index(lane ^ step)];
        Best& mine = lanes[index(lane)];
        if (other.key > mine.key || (other.key == mine.key && other.at < mine.at)) mine = other;
      }
    }
    return lanes[0].key == kNoKey<Value> ? -1 : lanes[0].at;
  }
  template <class Holds>
  int first(int n, const Holds& holds) const {
    for (int chunk = 0; chunk < n; chunk += kLanes) {
      if (const std::uint32_t mask = ballot(chunk, n, holds); mask != 0) {
        return chunk + __builtin_ctz(mask);
      }
    }
    return -1;
  }
  template <class Value>
  std::int32_t sum(int n, const Value& value) const {
    std::int32_t sum = 0;
    for (int i = n - 1; i >= 0; --i) sum += value(i);
    return sum;
  }
  template <class Holds, class Visit>
  void visit(int n, const Holds& holds, const Visit& visit) const {
    for (int chunk = 0; chunk < n; chunk += kLanes) {
      for (std::uint32_t mask = ballot(chunk, n, holds); mask != 0; mask &= mask - 1) {
        if (!visit(chunk + __builtin_ctz(mask))) return;
      }
    }
  }
  template <class Left, class Take>
  Rows deal(int n, Rows amount, const Left& left, const Take& take) const {
    for (int chunk = 0; chunk < n && amount > 0; chunk += kLanes) {
      std::array<Rows, kLanes> upto{};  // inclusive sums
      Rows sum = 0;
      for (int lane = 0; lane < kLanes && chunk + lane < n; ++lane) {
        upto[index(lane)] = sum += left(chunk + lane);
      }
      for (int lane = std::min(kLanes, n - chunk) - 1; lane >= 0; --lane) {
        const Rows mine = left(chunk + lane);
        const Rows tokens = std::clamp(amount - (upto[index(lane)] - mine), 0, mine);
        if (tokens > 0) take(chunk + lane, tokens);
      }
      amount -= std::min(amount, sum);
    }
    return amount;
  }

 private:
  static constexpr std::size_t index(int i) { return static_cast<std::size_t>(i); }
  template <class Holds>
  static std::uint32_t ballot(int chunk, int n, const Holds& holds) {
    std::uint32_t mask = 0;
    for (int i = chunk; i < std::min(n, chunk + kLanes); ++i) {
      mask |= static_cast<std::uint32_t>(holds(i)) << (i - chunk);
    }
    return mask;
  }
};

class TestTeam {
 public:
  static constexpr int kWarps = 6;

  /// Whose drafts are made in ascending order (those that are in vain stop), else in descending.
  explicit TestTeam(int drafters, bool ascending) : drafters_(drafters), ascending_(ascending) {}

  const TestLanes& lanes() const { return lanes_; }
  const TestLanes& lanes_for_many() const { return lanes_; }
  int drafters() const { return drafters_; }
  template <class Fn>
  void each(int n, const Fn& fn) const {
    lanes_.each(n, fn);
  }
  template <class Fn>
  void tasks(int n, const Fn& fn) const {
    for (int i = n - 1; i >= 0; --i) fn(i, lanes_, i % kWarps);
  }
  template <class Holds>
  bool any(int n, const Holds& holds) const {
    return lanes_.first(n, holds) >= 0;
  }
  template <class Hash>
  std::uint64_t sum_of_hashes(int n, const Hash& hash) const {
    std::uint64_t sum = 0;
    for (int i = n - 1; i >= 0; --i) sum += hash(i);
    return sum;
  }
  template <class Fn>
  void lead(const Fn& fn) const {
    fn(lanes_);
  }
  template <class Fn>
  void drafts(int n, const Fn& fn) const {
    good_ = INT32_MAX;
    for (int i = 0; i < n; ++i) fn(ascending_ ? i : n - 1 - i, lanes_);
  }
  void mark(PlanStage) const {}
  void good(int i) const { good_ = std::min(good_, i); }
  bool vain(int i) const { return good_ < i; }

 private:
  TestLanes lanes_{};
  int drafters_;
  bool ascending_;
  mutable int good_ = INT32_MAX;
};

}  // namespace ferry
