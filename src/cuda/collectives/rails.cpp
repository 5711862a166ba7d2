#include <algorithm>
#include <cstddef>
#include <vector>

#include "core/check.hpp"
#include "cuda/collectives/domains.hpp"

namespace ferry::cuda {

int rails_of(const Domains& domains) {
  std::size_t rails = domains.members(0).size();
  for (int d = 1; d < domains.count(); ++d) rails = std::min(rails, domains.members(d).size());
  return static_cast<int>(rails);
}

std::vector<int> rail_ranks(const Domains& domains, int rail) {
  std::vector<int> ranks;
  for (int d = 0; d < domains.count(); ++d) ranks.push_back(domains.members(d)[index(rail)]);
  return ranks;
}

}  // namespace ferry::cuda
