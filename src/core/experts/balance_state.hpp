// BatchBalancer as one team of threads runs it, a batch at a time, in memory that stays: which
// copies are held, the last batches and their plans. The same results, bit for bit.
#pragma once
#include <cstdint>

#include "core/experts/plan_batch.hpp"

namespace ferry {

/// Where things lie in the memory that stays, in bytes. All of `header` is 0 at first, and what is
/// between `held` and `load` −1.
struct BalanceStateLayout {
  static constexpr int kBatches = 64;  ///< that may be computed again
  static constexpr int kUnits = 64;    ///< blocks that place tokens

  std::size_t header = 0;
  std::size_t used = 0;    ///< i64 [kBatches]: the use of an entry that was its last
  std::size_t hashes = 0;  ///< u64 [kBatches] of counts
  std::size_t ids = 0;     ///< i64 [kBatches] of plans
  std::size_t held = 0;    ///< i32 [places] valid copies; as the next two
  std::size_t table = 0;
  std::size_t fetches = 0;
  std::size_t load = 0;     ///< Rows [ranks]
  std::size_t tallies = 0;  ///< i32 [kUnits, places]: slots of routes for the expert of a place
  std::size_t entries = 0;  ///< [kBatches, entry_bytes]
  std::size_t entry_bytes = 0;
  std::size_t entry_table = 0;  ///< in an entry, behind its counts [ranks, experts]
  std::size_t entry_load = 0;
  std::size_t entry_quota = 0;
  std::size_t bytes = 0;
};

FERRY_FN constexpr BalanceStateLayout make_balance_state_layout(const BatchPlanShape& shape) {
  const auto ranks = static_cast<std::size_t>(shape.ranks);
  const auto places = static_cast<std::size_t>(shape.places());
  constexpr std::size_t kBatches = BalanceStateLayout::kBatches, kWord = sizeof(std::int32_t);
  BalanceStateLayout layout{};
  Carver carver{};
  layout.header = carver.take(64);
  layout.used = carver.take(kBatches * sizeof(std::int64_t));
  layout.hashes = carver.take(kBatches * sizeof(std::uint64_t));
  layout.ids = carver.take(kBatches * sizeof(std::int64_t));
  layout.held = carver.take(places * kWord);
  layout.table = carver.take(places * kWord);
  layout.fetches = carver.take(places * kWord);
  layout.load = carver.take(ranks * kWord);
  layout.tallies = carver.take(BalanceStateLayout::kUnits * places * kWord);
  Carver entry{};
  (void)entry.take(ranks * static_cast<std::size_t>(shape.experts) * kWord);
  layout.entry_table = entry.take(places * kWord);
  layout.entry_load = entry.take(ranks * kWord);
  layout.entry_quota = entry.take(places * ranks * kWord);
  layout.entry_bytes = round_up(entry.end, kLineBytes);
  layout.entries = carver.take(kBatches * layout.entry_bytes);
  layout.bytes = carver.end;
  return layout;
}

struct BalanceHeader {
  std::int64_t plans;  ///< made so far
  std::int64_t
      plan_id;        ///< of now; 0: none; −1: a batch was to be computed again, and is forgotten
  std::int64_t uses;  ///< of entries
  std::int32_t batches;
  std::int32_t current;  ///< entry
};

/// One batch.
struct BalanceJob {
  BatchPlanJob plan{};  ///< counts and stride, and scratch for the rest
  /// Ranks whose experts have changed, of which no copy is valid: bits, and, where `stride` is more
  /// than `experts`, whatever is not 0 behind a rank's counts.
  std::uint64_t changed = 0;
  bool again = false;  ///< see BatchBalancer::plan
  std::byte* state = nullptr;
};

template <class Team>
class BalanceStep {
 public:
  /// held: scratch [places].
  FERRY_TEAM_FN BalanceStep(const Team& team, const BatchPlanShape& shape,
                            const BatchPlanLayout& layout, const BalanceStateLayout& at,
                            const BalanceJob& job, std::int32_t* held)
      : team_(team), shape_(shape), layout_(layout), at_(at), job_(job), held_(held) {}

  FERRY_TEAM_FN void run() {
    team_.mark(PlanStage::begin);
    forget();
    team_.mark(PlanStage::held);
    auto* header = words<BalanceHeader>(at_.header);
    const int batches = header->batches, all = BalanceStateLayout::kBatches;
    const std::uint64_t hash = hash_of_counts();
    team_.mark(PlanStage::hash);
    int entry = find(hash, batches);
    team_.mark(PlanStage::found);
    if (entry < 0 && job_.again) return lose();
    const bool made = entry < 0;
    if (made) entry = batches < all ? batches : least_recent();
    const std::int32_t* table = entry_at(entry, at_.entry_table);
    const Rows* load = entry_at(entry, at_.entry_load);
    if (made) {
      make(entry);
      table = job_.plan.table;
      load = job_.plan.load;
    }
    team_.mark(PlanStage::kept);
    team_.lead([&](const auto& lanes) {
      lanes.one([&] {
        words<std::int64_t>(at_.used)[entry] = ++header->uses;
        if (made) {
          words<std::uint64_t>(at_.hashes)[entry] = hash;
          words<std::int64_t>(at_.ids)[entry] = ++header->plans;
          header->batches = batches < all ? batches + 1 : all;
        }
        header->plan_id = words<std::int64_t>(at_.ids)[entry];
        header->current = entry;
      });
    });
    use(table, load);
    team_.mark(PlanStage::used);
  }

 private:
  template <class T>
  FERRY_TEAM_FN T* words(std::size_t offset) const {
    return reinterpret_cast<T*>(job_.state + offset);
  }
  FERRY_TEAM_FN std::int32_t* entry_at(std::int32_t entry, std::size_t offset) const {
    return words<std::int32_t>(at_.entries + static_cast<std::size_t>(entry) * at_.entry_bytes +
                               offset);
  }

  FERRY_TEAM_FN bool has_changed(int rank) const {
    if ((job_.changed >> rank & 1) != 0) return true;
    const BatchPlanJob& plan = job_.plan;
    return plan.stride > shape_.experts && plan.counts[rank * plan.stride + shape_.experts] != 0;
  }

  FERRY_TEAM_FN void forget() {
    team_.each(shape_.places(), [&](int place) {
      const std::int32_t expert = words<std::int32_t>(at_.held)[place];
      held_[place] = expert >= 0 && has_changed(shape_.home_of(expert)) ? -1 : expert;
    });
  }

  FERRY_TEAM_FN std::int32_t count_of(int i) const {
    const int rank = shape_.by_experts(i);
    return job_.plan.counts[rank * job_.plan.stride + (i - rank * shape_.experts)];
  }

  FERRY_TEAM_FN std::uint64_t hash_of_counts() const {
    return team_.sum_of_hashes(shape_.ranks * shape_.experts, [&](int i) {
      // The last mixing of SplitMix64.
      std::uint64_t x = std::uint64_t{static_cast<std::uint32_t>(i)} << 32 |
                        static_cast<std::uint32_t>(count_of(i));
      x += 0x9e3779b97f4a7c15;
      x = (x ^ x >> 30) * 0xbf58476d1ce4e5b9;
      x = (x ^ x >> 27) * 0x94d049bb133111eb;
      return x ^ x >> 31;
    });
  }

  /// The entry of the batch with these counts; −1: there is none.
  FERRY_TEAM_FN int find(std::uint64_t hash, int batches) const {
    const auto* hashes = words<std::uint64_t>(at_.hashes);
    for (int from = 0;;) {
      const int next = team_.lanes_for_many().first(
          batches - from, [&](int i) { return hashes[from + i] == hash; });
      if (next < 0) return -1;
      const std::int32_t* counts = entry_at(from + next, 0);
      const bool other =
          team_.any(shape_.ranks * shape_.experts, [&](int i) { return counts[i] != count_of(i); });
      if (!other) return from + next;
      from += next + 1;
    }
  }

  FERRY_TEAM_FN int least_recent() const {
    const auto* used = words<std::int64_t>(at_.used);
    return team_.lanes_for_many().best(BalanceStateLayout::kBatches,
                                       [&](int i) { return -used[i]; });
  }

  FERRY_TEAM_FN void make(std::int32_t entry) {
    BatchPlanJob plan = job_.plan;
    plan.held = held_;
    if (plan.quota == nullptr) plan.quota = entry_at(entry, at_.entry_quota);
    BatchPlanning<Team>(team_, shape_, layout_, plan).run();
    const int places = shape_.places();
    team_.each(shape_.ranks * shape_.experts, [&](int i) { entry_at(entry, 0)[i] = count_of(i); });
    team_.each(places * shape_.ranks, [&](int i) {
      if (i < places) entry_at(entry, at_.entry_table)[i] = plan.table[i];
      if (i < shape_.ranks) entry_at(entry, at_.entry_load)[i] = plan.load[i];
      if (job_.plan.quota != nullptr) entry_at(entry, at_.entry_quota)[i] = plan.quota[i];
    });
  }

  /// The copies that this batch needs: as CopySlots.
  FERRY_TEAM_FN void use(const std::int32_t* table, const Rows* load) {
    team_.each(shape_.places(), [&](int place) {
      const std::int32_t expert = table[place];
      const bool missing = expert >= 0 && expert != held_[place];
      words<std::int32_t>(at_.table)[place] = expert;
      words<std::int32_t>(at_.fetches)[place] = missing ? expert : -1;
      words<std::int32_t>(at_.held)[place] = missing ? -1 : held_[place];
      if (place < shape_.ranks) {
        words<Rows>(at_.load)[place] = load[place];
      }
    });
  }

  FERRY_TEAM_FN void lose() {
    team_.each(shape_.places(), [&](int place) {
      words<std::int32_t>(at_.table)[place] = words<std::int32_t>(at_.fetches)[place] = -1;
      words<std::int32_t>(at_.held)[place] = held_[place];
      if (place == 0) words<BalanceHeader>(at_.header)->plan_id = -1;
    });
  }

  const Team& team_;
  const BatchPlanShape& shape_;
  const BatchPlanLayout& layout_;
  const BalanceStateLayout& at_;
  const BalanceJob& job_;
  std::int32_t* held_;
};

}  // namespace ferry
