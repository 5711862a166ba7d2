#include "domain_cases.hpp"

#include <iterator>

namespace ferry::conformance {

DomainCell domain_cell(std::size_t number) {
  struct Shape {
    int ranks, domain_size;
  };
  // The last ones are uneven: domains of 2, 2 and 1, of 3, 3 and 2, of 4 and 2 ranks.
  constexpr Shape kShapes[]{{2, 2}, {2, 1}, {4, 4}, {4, 2}, {4, 1}, {6, 6}, {6, 3},
                            {6, 2}, {8, 8}, {8, 4}, {8, 2}, {5, 2}, {8, 3}, {6, 4}};
  constexpr Crossing kCrossings[]{Crossing::hierarchical, Crossing::direct, Crossing::automatic,
                                  Crossing::hierarchical};
  const Shape& shape = kShapes[number % std::size(kShapes)];
  const std::size_t round = number / std::size(kShapes);
  const std::size_t wire = (number + round / std::size(kCrossings)) % 3;
  return {shape.ranks,
          {wire == 2 && !only_threads() ? FabricKind::shm : FabricKind::local, shape.domain_size,
           wire == 0 ? FabricKind::sim : FabricKind::automatic,
           kCrossings[round % std::size(kCrossings)]}};
}

std::string to_string(const DomainCell& cell) {
  return std::to_string(cell.ranks) + " ranks in domains of " +
         std::to_string(cell.wires.domain_size) + ", network " +
         std::string(name_of(cell.wires.network)) + ", " +
         std::string(name_of(cell.wires.crossing));
}

Case placed(Case c, const DomainCell& cell) {
  c.fabric = cell.wires.fabric;
  c.ranks = cell.ranks;
  return c;
}

}  // namespace ferry::conformance
