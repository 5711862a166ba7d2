// Cases of the matrix over several domains.
#pragma once
#include <cstddef>
#include <string>

#include "case.hpp"
#include "fleet.hpp"

namespace ferry::conformance {

/// Ranks in virtual domains.
struct DomainCell {
  int ranks = 1;
  Wires wires;
};

/// The cells that cases are dealt to, again and again: 2, 4, 6 and 8 ranks in one, two and four
/// domains, and uneven domains; 56 in a row have each with every crossing, 168 over every network.
/// Processes only where they can be.
DomainCell domain_cell(std::size_t number);
std::string to_string(const DomainCell& cell);
/// `c` with its ranks in these domains.
Case placed(Case c, const DomainCell& cell);

}  // namespace ferry::conformance
