#include "core/domains.hpp"

#include <algorithm>
#include <map>
#include <numeric>

namespace ferry {
namespace {

std::vector<int> all_of(std::size_t ranks) {
  std::vector<int> all(ranks);
  std::iota(all.begin(), all.end(), 0);
  return all;
}

}  // namespace

Domains::Domains(const std::vector<int>& labels) : Domains(labels, all_of(labels.size())) {}

Domains::Domains(const std::vector<int>& labels, const std::vector<int>& ranks)
    : domain_of_(labels.size()), index_(labels.size()) {
  std::map<int, int> numbers;  // by label
  for (const int rank : ranks) {
    const auto r = static_cast<std::size_t>(rank);
    const auto [it, first] = numbers.emplace(labels[r], count());
    if (first) members_.emplace_back();
    std::vector<int>& members = members_[static_cast<std::size_t>(it->second)];
    domain_of_[r] = it->second;
    index_[r] = static_cast<int>(members.size());
    members.push_back(rank);
  }
}

Domains Domains::blocks(int ranks, int size) {
  std::vector<int> labels;
  for (int rank = 0; rank < ranks; ++rank) labels.push_back(size > 0 ? rank / size : 0);
  return Domains(labels);
}

Domains Domains::among(const std::vector<int>& ranks) const {
  return {domain_of_, ranks};
}

int Domains::full_rails() const {
  std::size_t fewest = members(0).size();
  for (const std::vector<int>& all : members_) fewest = std::min(fewest, all.size());
  return static_cast<int>(fewest);
}

std::vector<int> Domains::on_rail(int index) const {
  std::vector<int> all;
  for (int domain = 0; domain < count(); ++domain)
    all.push_back(rail(members(0)[static_cast<std::size_t>(index)], domain));
  return all;
}

std::vector<int> Domains::feeders(int rank) const {
  std::vector<int> all;
  for (int domain = 0; domain < count(); ++domain) {
    if (domain == of(rank)) continue;
    for (const int source : members(domain)) {
      if (rail(source, of(rank)) == rank) all.push_back(source);
    }
  }
  std::sort(all.begin(), all.end());
  return all;
}

}  // namespace ferry
