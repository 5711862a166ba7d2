// Plans of groups that are too large for every rank to know how many tokens each sends to each:
// what a rank tells each other one, in three steps, and what it makes of what it was told. Time and
// memory grow with the number of ranks, not with its square. Pure.
#pragma once
#include <array>
#include <cstddef>
#include <cstdint>
#include <utility>

#include "core/crossing_plan.hpp"
#include "core/domains.hpp"
#include "core/exchange_plan.hpp"

namespace ferry {

/// In groups of up to so many ranks all counts are known to all, which takes one step alone.
inline constexpr int kMatrixRanks = 256;

/// The message of Step::counts begins with it; then i32 slots for each expert of the receiver; on a
/// rail, i32 tokens for each rank of its domain.
struct PairCountsHead {
  std::int64_t sent_before = 0;  ///< rows of the sender to ranks before the receiver
  std::int64_t sent_rows = 0;
  std::int64_t sum_row = 0;  ///< its sums of domains before the receiver's
  std::int64_t sums = 0;
  std::int32_t tokens = 0;    ///< for the receiver
  std::int32_t crossing = 0;  ///< for the receiver's domain
};

/// The message of Step::places. That of Step::rails: on a rail, i32 [ranks of the domain], where
/// the sender's rows begin at each.
struct PairPlaces {
  std::int64_t first_row = 0;  ///< of the receiver's rows at the sender
  std::int64_t recv_rows = 0;
  std::int64_t staging_row = 0;
  std::int64_t staging_rows = 0;
  CrossingCost cost{};
};

class PairCounts {
 public:
  /// Counts: what the sender has for the receiver. Places: where that lies at the receiver, which
  /// now knows, and what the crossing costs it. Rails: to the rank on the sender's rail in another
  /// domain, where its rows lie at the ranks there.
  enum class Step { counts, places, rails };
  static constexpr std::array kSteps{Step::counts, Step::places, Step::rails};

  PairCounts(RouteCounts own, const Placement& placement, const Domains& domains, int rank);

  /// Of the largest message.
  static std::size_t message_bytes(const Placement& placement, const Domains& domains);
  /// This rank's message for `peer`, after it has read all of the step before. Returns its bytes.
  std::size_t write(Step step, int peer, std::byte* out) const;
  /// The message of `source` for this rank, of every rank in order. False: it cannot be.
  bool read(Step step, int source, const std::byte* in);
  /// After the last step. `rank_tokens` and `domain_tokens` remain empty.
  ExchangePlan take_plan() { return std::move(plan_); }
  CrossingPlan take_crossing(Crossing wanted);

 private:
  bool on_rail(int source, int target) const;
  std::size_t write_counts(int peer, std::byte* out) const;
  std::size_t write_places(int peer, std::byte* out) const;
  std::size_t write_rails(int peer, std::byte* out) const;
  bool read_counts(int source, const std::byte* in);
  bool read_feeder(std::int32_t tokens, std::int32_t crossing, const std::byte* in);
  bool read_places(int source, const std::byte* in);
  bool read_rails(int source, const std::byte* in);
  CrossingCost own_cost() const;

  ExchangePlan plan_{};
  CrossingPlan crossing_{};
  std::int64_t came_across_ = 0;  // rows of a direct dispatch to here, from other domains
  std::int64_t spread_ = 0;       // rows that this rank spreads in its domain
  CrossingCost cost_{};           // the largest
};

}  // namespace ferry
