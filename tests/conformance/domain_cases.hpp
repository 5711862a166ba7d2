// Cases of the matrix over several domains.
#pragma once
#include <string>
#include <vector>

#include "case.hpp"
#include "fleet.hpp"

namespace ferry::conformance {

/// Ranks in virtual domains.
struct DomainCell {
  int ranks = 1;
  Wires wires;
};

/// Every group of ranks in domains that cases run over: 2, 4, 6 and 8 ranks in one, two and four
/// domains, and uneven domains, over each network and crossing. Those of processes only where they
/// can be.
std::vector<DomainCell> domain_cells();
std::string to_string(const DomainCell& cell);
/// `c` with its ranks in these domains.
Case placed(Case c, const DomainCell& cell);

}  // namespace ferry::conformance
