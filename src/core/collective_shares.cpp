#include "core/collective_shares.hpp"

#include <algorithm>

namespace ferry {

std::vector<Share> equal_shares(std::int64_t count, const Domains& domains) {
  std::size_t most = 1;
  for (int d = 0; d < domains.count(); ++d) most = std::max(most, domains.members(d).size());
  const auto indices = static_cast<std::int64_t>(most);
  const std::int64_t shares = indices * domains.count();
  const std::int64_t units = (count + kShareUnit - 1) / kShareUnit;
  std::vector<Share> made;
  for (std::int64_t s = 0; s < shares; ++s) {
    const auto bound = [&](std::int64_t i) {
      return std::min(count, units * i / shares * kShareUnit);
    };
    const Share share{bound(s), s + 1 == shares ? count : bound(s + 1),
                      static_cast<int>(s / indices), static_cast<int>(s % indices)};
    if (share.count() > 0) made.push_back(share);
  }
  return made;
}

std::int64_t ring_bound(std::int64_t count, int ranks, std::int64_t share) {
  const std::int64_t units = (count + kShareUnit - 1) / kShareUnit;
  return std::min(count, units * share / ranks * kShareUnit);
}

std::vector<int> tree_children(int rank, const Domains& domains) {
  const int domain = domains.of(rank), place = domains.index(rank);
  const std::vector<int>& members = domains.members(domain);
  std::vector<int> children;
  for (const int child : {2 * place + 1, 2 * place + 2}) {
    if (index(child) < members.size()) children.push_back(members[index(child)]);
  }
  for (const int child : {2 * domain + 1, 2 * domain + 2}) {
    if (place == 0 && child < domains.count()) children.push_back(domains.members(child)[0]);
  }
  return children;
}

int tree_parent(int rank, const Domains& domains) {
  const int domain = domains.of(rank), place = domains.index(rank);
  if (place > 0) return domains.members(domain)[index((place - 1) / 2)];
  return domain > 0 ? domains.members((domain - 1) / 2)[0] : -1;
}

}  // namespace ferry
