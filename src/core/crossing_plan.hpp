// Which tokens cross to which domain, once for each, and where they go from there. Pure.
#pragma once
#include <cstddef>
#include <cstdint>
#include <span>
#include <vector>

#include "core/domains.hpp"
#include "core/exchange_plan.hpp"
#include "ferry/network.hpp"

namespace ferry {

/// [D]: how many of the tokens of `rank`, whose routes these are, go to each domain; 0 for its own.
std::vector<std::int32_t> count_crossings(const RouteCounts& own, const Placement& placement,
                                          const Domains& domains, int rank);

/// What crosses between domains, on one rank. A token of rank s that has experts in another domain
/// crosses once, to the rank there that is on the rail of s, and lies in its staging buffer: by
/// ascending source rank, then token. Sums come back the same way, to the staging buffer of s: by
/// ascending domain, then token.
struct CrossingPlan {
  Domains domains{std::vector<int>{}};
  int rank = 0;
  std::vector<std::int32_t> domain_tokens{};  ///< [R, D]: tokens of s that cross to domain d;
                                              ///< empty where ExchangePlan::rank_tokens is
  std::vector<std::int32_t> tokens{};         ///< own tokens by other domain, then token
  std::vector<std::int64_t> offset{};         ///< [D + 1] into `tokens`
  std::vector<int> feeders{};                 ///< whose tokens cross to this rank, ascending
  std::vector<std::int64_t> feeder_row{};     ///< [feeders + 1]: their staging rows here
  /// [feeders, ranks of the domain]: rows of a feeder for each rank, and where they begin there.
  std::vector<std::int32_t> feeder_tokens{};
  std::vector<std::int64_t> feeder_first{};
  /// [feeders]: in their staging buffers, where the sums of this domain begin; all sums.
  std::vector<std::int64_t> feeder_sum_row{};
  std::vector<std::int64_t> feeder_sums{};
  std::vector<std::int64_t> staging_rows{};  ///< [R]: rows that cross to each rank
  /// [D]: on the own rail in each other domain, where the own staging rows begin.
  std::vector<std::int64_t> rail_row{};
  Crossing chosen = Crossing::direct;  ///< by the group, or else by the cost model

  std::int64_t crossing(int source, int domain) const {
    return domain_tokens[static_cast<std::size_t>(source * domains.count() + domain)];
  }
  /// Which feeder a rank is; −1: none.
  int feeder(int source) const;
  /// Of the i-th feeder, for each rank of the domain: its rows, and where they begin there.
  std::span<const std::int32_t> tokens_inside(std::size_t feeder) const {
    return std::span(feeder_tokens).subspan(feeder * members(), members());
  }
  std::span<const std::int64_t> first_rows(std::size_t feeder) const {
    return std::span(feeder_first).subspan(feeder * members(), members());
  }
  std::size_t members() const { return domains.members(domains.of(rank)).size(); }
  /// In the staging buffer of `source`, where the sums of `domain` begin; of `domain` = count:
  /// their number.
  std::int64_t first_sum(int source, int domain) const;
};

/// What a plan knows without the other ranks. `crossings`: [D], as count_crossings has them.
CrossingPlan begin_crossing_plan(const ExchangePlan& plan, const Domains& domains,
                                 std::span<const std::int32_t> crossings);
/// `domain_tokens`: what every rank counted, in rank order. `wanted`: the group's choice.
CrossingPlan make_crossing_plan(const ExchangePlan& plan, const Domains& domains,
                                std::vector<std::int32_t> domain_tokens,
                                Crossing wanted = Crossing::automatic);

/// The first rank whose `domain_tokens` do not fit the tokens that it counted for the ranks of that
/// domain; -1: all do.
int impossible_crossing(const ExchangePlan& plan, const Domains& domains,
                        std::span<const std::int32_t> domain_tokens);

/// Where rows that crossed from one feeder go inside this rank's domain.
struct Forward {
  std::vector<std::int32_t> topk_idx{};  ///< [n, K], global ids as the source has them
  std::vector<std::int64_t> destination_offset = {0};  ///< [n + 1] into destinations
  std::vector<Destination> destinations{};  ///< rank: in the group; row: ordinal among the
                                            ///< rows that the source sends there
  std::vector<std::int32_t> filled{};  ///< [ranks of the domain], or empty: destinations of each

  std::int64_t rows() const { return static_cast<std::int64_t>(destination_offset.size()) - 1; }
};

/// Appends rows of a feeder that crossed, in its order; ids [n, K]. False: they are not those that
/// it counted, and nothing may be written on their strength.
bool append_rows(Forward& forward, const ExchangePlan& plan, const CrossingPlan& crossing,
                 std::size_t feeder, std::span<const std::int32_t> ids);

/// Whether all rows of a feeder were appended that it counted for the ranks of this domain.
bool complete(const Forward& forward, const CrossingPlan& crossing, std::size_t feeder);

/// What crosses between domains on one rank, in rows.
struct RankCrossings {
  std::int64_t out = 0, in = 0;                      ///< directly
  std::int64_t crossings_out = 0, crossings_in = 0;  ///< hierarchically
  std::int64_t spread = 0;                           ///< of these, to ranks of its domain
};

/// The time of the busiest rank by the exchange model (ferry/exchange_model.hpp), in rows over the
/// network. Before anything is known of the links, memory or NVLink is taken to carry
/// kInsideSpeed times what a network does. Messages are left out: what a hierarchical exchange
/// saves of them, its second step costs; so where no rows are saved it is direct.
struct CrossingCost {
  double direct = 0;
  double hierarchical = 0;
};
inline constexpr double kInsideSpeed = 8;
CrossingCost crossing_cost(const ExchangePlan& plan, const CrossingPlan& crossing);
CrossingCost cost_of_rank(const RankCrossings& rows);
Crossing chosen_crossing(const Domains& domains, const CrossingCost& cost, Crossing wanted);

}  // namespace ferry
