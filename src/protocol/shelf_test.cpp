// Ranks that put versions, die at any moment and recover: all orders of these events, over real
// shelves. What the engine does with them (engine/vault/vault.cpp, vault_domains.cpp) is here in
// short. Each seat stands for a domain where the vault is one across domains.
#include "protocol/shelf.hpp"

#include <gtest/gtest.h>

#include <algorithm>
#include <array>
#include <cstring>
#include <optional>
#include <string>
#include <string_view>
#include <type_traits>
#include <unordered_set>
#include <vector>

namespace ferry::protocol {
namespace {

constexpr int kSeats = 3;
constexpr std::uint64_t kLastStep = 2;
constexpr std::uint32_t kAllItems = (1u << kSeats) - 1;

/// A version: which commit made it and which items it holds, twice, as it can be torn.
struct Content {
  std::uint64_t commit = 0;
  std::uint64_t items = 0;
};
constexpr std::size_t kEntryBytes = 2 * sizeof(Content);

/// What the ranks do besides, as parameters, so that mutants can be tried.
struct Sound : ShelfTraits, AgreedTraits {
  static constexpr bool kKeepsLost = true;
  static constexpr bool kWaitsForAll = true;
  static constexpr bool kCopiesToNewKeeper = true;
  static constexpr bool kCountsAgreed = true;
  static constexpr bool kAsksWhetherSettled = true;
  /// Domains: a rank has a shelf in its own memory, too, and a put ends with its keeper's copy.
  static constexpr bool kAcross = false;
  static constexpr bool kPutsEndWithCopies = true;
};

using Memory = std::array<std::uint64_t, 16>;

/// A shelf, and the processes that it concerns; 0: nobody. Nothing here has padding: states are
/// compared by their bytes.
struct Kept {
  std::int64_t owner, owner_process, keeper, keeper_process;
  std::uint64_t at;
  std::int64_t settled, dropped;
  Memory memory;
};

constexpr int kMostShelves = 12;
constexpr Kept kNoShelf{-1, 0, -1, 0, 0, 0, 1, {}};

struct Seat {
  std::int64_t process;  // 0: a hole
  std::int64_t counts;   // has recovered
  std::uint64_t items;   // whose tensors it has
  std::uint64_t agreed;
  std::int64_t put;    // this step: 1: on its own shelf, across domains; kPut: it has
  std::int64_t puts;   // since it recovered
  std::int64_t shelf;  // where it puts; across domains where its keeper does. -1: nowhere
  Memory own;          // its shelf, across domains
};
constexpr std::int64_t kPut = 2;

struct State {
  std::array<Seat, kSeats> seats;
  std::array<Kept, kMostShelves> kept;
  std::uint64_t step;
  std::uint64_t commits;                               // that ever were
  std::array<std::uint64_t, kLastStep + 2> commit_of;  // the one of each version that counts
  std::int64_t deaths, joins, alarms, processes, broken, interrupted;
};
static_assert(std::has_unique_object_representations_v<State>);

template <class Traits>
class Search {
 public:
  /// What went wrong; empty: nothing.
  std::string run() {
    State first;
    std::memset(&first, 0, sizeof(first));
    first.kept.fill(kNoShelf);
    for (int r = 0; r < kSeats; ++r) first.seats[index(r)] = seat(r + 1);
    first.processes = kSeats;
    recover(first, kSeats);
    visit(first);
    return wrong_;
  }
  std::size_t states() const { return seen_.size(); }

 private:
  static std::size_t index(std::int64_t i) { return static_cast<std::size_t>(i); }
  static Seat seat(std::int64_t process) { return {process, 0, 0, 0, 0, 0, -1, {}}; }
  static Shelf<Traits> shelf(Memory& memory) {
    return {reinterpret_cast<std::byte*>(memory.data()), kEntryBytes};
  }
  static Shelf<Traits> shelf(Kept& kept) { return shelf(kept.memory); }
  static bool alive(const State& s, std::int64_t seat, std::int64_t process) {
    return process != 0 && s.seats[index(seat)].process == process;
  }
  static bool kept_here(const State& s, const Kept& kept) {
    return kept.dropped == 0 && alive(s, kept.keeper, kept.keeper_process);
  }
  static int next(const State& s, std::int64_t seat) {
    int r = static_cast<int>(seat);
    do r = (r + 1) % kSeats;
    while (s.seats[index(r)].process == 0);
    return r;
  }

  void visit(const State& s) {
    if (!wrong_.empty()) return;
    const std::string_view bytes(reinterpret_cast<const char*>(&s), sizeof(s));
    if (!seen_.insert(std::hash<std::string_view>{}(bytes)).second) return;
    bool all_put = true, lost = s.broken != 0;
    for (int r = 0; r < kSeats; ++r) {
      const Seat& one = s.seats[index(r)];
      lost = lost || (one.process == 0 && one.counts != 0);
      if (one.process == 0) continue;
      all_put = all_put && (one.put == kPut || (one.put == 1 && !Traits::kPutsEndWithCopies));
      const bool may_put = one.put != kPut && s.broken == 0, may_die = s.deaths < 2;
      if (may_put) put(s, r, false);
      if (may_put && may_die) put(s, r, true);
      if (may_die) die(s, r);
    }
    if ((all_put || !Traits::kWaitsForAll) && !lost && s.step < kLastStep) commit(s);
    if (lost || s.alarms == 0) recover_somehow(s, lost);
  }

  void commit(State s) {
    ++s.step;
    s.commit_of[s.step + 1] = ++s.commits;
    for (Seat& one : s.seats) one.put = 0;
    visit(s);
  }
  void die(State s, int r) {
    ++s.deaths;
    s.seats[index(r)] = {0, 1, 0, 0, 0, 0, -1, {}};  // `counts` until the others have recovered
    visit(s);
  }
  /// All of it, or the half, and the rank dies.
  void put(State s, int r, bool dies) {
    Seat& one = s.seats[index(r)];
    const Content content{s.commit_of[s.step + 1], one.items};
    if (Traits::kAcross && one.put == 0) {
      if (dies) return die(s, r);
      write(shelf(one.own), content, s.step + 1);
      if (one.shelf >= 0) shelf(s.kept[index(one.shelf)]).begin();  // its keeper's part
      one.put = 1;
      return visit(s);
    }
    if (one.shelf < 0) return end_put(s, r);  // it is alone
    const Shelf<Traits> there = shelf(s.kept[index(one.shelf)]);
    std::byte* at = there.begin();
    std::memcpy(at, &content, sizeof(content));
    if (dies) return die(s, r);
    std::memcpy(at + sizeof(content), &content, sizeof(content));
    there.publish(s.step + 1);
    end_put(s, r);
  }
  void end_put(State& s, int r) {
    Seat& one = s.seats[index(r)];
    if (one.puts < 2 && ++one.puts == 2) drop_former(s, r);
    one.put = kPut;
    visit(s);
  }
  static void write(const Shelf<Traits>& there, const Content& content, std::uint64_t version) {
    std::byte* at = there.begin();
    for (int half = 0; half < 2; ++half)
      std::memcpy(at + half * sizeof(content), &content, sizeof(content));
    there.publish(version);
  }
  static void drop_former(State& s, int keeper) {
    for (int i = 0; i < kMostShelves; ++i) {
      Kept& kept = s.kept[index(i)];
      if (kept.keeper == keeper && kept_here(s, kept) && kept.at != 0) kept = kNoShelf;
    }
  }

  /// All of it, or as far as some of the ranks come before another loss; with a joiner or without.
  void recover_somehow(State s, bool lost) {
    if (!lost) ++s.alarms;
    for (int joins = 0; joins <= 1; ++joins) {
      if (joins == 1 && !join(s)) return;
      for (int ends = s.interrupted == 0 ? 1 : kSeats; ends <= kSeats; ends += kSeats - 1) {
        State after = s;
        if (recover(after, ends)) visit(after);
      }
    }
  }
  static bool join(State& s) {
    for (int r = 0; r < kSeats && s.joins == 0; ++r) {
      if (s.seats[index(r)].process != 0) continue;
      s.seats[index(r)] = seat(++s.processes);
      ++s.joins;
      return true;
    }
    return false;
  }

  /// Seats below `ends` come to its end. False: what is lost is lost with its keeper.
  bool recover(State& s, int ends) {
    const std::uint64_t agreed = agree(s);
    for (int r = 0; r < kSeats; ++r) {
      if (s.seats[index(r)].process != 0) move(s, r, agreed);
    }
    // Before anything is dropped: so do the ranks.
    if (ends == kSeats && !check(s, agreed)) return false;
    for (int r = 0; r < ends; ++r) {
      Seat& one = s.seats[index(r)];
      if (one.process == 0) continue;
      one.counts = 1;
      one.agreed = agreed;
      one.puts = 0;
      drop(s, r, agreed);
    }
    s.broken = ends < kSeats ? 1 : 0;
    s.interrupted |= s.broken;
    if (ends == kSeats) go_on(s, agreed);
    return true;
  }

  static std::uint64_t agree(State& s) {
    const auto at_least = [](const Seat& one) { return Traits::kCountsAgreed ? one.agreed : 0; };
    std::vector<Versions> all;
    for (Seat& one : s.seats) {
      if (one.process == 0) continue;
      const std::uint64_t own = Traits::kAcross ? shelf(one.own).newest()
                                : one.shelf < 0 ? 0
                                                : shelf(s.kept[index(one.shelf)]).newest();
      all.push_back({one.counts != 0, std::max(own, at_least(one))});
    }
    for (int i = 0; i < kMostShelves; ++i) {
      Kept& kept = s.kept[index(i)];
      if (!kept_here(s, kept) || kept.at != 0) continue;
      if (alive(s, kept.owner, kept.owner_process)) continue;
      const std::uint64_t least = kept.settled != 0 ? at_least(s.seats[index(kept.keeper)]) : 0;
      const std::uint64_t newest = std::max(shelf(kept).newest(), least);
      all.push_back(
          {!Traits::kAsksWhetherSettled ? true : newest != 0 || kept.settled != 0, newest});
    }
    return agreed_version<Traits>(std::span<const Versions>(all));
  }

  static void move(State& s, int r, std::uint64_t agreed) {
    Seat& one = s.seats[index(r)];
    const int keeper = next(s, r);
    if (Traits::kAcross) shelf(one.own).drop_newer(agreed);
    if (Traits::kAcross && keeper == r) {
      one.shelf = -1;
      return;
    }
    std::int64_t mine = -1;
    for (int i = 0; i < kMostShelves; ++i) {
      const Kept& kept = s.kept[index(i)];
      if (kept_here(s, kept) && kept.keeper == keeper && kept.owner_process == one.process)
        mine = i;
    }
    if (mine < 0) {
      for (mine = 0; s.kept[index(mine)].dropped == 0;) ++mine;
      s.kept[index(mine)] = {r, one.process, keeper, s.seats[index(keeper)].process, 0, 0, 0, {}};
    }
    const Shelf<Traits> there = shelf(s.kept[index(mine)]);
    if (Traits::kAcross) {
      there.drop_newer(agreed);
      if (there.find(agreed) == nullptr) copy(shelf(one.own), there, agreed);
    } else if (one.shelf >= 0 && one.shelf != mine) {
      copy(shelf(s.kept[index(one.shelf)]), there, agreed);
    }
    one.shelf = mine;
    there.drop_newer(agreed);
  }
  static void copy(const Shelf<Traits>& from, const Shelf<Traits>& to, std::uint64_t agreed) {
    const std::byte* whole = from.find(agreed);
    if (whole == nullptr || !Traits::kCopiesToNewKeeper) return;
    std::memcpy(to.begin(), whole, kEntryBytes);
    to.publish(agreed);
  }

  static void drop(State& s, int keeper, std::uint64_t agreed) {
    for (int i = 0; i < kMostShelves; ++i) {
      Kept& kept = s.kept[index(i)];
      if (kept.keeper != keeper || !kept_here(s, kept)) continue;
      const bool lost = kept.at == 0 && !alive(s, kept.owner, kept.owner_process);
      if (lost && Traits::kKeepsLost && shelf(kept).find(agreed) != nullptr) kept.at = agreed;
      const bool present = kept.at == 0 && !lost && next(s, kept.owner) == keeper;
      kept.settled = present ? 1 : kept.settled;
      if (!present && (kept.at == 0 || kept.at != agreed)) kept = kNoShelf;
    }
  }

  void go_on(State& s, std::uint64_t agreed) {
    if (agreed < s.step) fail("more than one step is lost");
    if (agreed == 0) s.commit_of[1] = ++s.commits;
    s.step = agreed == 0 ? 0 : agreed - 1;
    std::vector<int> there;
    for (int r = 0; r < kSeats; ++r) {
      Seat& one = s.seats[index(r)];
      one.items = 0;
      one.counts = one.process != 0;
      one.put = agreed != 0 ? kPut : 0;
      if (one.process != 0) there.push_back(r);
    }
    for (Kept& kept : s.kept) {
      if (!alive(s, kept.keeper, kept.keeper_process)) kept = kNoShelf;
    }
    for (int item = 0; item < kSeats; ++item) {
      s.seats[index(there[index(item) % there.size()])].items |= std::uint64_t{1} << item;
    }
  }

  /// Whether ranks read a version there: not on a shelf that its owner left for another one, nor
  /// what a lost rank had put beyond an agreement.
  static bool is_read(const State& s, const Kept& kept, std::uint64_t version) {
    if (kept.at != 0) return kept.at == version;
    return !alive(s, kept.owner, kept.owner_process) || kept.keeper == next(s, kept.owner);
  }

  /// A version there, or nothing.
  std::optional<Content> read(const Shelf<Traits>& there, std::uint64_t version) {
    const std::byte* whole = there.find(version);
    if (whole == nullptr) return std::nullopt;
    std::array<Content, 2> content{};
    std::memcpy(content.data(), whole, sizeof(content));
    if (std::memcmp(&content[0], &content[1], sizeof(Content)) != 0) fail("a torn version");
    return content[0];
  }
  std::uint64_t items_in(const State& s, const Content& content, std::uint64_t version) {
    if (content.commit != s.commit_of[version]) fail("a version of another past");
    return content.items;
  }

  bool check(State& s, std::uint64_t agreed) {
    std::uint64_t items = 0;
    bool excused = false;
    for (Seat& one : s.seats) {
      if (!Traits::kAcross || one.process == 0 || agreed == 0) continue;
      if (const auto content = read(shelf(one.own), agreed)) items |= items_in(s, *content, agreed);
    }
    for (int i = 0; i < kMostShelves; ++i) {
      Kept& kept = s.kept[index(i)];
      const bool both_lost = !kept_here(s, kept) && !alive(s, kept.owner, kept.owner_process);
      if (kept.dropped == 0 && both_lost) excused = true;
      for (std::uint64_t version = 1; version <= kLastStep + 1 && kept.dropped == 0; ++version) {
        const auto content = read(shelf(kept), version);
        if (!content || version != agreed || !is_read(s, kept, version)) continue;
        if (kept_here(s, kept)) items |= items_in(s, *content, version);
      }
    }
    if (agreed == 0 || items == kAllItems) return true;
    if (!excused) fail("items are lost");
    return false;
  }

  void fail(const char* what) {
    if (wrong_.empty()) wrong_ = what;
  }

  std::string wrong_;
  std::unordered_set<std::size_t> seen_;
};

TEST(Shelf, NoDeathNorJoinAtAnyMomentLosesAVersion) {
  Search<Sound> search;
  EXPECT_EQ(search.run(), "");
  EXPECT_GT(search.states(), 100'000u);
}

struct Across : Sound {
  static constexpr bool kAcross = true;
};

TEST(Shelf, NorAcrossDomains) {
  Search<Across> search;
  EXPECT_EQ(search.run(), "");
  EXPECT_GT(search.states(), 100'000u);
}

struct OneEntry : Sound {
  static constexpr std::uint64_t kEntries = 1;
};
struct NumbersStay : Sound {
  static constexpr bool kClears = false;
};
struct NewerStay : Sound {
  static constexpr bool kDropsNewer = false;
};
struct TheMost : Sound {
  static constexpr bool kLeast = false;
};
struct LostAreDropped : Sound {
  static constexpr bool kKeepsLost = false;
};
struct NobodyWaits : Sound {
  static constexpr bool kWaitsForAll = false;
};
struct KeepersHaveNothing : Sound {
  static constexpr bool kCopiesToNewKeeper = false;
};
struct WhoHasNotPutHasNothing : Sound {
  static constexpr bool kCountsAgreed = false;
};

struct ShelvesCountAtOnce : Sound {
  static constexpr bool kAsksWhetherSettled = false;
};

template <class Mutant>
struct AcrossToo : Mutant {
  static constexpr bool kAcross = true;
};
struct PutsEndAtOnce : Across {
  static constexpr bool kPutsEndWithCopies = false;
};

TEST(Shelf, MutantsAcrossDomainsAreCaught) {
  EXPECT_NE(Search<PutsEndAtOnce>().run(), "");
  EXPECT_NE(Search<AcrossToo<OneEntry>>().run(), "");
  EXPECT_EQ(Search<AcrossToo<NumbersStay>>().run(), "a torn version");
  EXPECT_NE(Search<AcrossToo<NewerStay>>().run(), "");
  EXPECT_NE(Search<AcrossToo<TheMost>>().run(), "");
  EXPECT_EQ(Search<AcrossToo<LostAreDropped>>().run(), "items are lost");
  EXPECT_NE(Search<AcrossToo<KeepersHaveNothing>>().run(), "");
  EXPECT_NE(Search<AcrossToo<WhoHasNotPutHasNothing>>().run(), "");
  EXPECT_NE(Search<AcrossToo<ShelvesCountAtOnce>>().run(), "");
}

TEST(Shelf, MutantsAreCaught) {
  EXPECT_NE(Search<OneEntry>().run(), "");
  EXPECT_EQ(Search<NumbersStay>().run(), "a torn version");
  EXPECT_NE(Search<NewerStay>().run(), "");
  EXPECT_NE(Search<TheMost>().run(), "");
  EXPECT_EQ(Search<LostAreDropped>().run(), "items are lost");
  EXPECT_NE(Search<NobodyWaits>().run(), "");
  EXPECT_NE(Search<KeepersHaveNothing>().run(), "");
  EXPECT_NE(Search<WhoHasNotPutHasNothing>().run(), "");
  EXPECT_NE(Search<ShelvesCountAtOnce>().run(), "");
}

}  // namespace
}  // namespace ferry::protocol
