// Who reduces which elements of a tensor, and through whom they cross between domains.
#pragma once
#include <cstdint>
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

/// `count` elements in equal shares: for every domain as many as the largest has ranks. Empty ones
/// are left out.
std::vector<Share> equal_shares(std::int64_t count, const Domains& domains);

/// Where share `share` of a ring of `ranks` begins: equal ones, in units.
std::int64_t ring_bound(std::int64_t count, int ranks, std::int64_t share);

/// The tree of an all_reduce. In each domain the rank of index i is above those of 2i + 1 and
/// 2i + 2; the first rank of domain d is above those of domains 2d + 1 and 2d + 2, too.
std::vector<int> tree_children(int rank, const Domains& domains);
/// -1 of the root.
int tree_parent(int rank, const Domains& domains);

}  // namespace ferry
