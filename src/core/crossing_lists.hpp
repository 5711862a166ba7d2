// Which rows cross between this rank and ranks of other domains, and what it brings into its own:
// for an engine that gives all of that, at once, to an exchange inside the domain. Pure.
//
// What a rank brings into its domain are *domain tokens*: its own, then those that crossed to it,
// by ascending source, then token: as they lie in its staging buffer. Hierarchical: a token once,
// for all ranks of the domain; direct: once for each rank. To the exchange inside they are tokens
// like any other; only where their rows go is known to the whole group.
#pragma once
#include <cstdint>
#include <span>
#include <vector>

#include "core/crossing_layout.hpp"
#include "core/crossing_plan.hpp"
#include "core/exchange_plan.hpp"

namespace ferry {

/// Rows that `source` sends across to `target`; 0 inside a domain.
std::int64_t crossing_rows(const ExchangePlan& plan, const CrossingPlan& crossing, Crossing how,
                           int source, int target);

/// Rows to, or from, one rank.
struct CrossingBlock {
  int rank = 0;
  std::int64_t rows = 0;
};

struct CrossingLists {
  Crossing how = Crossing::hierarchical;
  std::vector<CrossingBlock> out{};    ///< own tokens cross to these ranks, ascending
  std::vector<std::int32_t> tokens{};  ///< which: by block, then ascending
  std::vector<CrossingBlock> in{};     ///< tokens of these ranks cross to here, ascending

  std::int64_t out_rows() const { return static_cast<std::int64_t>(tokens.size()); }
  std::int64_t in_rows() const;
};
CrossingLists make_crossing_lists(const ExchangePlan& plan, const CrossingPlan& crossing,
                                  Crossing how);
/// Rows cross back in the order of `lists.tokens`, in `portions` (core/crossing_layout.hpp): when
/// portion p is there, so is all of the own tokens before result[p]; behind the last portion, of
/// all `tokens`.
std::vector<std::int64_t> tokens_after(const CrossingLists& lists, const CrossingLayout& layout,
                                       std::int64_t tokens, int portions);

/// Routes of the tokens that crossed from one rank, in its order.
struct CrossedRoutes {
  std::span<const std::int32_t> tokens{};  ///< [n]
  std::span<const std::int32_t> ids{};     ///< [n, K], global ids
};

/// What a rank brings into its domain. Ranks and experts are numbered inside the domain.
struct DomainTokens {
  std::vector<std::int32_t> from{};   ///< [V] own token t, or −1 − i: row i of those that crossed
  std::vector<std::int32_t> names{};  ///< [V] the token's index at its owner
  std::vector<std::int32_t> ids{};    ///< [V, K]; −1: unused, or not of this domain (this rank)
  std::vector<int> sources{};         ///< this rank, then the others, ascending
  std::vector<std::int64_t> first{};  ///< [sources + 1]: their domain tokens
  /// [sources, ranks of the domain]: what is added to a row's ordinal among all that this rank
  /// brings to a rank, for its place there in the whole group's order.
  std::vector<std::int32_t> shift{};
  std::vector<std::int64_t> sum_offset{};  ///< [T + 1] into `sums`
  /// What an own token's result is the sum of, in order: domain token v, or −1 − i: row i of the
  /// sums that cross back, which lie in the order of CrossingLists::tokens.
  std::vector<std::int32_t> sums{};
  int offender = -1;  ///< ≥ 0: its routes are not those that it counted; all else is empty

  std::int64_t count() const { return static_cast<std::int64_t>(from.size()); }
  std::int64_t own() const { return first[1]; }
};
/// `inside`: the ranks of this rank's domain, as the exchange inside numbers them: ascending, ranks
/// that are lost included. `routes`: of each block of `lists.in`.
DomainTokens make_domain_tokens(const ExchangePlan& plan, const CrossingPlan& crossing,
                                std::span<const int> inside, const CrossingLists& lists,
                                std::span<const CrossedRoutes> routes);

}  // namespace ferry
