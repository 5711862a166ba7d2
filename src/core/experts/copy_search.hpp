// Which experts get copies on which ranks, and how many tokens go there: a search among drafts.
// Integers only: ranks that search alike find the same. Allocates nothing.
#pragma once
#include <cstdint>
#include <span>
#include <vector>

#include "core/domains.hpp"
#include "core/placement.hpp"

namespace ferry {

class CopySearch {
 public:
  struct Copy {
    std::int32_t expert = 0;
    int rank = 0;
    std::int64_t tokens = 0;
    bool held = false;
  };
  /// One way to place copies. Memory is reserved once.
  struct Draft {
    std::vector<std::int64_t> load;     // [ranks]
    std::vector<std::int64_t> at_home;  // [experts]
    std::vector<Copy> copies;
    std::vector<int> free;  // [ranks] places
    std::int64_t heaviest = 0;
    int fetches = 0;
  };

  /// max_rows: > 0: the most that a rank may have; copies are made for it whatever they cost.
  CopySearch(const Placement& homes, int slots, const Domains& domains, std::int64_t max_rows = 0);

  /// total: [experts], slots of routes that name each. held: [ranks, slots], valid copies; −1:
  /// none. The best draft: see BatchPlanner.
  const Draft& find(std::span<const std::int64_t> total, std::span<const std::int32_t> held,
                    std::int64_t copy_rows);

  /// The heaviest rank, in percent of the mean, that is not improved by moving more weights.
  static constexpr std::int64_t kMostPercent = 102;

 private:
  /// How a draft is made: which of several good choices.
  struct Style {
    bool reuse = true;   // begins with the copies that are held
    bool tight = false;  // gives away the smallest expert that suffices instead of the largest
    std::uint32_t random = 0;  // 0: always the first choice
  };

  /// How a search for room came to a rank.
  struct Reached {
    std::int64_t tokens = 0;  // that can come here; 0: not reached
    int copy = -1;            // by way of it
    int before = -1;          // from this rank
  };

  const Draft& no_copies();
  bool pays(std::int64_t heaviest, std::int64_t copy_rows);
  std::int64_t search(std::int64_t limit, int tries);
  void draft(std::int64_t limit, Style style);
  void use_held(std::int64_t limit, std::uint32_t random);
  int overloaded(std::int64_t limit, Style& style) const;
  bool relieve(int rank, std::int64_t limit, Style& style);
  std::int32_t expert_to_move(int rank, std::int64_t excess, std::int64_t room, bool tight) const;
  int receiver(std::int32_t expert, std::int64_t wanted, std::int64_t limit, Style& style) const;
  bool full_rank_has_room(std::int64_t wanted, std::int64_t limit) const;
  bool relieve_through_others(int rank, std::int64_t limit, std::int64_t least);
  int find_room(int from, std::int64_t wanted, std::int64_t limit, int avoid);
  std::int64_t push(int from, std::int64_t wanted, std::int64_t limit, int avoid);
  int copy_at(std::int32_t expert, int rank) const;
  void move(std::int32_t expert, int to, std::int64_t tokens);
  void level();
  void finish();
  int fewest_copies(std::int64_t limit);

  Placement homes_;
  int ranks_;
  int slots_;
  Domains domains_;
  std::int64_t max_rows_;
  std::span<const std::int64_t> total_{};  // of this search, as `held_`
  std::span<const std::int32_t> held_{};
  std::vector<std::int64_t> load_{};  // [ranks], without copies
  Draft now_{}, best_{};
  std::vector<Reached> reached_{};  // [ranks]
  std::vector<int> queue_{};        // [ranks]
  std::int64_t path_tokens_ = 0;
  std::vector<std::int64_t> rooms_{};  // [ranks], scratch
};

}  // namespace ferry
