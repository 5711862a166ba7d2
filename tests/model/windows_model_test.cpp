// Rounds of an all_reduce: domains {0, 1} and {2}, and a share for each domain to own. Ranks read
// each other's windows inside a domain; partial results cross to the owner, results come back.
#include "protocol/windows.hpp"

#include "protocol/chunks.hpp"
#include "world.hpp"

namespace ferry::model::windows_model {
namespace {

using protocol::Channel;
using protocol::Chunks;
using protocol::ChunkTraits;
using protocol::FlagLayout;
using protocol::Windows;
using protocol::WindowTraits;

constexpr int kRanks = 3, kShares = 2;
constexpr std::uint64_t kWord = sizeof(std::uint64_t);

/// What the steps around windows rely on, as parameters.
struct RoundTraits {
  static constexpr bool kMeetsBeforeReading = true;
  static constexpr bool kMeetsBeforeSpreading = true;
  static constexpr bool kAwaitsPartials = true;
  static constexpr bool kAwaitsResults = true;
};

constexpr int domain_of(int rank) {
  return rank / 2;
}
constexpr int owner_of(int share) {
  return share == 0 ? 0 : 2;
}
/// Who handles a share in a domain.
constexpr int handler_of(int share, int domain) {
  return domain == 1 ? 2 : share;
}
constexpr std::uint64_t element(int rank, int share, Generation round) {
  return round * 1000 + static_cast<std::uint64_t>(share) * 100 +
         static_cast<std::uint64_t>(rank * rank + 1);
}

template <class Traits, class Steps, class Crossing, class Base>
class Rounds {
 public:
  static Report explore(Case what, std::uint64_t seed = 0) {
    what.ranks = kRanks;
    what.network = true;
    what.domain_size = 2;
    Explorer explorer;
    World<Base> world(explorer, what, {Channel::kChunk});
    Rounds scene(world);
    return world.run([&](int rank) { return scene.body(rank); }, seed);
  }

 private:
  explicit Rounds(World<Base>& world)
      : world_(world),
        chunks_(world.take_flags("chunks")),
        windows_(world.take(2 * kShares * kWord, "windows")),
        inbox_(world.take(kWord, "inbox")) {}

  /// One rank, from round to round.
  struct Rank {
    int self;
    Chunks<Crossing> chunks;
    typename World<Base>::Reach reach;
    Windows<Traits> windows{};
    std::uint64_t window = 0;
    std::array<std::uint64_t, kRanks> told{};
    std::array<std::uint64_t, kRanks> heard{};
  };

  Status body(int self) {
    Rank rank{self, Chunks<Crossing>(chunks_, self, world_.address(self, chunks_.flags)),
              world_.reach(self)};
    for (Generation round = 1; round <= world_.what().generations; ++round) {
      world_.explorer().checkpoint(round);
      if (Status status = reduce(rank, round); !status.ok()) return status;
      spread(rank, round);
    }
    return {};
  }

  Status reduce(Rank& rank, Generation round) {
    rank.window = rank.windows.next();
    for (int share = 0; share < kShares; ++share) {
      store(rank.self, window(rank, share), element(rank.self, share, round));
    }
    Status status;
    if (Steps::kMeetsBeforeReading) status = meet(rank);
    rank.windows.begin();
    for (int share = 0; status.ok() && share < kShares; ++share) {
      if (handler_of(share, domain_of(rank.self)) != rank.self) continue;
      if (owner_of(share) != rank.self) {
        put(rank, owner_of(share), inbox_, partial(rank, share));
      }
    }
    for (int share = 0; status.ok() && share < kShares; ++share) {
      if (owner_of(share) == rank.self) status = finish(rank, share);
    }
    for (int share = 0; status.ok() && share < kShares; ++share) {
      const bool mine = handler_of(share, domain_of(rank.self)) == rank.self;
      if (mine && owner_of(share) != rank.self && Steps::kAwaitsResults) {
        status = hear(rank, owner_of(share));
      }
    }
    if (status.ok() && Steps::kMeetsBeforeSpreading) status = meet(rank);
    return status;
  }

  /// The owner's part, and back to the handler in the other domain.
  Status finish(Rank& rank, int share) {
    const int peer = handler_of(share, 1 - domain_of(rank.self));
    const std::uint64_t own = partial(rank, share);
    if (Steps::kAwaitsPartials) {
      if (Status status = hear(rank, peer); !status.ok()) return status;
    }
    const std::uint64_t sum = own + load(rank.self, inbox_);
    store(rank.self, window(rank, share), sum);
    put(rank, peer, window(rank, share), sum);
    return {};
  }

  void spread(Rank& rank, Generation round) {
    for (int share = 0; share < kShares; ++share) {
      std::uint64_t expected = 0;
      for (int r = 0; r < kRanks; ++r) expected += element(r, share, round);
      const int at = handler_of(share, domain_of(rank.self));
      if (load(at, window(rank, share)) != expected) {
        world_.explorer().fail("wrong sum on ", world_.address(at, window(rank, share)));
      }
    }
  }

  std::uint64_t partial(Rank& rank, int share) {
    std::uint64_t sum = 0;
    for (int r = 0; r < kRanks; ++r) {
      if (domain_of(r) == domain_of(rank.self)) sum += load(r, window(rank, share));
    }
    return sum;
  }

  Status meet(Rank& rank) {
    for (int r = 0; r < kRanks; ++r) {
      if (r != rank.self && domain_of(r) == domain_of(rank.self)) tell(rank, r, 0);
    }
    for (int r = 0; r < kRanks; ++r) {
      if (r == rank.self || domain_of(r) != domain_of(rank.self)) continue;
      if (Status status = hear(rank, r); !status.ok()) return status;
    }
    return {};
  }
  void put(Rank& rank, int peer, Place to, std::uint64_t value) {
    const std::uint64_t number = rank.told[static_cast<std::size_t>(peer)] + 1;
    rank.reach.write(peer, to, &value, kWord, Chunks<Crossing>::tag(number));
    tell(rank, peer, kWord);
  }
  void tell(Rank& rank, int peer, std::uint64_t bytes) {
    rank.chunks.send(rank.reach, peer, ++rank.told[static_cast<std::size_t>(peer)], bytes);
  }
  Status hear(Rank& rank, int peer) {
    DeadlineAnywhere watch;
    return rank.chunks.await(peer, ++rank.heard[static_cast<std::size_t>(peer)], watch);
  }

  Place window(const Rank& rank, int share) const {
    return windows_.at((rank.window * kShares + static_cast<std::uint64_t>(share)) * kWord);
  }
  void store(int rank, Place at, std::uint64_t value) {
    protocol::write(reinterpret_cast<std::uint64_t*>(world_.address(rank, at)), value);
  }
  std::uint64_t load(int rank, Place at) {
    return protocol::read(reinterpret_cast<const std::uint64_t*>(world_.address(rank, at)));
  }

  World<Base>& world_;
  FlagLayout chunks_;
  Place windows_;
  Place inbox_;
};

template <class Traits = WindowTraits, class Steps = RoundTraits, class Crossing = ChunkTraits,
          class Base = Sound>
Report rounds(const Case& what) {
  return Rounds<Traits, Steps, Crossing, Base>::explore(what);
}

TEST(WindowsModel, AreSound) {
  expect_sound("windows, 3 rounds, 1 preemption, 1 overtake", rounds({3, 3, true, {1, 0}, 1}));
  expect_sound("windows, 2 rounds, 2 preemptions", rounds({3, 2, true, {2, 0}, 1}));
  expect_sound("windows, 2 rounds, any order",
               rounds({3, 2, true, {.preemptions = 1, .overtakes = kAnyOrder}, 1}));
  expect_sound("windows, 2 rounds, 1 deadline",
               rounds({3, 2, true, {.preemptions = 1, .slices = 1}, 1}));
}

struct OneWindow : WindowTraits {
  static constexpr std::uint64_t kWindows = 1;
};
struct ReadsAtOnce : RoundTraits {
  static constexpr bool kMeetsBeforeReading = false;
};
struct SpreadsAtOnce : RoundTraits {
  static constexpr bool kMeetsBeforeSpreading = false;
};
struct FinishesAtOnce : RoundTraits {
  static constexpr bool kAwaitsPartials = false;
};
struct TakesNoResult : RoundTraits {
  static constexpr bool kAwaitsResults = false;
};
struct Uncounted : ChunkTraits {
  static constexpr bool kCounted = false;
};

TEST(WindowsModel, MutantsAreCaught) {
  const Case what{3, 3, true, {.preemptions = 1, .overtakes = 2}, 1};
  expect_caught("windows: one only", rounds<OneWindow>(what));
  expect_caught("windows: read at once", rounds<WindowTraits, ReadsAtOnce>(what));
  expect_caught("windows: spread at once", rounds<WindowTraits, SpreadsAtOnce>(what));
  expect_caught("windows: partials not awaited", rounds<WindowTraits, FinishesAtOnce>(what));
  expect_caught("windows: results not awaited", rounds<WindowTraits, TakesNoResult>(what));
  expect_caught("windows: bytes not counted", rounds<WindowTraits, RoundTraits, Uncounted>(what));
  expect_caught("windows: relaxed await",
                rounds<WindowTraits, RoundTraits, WithAwait<ChunkTraits, RelaxedAwait>>(what));
  expect_caught("windows: the one before",
                rounds<WindowTraits, RoundTraits, WithAwait<ChunkTraits, PreviousAwait>>(what));
  expect_caught("windows: relaxed publish",
                rounds<WindowTraits, RoundTraits, ChunkTraits, RelaxedPublish>(what));
}

}  // namespace
}  // namespace ferry::model::windows_model
