// What the slots for copies of experts hold, and when tokens may go to them: a copy counts from
// when all of its weights are there, whoever dies on the way.
#pragma once
#include <cstddef>
#include <cstdint>
#include <span>
#include <vector>

namespace ferry {

/// As parameters, so that the explorer can break them (tests/model).
struct CopySlotsTraits {
  /// A plan forgets what a slot held before its new weights come, not once they are there.
  static constexpr bool kForgetsFirst = true;
  /// Weights that were on their way when a fetch failed do not count.
  static constexpr bool kCountsWhenFetched = true;
};

/// Places, [ranks, slots], of all ranks: all ranks make the same calls.
template <class Traits = CopySlotsTraits>
class CopySlots {
 public:
  enum class State { none, missing, coming, there };

  explicit CopySlots(std::size_t places)
      : held_(places, -1), table_(places, -1), fetches_(places, -1) {}

  /// The expert that each place holds a valid copy of; −1: none.
  std::span<const std::int32_t> held() const { return held_; }
  const std::vector<std::int32_t>& table() const { return table_; }
  /// Of the table, what is not held.
  const std::vector<std::int32_t>& fetches() const { return fetches_; }
  State state() const { return state_; }

  /// The copies that this batch needs.
  void plan(std::span<const std::int32_t> table) {
    table_.assign(table.begin(), table.end());
    state_ = State::there;
    for (std::size_t place = 0; place < table_.size(); ++place) {
      const bool missing = table_[place] >= 0 && table_[place] != held_[place];
      fetches_[place] = missing ? table_[place] : -1;
      if (!missing) continue;
      if (Traits::kForgetsFirst) held_[place] = -1;
      state_ = State::missing;
    }
  }
  /// They are on their way.
  void fetching() {
    if (state_ == State::missing) state_ = State::coming;
    if (!Traits::kCountsWhenFetched) take();
  }
  /// They are there, on all ranks.
  void fetched() {
    take();
    state_ = State::there;
  }
  /// Copies of these are not valid any more.
  template <class Changed>
  void forget(const Changed& changed) {
    for (std::int32_t& expert : held_) {
      if (expert >= 0 && changed(expert)) expert = -1;
    }
  }

 private:
  void take() {
    for (std::size_t place = 0; place < table_.size(); ++place) {
      if (fetches_[place] >= 0) held_[place] = fetches_[place];
    }
  }

  std::vector<std::int32_t> held_, table_, fetches_;
  State state_ = State::none;
};

}  // namespace ferry
