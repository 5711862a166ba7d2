// Which ranks share memory with which.
#pragma once
#include <cstddef>
#include <cstdint>
#include <vector>

namespace ferry {

/// A rank, row or token as the index of a vector.
constexpr std::size_t index(std::int64_t value) {
  return static_cast<std::size_t>(value);
}

/// The ranks of a group in domains, numbered by their lowest ranks. Every rank is in one.
class Domains {
 public:
  /// `labels`: [R]; ranks with equal labels are in one domain.
  explicit Domains(const std::vector<int>& labels);
  /// Blocks of `size` consecutive ranks, the last one shorter if they do not divide; 0: one domain.
  static Domains blocks(int ranks, int size);

  /// The domains of these ranks alone, ascending, numbered anew. The others are in none: they keep
  /// their numbers, but nothing may be asked of them, and `of` says 0.
  Domains among(const std::vector<int>& ranks) const;

  int count() const { return static_cast<int>(members_.size()); }
  int ranks() const { return static_cast<int>(domain_of_.size()); }
  int of(int rank) const { return domain_of_[static_cast<std::size_t>(rank)]; }
  /// The place of a rank among the ranks of its domain: its rail.
  int index(int rank) const { return index_[static_cast<std::size_t>(rank)]; }
  /// Ascending.
  const std::vector<int>& members(int domain) const {
    return members_[static_cast<std::size_t>(domain)];
  }
  bool together(int a, int b) const { return of(a) == of(b); }

  /// The rank of `domain` on the rail of `rank`: what goes from one to the other crosses there. In
  /// a domain with fewer ranks rails meet: it is the rank whose index is that of `rank` modulo
  /// their number.
  int rail(int rank, int domain) const {
    const std::vector<int>& all = members(domain);
    return all[static_cast<std::size_t>(index(rank)) % all.size()];
  }
  /// How many ranks the smallest domain has: so many rails have a rank of their own in each domain.
  int full_rails() const;
  /// The ranks of rail `index` < full_rails(), one of each domain, in the order of the domains.
  std::vector<int> on_rail(int index) const;
  /// The ranks of other domains whose rail in the domain of `rank` is `rank`, ascending.
  std::vector<int> feeders(int rank) const;

  friend bool operator==(const Domains&, const Domains&) = default;

 private:
  Domains(const std::vector<int>& labels, const std::vector<int>& ranks);

  std::vector<int> domain_of_;
  std::vector<int> index_;
  std::vector<std::vector<int>> members_;
};

}  // namespace ferry
