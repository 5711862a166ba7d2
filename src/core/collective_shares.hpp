// Who reduces which elements of a tensor, and through whom they cross between domains.
#pragma once
#include <cstdint>
#include <span>
#include <vector>

#include "core/domains.hpp"

namespace ferry {

/// A range of elements that one rank finishes. In every domain one rank handles it: it sums what
/// the ranks of its domain have there, and passes on the result.
struct Share {
  std::int64_t first = 0;
  std::int64_t end = 0;
  int domain = 0;  ///< in which it is finished
  int index = 0;   ///< of the rank that handles it, modulo the ranks of its domain

  std::int64_t count() const { return end - first; }
};

/// The rank that handles a share in `domain`; in the share's own it finishes it.
inline int rank_of(const Share& share, int domain, const Domains& domains) {
  const std::vector<int>& all = domains.members(domain);
  return all[static_cast<std::size_t>(share.index) % all.size()];
}

/// Shares begin at multiples of this many elements, so that no two lie on one cache line.
inline constexpr std::int64_t kShareUnit = 128;

/// Cuts tensors into shares, and the inbox of an owner into places for what comes of them: of every
/// share the partial results of each other domain.
class ShareCutter {
 public:
  /// `weights`: [domains], 0 or more, not all 0: what the ranks of each domain finish is in
  /// proportion; empty: equal. In a domain shares are equal, as many as the largest domain has
  /// ranks.
  explicit ShareCutter(const Domains& domains, std::span<const int> weights = {});

  /// `count` elements in ascending order. Empty shares are left out.
  std::vector<Share> cut(std::int64_t count) const;

  /// Elements of the inbox of a share's owner before what comes from `domain`. It is the same for
  /// all tensors of at most `round` elements, so that rounds may overlap.
  std::int64_t inbox_place(const Share& share, int domain, std::int64_t round) const;
  /// What the fullest inbox must hold.
  std::int64_t inbox_elements(std::int64_t round) const;
  /// The longest round, in units, of at most `window` elements, whose inboxes hold `inbox`. It is
  /// at least one unit: `inbox` must be `smallest_inbox` or more.
  std::int64_t longest_round(std::int64_t window, std::int64_t inbox) const;

 private:
  /// Where the share of a domain and index begins, of so many units.
  std::int64_t bound(std::int64_t units, int domain, std::int64_t index) const;
  /// Room for one domain's part of a share, in any tensor of at most `round` elements.
  std::int64_t room(std::int64_t round, int domain, std::int64_t index) const;

  const Domains* domains_;
  std::int64_t indices_ = 1;             // shares of a domain
  std::vector<std::int64_t> before_{0};  // [domains + 1]: the sum of the weights before
};

/// Elements: an inbox that holds rounds of one unit whatever the weights are. An owner has at most
/// all shares of its domain, and a unit of each from every other one, and one more.
std::int64_t smallest_inbox(const Domains& domains);

/// Where share `share` of a ring of `ranks` begins: equal ones, in units.
std::int64_t ring_bound(std::int64_t count, int ranks, std::int64_t share);

/// The tree of an all_reduce. In each domain the rank of index i is above those of 2i + 1 and
/// 2i + 2; the first rank of domain d is above those of domains 2d + 1 and 2d + 2, too.
std::vector<int> tree_children(int rank, const Domains& domains);
/// -1 of the root.
int tree_parent(int rank, const Domains& domains);

}  // namespace ferry
