#include "core/domains.hpp"

#include <map>

namespace ferry {

Domains::Domains(const std::vector<int>& labels) {
  std::map<int, int> numbers;  // by label
  for (std::size_t rank = 0; rank < labels.size(); ++rank) {
    const auto [it, first] = numbers.emplace(labels[rank], count());
    if (first) members_.emplace_back();
    std::vector<int>& members = members_[static_cast<std::size_t>(it->second)];
    domain_of_.push_back(it->second);
    index_.push_back(static_cast<int>(members.size()));
    members.push_back(static_cast<int>(rank));
  }
}

Domains Domains::blocks(int ranks, int size) {
  std::vector<int> labels;
  for (int rank = 0; rank < ranks; ++rank) labels.push_back(size > 0 ? rank / size : 0);
  return Domains(labels);
}

std::vector<int> Domains::feeders(int rank) const {
  std::vector<int> all;
  for (int source = 0; source < ranks(); ++source) {
    if (!together(source, rank) && rail(source, of(rank)) == rank) all.push_back(source);
  }
  return all;
}

}  // namespace ferry
