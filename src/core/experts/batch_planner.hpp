// Copies of busy experts for one batch: which rank copies which expert, and how many tokens of each
// source go to each copy. Integers only and no exchange: ranks that have the same counts have the
// same plan. `plan` allocates nothing.
#pragma once
#include <cstdint>
#include <span>
#include <vector>

#include "core/domains.hpp"
#include "core/placement.hpp"

namespace ferry {

/// Expert e lives on rank `homes.rank_of(e)`; each rank has `slots` places for copies.
class BatchPlanner {
 public:
  BatchPlanner(const Placement& homes, int slots, const Domains& domains);

  /// counts: [ranks, experts], 0 or more: slots of routes of each source that name each expert.
  /// held: [ranks, slots], the expert that each place holds a valid copy of; −1: none.
  ///
  /// The heaviest rank gets at most kMostPercent of the mean load if the search finds a way, else
  /// the least that it finds, and that with the fewest copies which are not held yet. A copy lies
  /// in another domain than its expert only if no rank of that domain has room and a place.
  void plan(std::span<const std::int32_t> counts, std::span<const std::int32_t> held);

  /// The heaviest rank, in percent of the mean, that is not improved by moving more weights.
  static constexpr std::int64_t kMostPercent = 102;

  /// [ranks, slots] the expert whose tokens go to each place; −1: none do.
  std::span<const std::int32_t> table() const { return table_; }
  /// [ranks] slots of routes that each rank works on.
  std::span<const std::int64_t> load() const { return best_.load; }
  /// How many of source's slots for table()[place] go to that place, rank · slots + slot. The
  /// others go home.
  std::int32_t quota(int place, int source) const {
    return quota_[index(std::int64_t{place} * ranks_ + source)];
  }

 private:
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
  void place_copies();
  template <class Fits>
  bool put(const Copy& copy, const Fits& fits);
  void share_among_sources(std::span<const std::int32_t> counts);
  void share(std::int32_t expert, std::size_t first);
  int rank_of(std::size_t place) const { return static_cast<int>(place) / slots_; }
  template <class Visit>
  void for_places(std::int32_t expert, std::size_t first, const Visit& visit) const {
    for (std::size_t place = first; place < table_.size(); ++place) {
      if (table_[place] == expert) visit(place);
    }
  }

  Placement homes_;
  int ranks_;
  int slots_;
  Domains domains_;
  std::span<const std::int32_t> held_;
  std::vector<std::int64_t> total_;  // [experts]
  std::vector<std::int64_t> load_;   // [ranks], without copies
  Draft now_, best_;
  std::vector<Reached> reached_;  // [ranks]
  std::vector<int> queue_;        // [ranks]
  std::int64_t path_tokens_ = 0;
  std::vector<std::int64_t> rooms_;  // [ranks], scratch
  std::vector<std::int32_t> table_;
  std::vector<std::int64_t> tokens_;  // [ranks, slots] of each place
  std::vector<std::int32_t> quota_;   // [ranks · slots, ranks]
  std::vector<std::int32_t> left_;    // [ranks], scratch: of an expert's slots of each source
};

}  // namespace ferry
