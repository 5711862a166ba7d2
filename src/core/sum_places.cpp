#include "core/sum_places.hpp"

#include <cstddef>
#include <numeric>

namespace ferry {

std::vector<std::uint64_t> first_sum_places(std::span<const std::int32_t> routes,
                                            const Placement& placement) {
  std::vector<std::uint64_t> first(static_cast<std::size_t>(placement.ranks), 0);
  for (const std::int32_t id : routes) {
    if (id >= 0) ++first[static_cast<std::size_t>(placement.rank_of(id))];
  }
  std::exclusive_scan(first.begin(), first.end(), first.begin(), std::uint64_t{0});
  return first;
}

std::vector<std::uint64_t> fixed_sum_places(std::int64_t capacity, int ranks) {
  std::vector<std::uint64_t> first(static_cast<std::size_t>(ranks));
  for (std::size_t rank = 0; rank < first.size(); ++rank) {
    first[rank] = rank * static_cast<std::uint64_t>(capacity);
  }
  return first;
}

}  // namespace ferry
