// Sizes of a plan of copies, and the memory that making one takes.
#pragma once
#include <cstddef>
#include <cstdint>

#include "core/device.hpp"
#include "core/layout.hpp"

namespace ferry {

/// Slots of routes: those of a batch are at most INT32_MAX in all.
using Rows = std::int32_t;

/// The key of what is not to be chosen: i32 or i64.
template <class Key>
inline constexpr Key kNoKey =
    sizeof(Key) == 4 ? static_cast<Key>(INT32_MIN) : static_cast<Key>(INT64_MIN);

/// What a team has done when it calls `mark`, for programs that measure.
enum class PlanStage : std::uint8_t {
  begin,
  held,
  hash,
  found,
  sums,
  bound,
  drafts,
  best,
  level,
  places,
  quotas,
  kept,
  used,
  count
};

/// Divides numbers below 2²² by one of at most 2²⁰: a GPU has no instruction for it.
class Divider {
 public:
  FERRY_FN explicit constexpr Divider(std::int32_t by)
      : factor_((std::uint64_t{1} << kShift) / static_cast<std::uint32_t>(by) + 1) {}
  FERRY_FN constexpr std::int32_t operator()(std::int32_t n) const {
    return static_cast<std::int32_t>(static_cast<std::uint32_t>(n) * factor_ >> kShift);
  }

 private:
  static constexpr int kShift = 42;
  std::uint64_t factor_;
};

struct BatchPlanShape {
  std::int32_t experts = 0;  ///< a multiple of `ranks`
  std::int32_t ranks = 1;
  std::int32_t slots = 1;             ///< places for copies on each rank
  std::int32_t domain_size = 1;       ///< consecutive ranks; `ranks`: one domain
  std::int32_t copy_rows = 0;         ///< what moving weights and gradient of a copy costs
  std::int32_t max_rows = INT32_MAX;  ///< the most that a rank may have

  Divider by_experts{1}, by_local{1}, by_slots{1};

  FERRY_FN constexpr int home_of(std::int32_t expert) const { return by_local(expert); }
  FERRY_FN constexpr int rank_of(int place) const { return by_slots(place); }
  FERRY_FN constexpr int places() const { return ranks * slots; }
  FERRY_FN constexpr int local() const { return experts / ranks; }
  FERRY_FN constexpr bool together(int a, int b) const {
    return domain_size >= ranks || a / domain_size == b / domain_size;
  }
};

/// One way to place copies, in memory of others.
struct CopyDraft {
  struct Copy {
    std::int32_t expert;
    std::int32_t home;  ///< the rank that the expert lives on
    std::int32_t rank;
    Rows tokens;
    std::int32_t held;  ///< 1: that rank holds it already
  };
  /// How a search for room came to a rank.
  struct Reached {
    Rows tokens;          ///< that can come here; 0: not reached
    std::int32_t copy;    ///< by way of it
    std::int32_t before;  ///< from this rank
  };
  struct End {
    std::int32_t copies;
    Rows heaviest;
    std::int32_t fetches;
  };
  Rows* load;           ///< [ranks]
  Rows* at_home;        ///< [experts]
  std::int32_t* free;   ///< [ranks] places
  Copy* copies;         ///< [places]
  Reached* reached;     ///< [ranks]
  std::int32_t* queue;  ///< [ranks]
  End* end;
};

/// Where things lie in the memory of a plan, in bytes.
struct BatchPlanLayout {
  std::size_t total = 0;    ///< Rows [experts]
  std::size_t load = 0;     ///< Rows [ranks], without copies
  std::size_t sums = 0;     ///< i64 [ranks], scratch
  std::size_t rooms = 0;    ///< Rows [ranks], scratch
  std::size_t slot_of = 0;  ///< i32 [drafts]: which draft each drafter writes
  std::size_t tokens = 0;   ///< Rows [places] of each place
  std::size_t left = 0;     ///< Rows [warps, ranks], scratch: of an expert's slots of each source
  std::size_t drafts = 0;   ///< [drafters + 1, draft_bytes]
  std::size_t draft_bytes = 0;
  std::size_t bytes = 0;
};

/// `drafters`: that work at the same time.
FERRY_FN constexpr BatchPlanLayout make_batch_plan_layout(const BatchPlanShape& shape, int warps,
                                                          int drafters) {
  const auto ranks = static_cast<std::size_t>(shape.ranks);
  const auto experts = static_cast<std::size_t>(shape.experts);
  const auto places = static_cast<std::size_t>(shape.places());
  constexpr std::size_t kAlign = 16;
  BatchPlanLayout layout{};
  Carver carver{};
  layout.total = carver.take(experts * sizeof(Rows), kAlign);
  layout.load = carver.take(ranks * sizeof(Rows), kAlign);
  layout.sums = carver.take(ranks * sizeof(std::int64_t), kAlign);
  layout.rooms = carver.take(ranks * sizeof(Rows), kAlign);
  layout.slot_of = carver.take(static_cast<std::size_t>(drafters) * sizeof(std::int32_t), kAlign);
  layout.tokens = carver.take(places * sizeof(Rows), kAlign);
  layout.left = carver.take(static_cast<std::size_t>(warps) * ranks * sizeof(Rows), kAlign);
  const std::size_t of_ranks = 3 * sizeof(Rows) + sizeof(CopyDraft::Reached);
  layout.draft_bytes = round_up(sizeof(CopyDraft::End) + ranks * of_ranks + experts * sizeof(Rows) +
                                    places * sizeof(CopyDraft::Copy),
                                kAlign);
  layout.drafts =
      carver.take((static_cast<std::size_t>(drafters) + 1) * layout.draft_bytes, kAlign);
  layout.bytes = carver.end;
  return layout;
}

FERRY_FN CopyDraft copy_draft_at(std::byte* memory, const BatchPlanLayout& layout,
                                 const BatchPlanShape& shape, int number) {
  std::byte* at = memory + layout.drafts + static_cast<std::size_t>(number) * layout.draft_bytes;
  CopyDraft draft;
  draft.end = reinterpret_cast<CopyDraft::End*>(at);
  draft.load = reinterpret_cast<Rows*>(draft.end + 1);
  draft.free = draft.load + shape.ranks;
  draft.queue = draft.free + shape.ranks;
  draft.at_home = draft.queue + shape.ranks;
  draft.reached = reinterpret_cast<CopyDraft::Reached*>(draft.at_home + shape.experts);
  draft.copies = reinterpret_cast<CopyDraft::Copy*>(draft.reached + shape.ranks);
  return draft;
}

}  // namespace ferry
