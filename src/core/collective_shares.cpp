#include "core/collective_shares.hpp"

#include <algorithm>

namespace ferry {

namespace {

std::int64_t units_of(std::int64_t count) {
  return (count + kShareUnit - 1) / kShareUnit;
}

std::int64_t largest_domain(const Domains& domains) {
  std::size_t most = 1;
  for (int d = 0; d < domains.count(); ++d) most = std::max(most, domains.members(d).size());
  return static_cast<std::int64_t>(most);
}

}  // namespace

ShareCutter::ShareCutter(const Domains& domains, std::span<const int> weights)
    : domains_(&domains), indices_(largest_domain(domains)) {
  for (int d = 0; d < domains.count(); ++d) {
    before_.push_back(before_.back() + (weights.empty() ? 1 : weights[index(d)]));
  }
}

std::int64_t ShareCutter::bound(std::int64_t units, int domain, std::int64_t at) const {
  const std::int64_t weight = before_[index(domain) + 1] - before_[index(domain)];
  return units * (before_[index(domain)] * indices_ + weight * at) / (before_.back() * indices_);
}

std::vector<Share> ShareCutter::cut(std::int64_t count) const {
  const std::int64_t units = units_of(count);
  std::vector<Share> made;
  for (int d = 0; d < domains_->count(); ++d) {
    for (std::int64_t i = 0; i < indices_; ++i) {
      const Share share{std::min(count, bound(units, d, i) * kShareUnit),
                        std::min(count, bound(units, d, i + 1) * kShareUnit), d,
                        static_cast<int>(i)};
      if (share.count() > 0) made.push_back(share);
    }
  }
  return made;
}

std::int64_t ShareCutter::room(std::int64_t round, int domain, std::int64_t at) const {
  const std::int64_t units = units_of(round);
  // Bounds are rounded down, so that a share of a shorter tensor may be one unit longer.
  const std::int64_t fewer = bound(units, domain, at + 1) - bound(units, domain, at);
  return (fewer + 1) * kShareUnit;
}

std::int64_t ShareCutter::inbox_place(const Share& share, int domain, std::int64_t round) const {
  const auto ranks = static_cast<int>(domains_->members(share.domain).size());
  std::int64_t place = 0;
  for (int i = share.index % ranks; i < share.index; i += ranks) {
    place += (domains_->count() - 1) * room(round, share.domain, i);
  }
  const int sources_before = domain < share.domain ? domain : domain - 1;
  return place + sources_before * room(round, share.domain, share.index);
}

std::int64_t ShareCutter::inbox_elements(std::int64_t round) const {
  std::int64_t most = 0;
  for (int d = 0; d < domains_->count(); ++d) {
    const auto ranks = static_cast<std::int64_t>(domains_->members(d).size());
    for (std::int64_t owner = 0; owner < ranks; ++owner) {
      std::int64_t all = 0;
      for (std::int64_t i = owner; i < indices_; i += ranks) all += room(round, d, i);
      most = std::max(most, (domains_->count() - 1) * all);
    }
  }
  return most;
}

std::int64_t ShareCutter::longest_round(std::int64_t window, std::int64_t inbox) const {
  std::int64_t round = std::max(window / kShareUnit * kShareUnit, kShareUnit);
  while (round > kShareUnit) {
    const std::int64_t needed = inbox_elements(round);
    if (needed <= inbox) break;
    const std::int64_t fits = static_cast<std::int64_t>(
        static_cast<double>(round) * static_cast<double>(inbox) / static_cast<double>(needed));
    round = std::max(std::min(fits / kShareUnit * kShareUnit, round - kShareUnit), kShareUnit);
  }
  return round;
}

std::int64_t smallest_inbox(const Domains& domains) {
  return domains.count() * largest_domain(domains) * 2 * kShareUnit;
}

std::int64_t ring_bound(std::int64_t count, int ranks, std::int64_t share) {
  return std::min(count, units_of(count) * share / ranks * kShareUnit);
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
