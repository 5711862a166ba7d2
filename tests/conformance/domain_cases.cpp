#include "domain_cases.hpp"

namespace ferry::conformance {

std::vector<DomainCell> domain_cells() {
  struct Shape {
    int ranks, domain_size;
  };
  // The last ones are uneven: domains of 2, 2 and 1, of 3, 3 and 2, of 4 and 2 ranks.
  constexpr Shape kShapes[]{{2, 2}, {2, 1}, {4, 4}, {4, 2}, {4, 1}, {6, 6}, {6, 3},
                            {6, 2}, {8, 8}, {8, 4}, {8, 2}, {5, 2}, {8, 3}, {6, 4}};
  std::vector<DomainCell> cells;
  for (const Crossing crossing : {Crossing::direct}) {
    for (const Shape& shape : kShapes) {
      cells.push_back(
          {shape.ranks, {FabricKind::local, shape.domain_size, FabricKind::sim, crossing}});
      cells.push_back(
          {shape.ranks, {FabricKind::local, shape.domain_size, FabricKind::automatic, crossing}});
      if (only_threads()) continue;
      cells.push_back(
          {shape.ranks, {FabricKind::shm, shape.domain_size, FabricKind::automatic, crossing}});
    }
  }
  return cells;
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
