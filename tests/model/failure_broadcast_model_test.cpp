#include "protocol/failure_broadcast.hpp"

#include "protocol/barrier.hpp"
#include "world.hpp"

namespace ferry::model::failure_broadcast_model {
namespace {

using protocol::Barrier;
using protocol::Channel;
using protocol::FailureBroadcast;
using protocol::FailureBroadcasts;
using protocol::FailureBroadcastTraits;
using protocol::Flag;
using protocol::FlagLayout;
using protocol::order;
using Kind = protocol::FailureBroadcast::Kind;

/// Rank 0 has two threads (fibers 0 and `ranks`) that blame different ranks at once; everybody
/// polls twice. One failure broadcast of rank 0 may exist in the world, and a failure broadcast
/// once seen never changes.
template <class Traits = FailureBroadcastTraits>
Report two_threads(const Case& what) {
  Explorer explorer;
  World<Sound> world(explorer, what, {}, what.ranks + 1);
  const FlagLayout layout = world.take_flags("broadcasts");
  const Place mine = world.take(sizeof(std::uint64_t), "mine");
  return world.run([&](int fiber) {
    const int rank = fiber % what.ranks;
    const FailureBroadcasts<Traits> broadcasts(
        layout, rank, world.address(rank, layout.flags),
        reinterpret_cast<std::uint64_t*>(world.address(rank, mine)));
    auto reach = world.reach(rank);
    if (rank == 0) {
      const int culprit = fiber == 0 ? 1 : 2;
      const FailureBroadcast spread = broadcasts.raise(reach, Kind::kFailed, culprit, 7);
      const std::optional<FailureBroadcast> seen = broadcasts.scan();
      if (!seen || seen->culprit != spread.culprit)
        world.explorer().fail("two broadcasts of rank 0");
      return Status{};
    }
    const std::optional<FailureBroadcast> first = broadcasts.scan();
    const std::optional<FailureBroadcast> second = broadcasts.scan();
    if (first && !(second && *first == *second)) world.explorer().fail("a broadcast changed");
    return Status{};
  });
}

/// Asks the failure broadcasts when a slice ends, as the engines do: a failure broadcast names the
/// culprit.
template <class Traits>
struct FailureBroadcastWatch {
  const FailureBroadcasts<Traits>* broadcasts;
  std::uint64_t spin_ns() { return 0; }
  std::uint64_t slice_ns() { return 0; }
  Status check() {
    Status status;
    if (const std::optional<FailureBroadcast> broadcast = broadcasts->scan()) {
      status.code = Status::Code::kPeerFailed;
      status.peer = broadcast->culprit;
    }
    return status;
  }
};

/// Rank 0 died. The last rank finds out; the others wait in a barrier until a failure broadcast
/// tells them. Rank 1 also suspects rank 2 of being late, which is no reason to believe it.
template <class Traits = FailureBroadcastTraits>
Report death(const Case& what) {
  Explorer explorer;
  World<Sound> world(explorer, what, {});
  const FlagLayout flags = world.take_flags("flags");
  const FlagLayout layout = world.take_flags("broadcasts");
  const Place mine = world.take(sizeof(std::uint64_t), "mine");
  const int last = what.ranks - 1;
  const auto finish = [&](const std::array<Status, kMaxRanks>& outcomes) {
    for (int rank = 2; rank < what.ranks; ++rank) {
      const Status& outcome = outcomes[static_cast<std::size_t>(rank)];
      if (outcome.code != Status::Code::kPeerFailed || outcome.peer != 0) {
        explorer.fail("a survivor does not name the rank that died");
      }
    }
    for (int rank = 1; rank < what.ranks; ++rank) {  // in the end all believe the same
      const FailureBroadcasts<Traits> broadcasts(layout, rank, world.address(rank, layout.flags),
                                                 nullptr);
      const std::optional<FailureBroadcast> broadcast = broadcasts.scan();
      if (!broadcast || broadcast->culprit != 0)
        explorer.fail("a broadcast did not reach every rank");
    }
  };
  return world.run_without_one(
      [&](int rank) {
        if (rank == 0) return Status{};
        const FailureBroadcasts<Traits> broadcasts(
            layout, rank, world.address(rank, layout.flags),
            reinterpret_cast<std::uint64_t*>(world.address(rank, mine)));
        auto reach = world.reach(rank);
        const Barrier<> barrier(flags, rank, world.address(rank, flags.flags));
        barrier.arrive(reach, 1);
        if (rank == 1) broadcasts.raise(reach, Kind::kLate, 2, 1);
        if (rank == last) broadcasts.raise(reach, Kind::kDied, 0, 1);
        FailureBroadcastWatch<Traits> watch{&broadcasts};
        if (rank == 1) {  // its own suspicion is out: it waits for the truth alone
          return Flag{reinterpret_cast<std::uint64_t*>(world.address(rank, layout.place(last)))}
              .wait_until([](std::uint64_t word) { return word != 0; }, watch, order::relaxed);
        }
        return barrier.await(1, watch);
      },
      finish);
}

TEST(FailureBroadcastModel, IsSound) {
  expect_sound("failure broadcast, 2 threads of rank 0, 2 ranks, 3 preemptions",
               two_threads({2, 1, false, {3, 0}}));
  expect_sound("failure broadcast, 2 threads of rank 0, 3 ranks",
               two_threads({3, 1, false, {2, 0}}));
  expect_sound("failure broadcast, rank 0 of 3 died", death({3, 1, false, {2, 0}}));
}

struct LastWins : FailureBroadcastTraits {
  static constexpr bool kFirstWins = false;
};
struct NotToTheLast : FailureBroadcastTraits {
  static constexpr int told(int ranks) { return ranks - 1; }
};
struct OnlyTheFirst : FailureBroadcastTraits {
  static constexpr int scanned(int) { return 1; }
};
struct Weakest : FailureBroadcastTraits {
  static constexpr bool stronger(const FailureBroadcast& a, const FailureBroadcast& b) {
    return b.kind == Kind::kNone || a.kind < b.kind;
  }
};
struct FirstFound : FailureBroadcastTraits {
  static constexpr bool stronger(const FailureBroadcast&, const FailureBroadcast& b) {
    return b.kind == Kind::kNone;
  }
};

TEST(FailureBroadcastModel, MutantsAreCaught) {
  const Case three{3, 1, false, {2, 0}};
  expect_caught("failure broadcast: the last one wins", two_threads<LastWins>(three));
  expect_caught("failure broadcast: the last rank is not told", death<NotToTheLast>(three));
  expect_caught("failure broadcast: reporters overlooked", death<OnlyTheFirst>(three));
  expect_caught("failure broadcast: the weakest believed", death<Weakest>(three));
  expect_caught("failure broadcast: the lowest reporter believed", death<FirstFound>(three));
}

TEST(FailureBroadcast, PacksAndUnpacks) {
  const std::uint64_t word = protocol::pack_broadcast(Kind::kDied, 71, 123456789);
  const FailureBroadcast broadcast = protocol::unpack_broadcast(word, 5);
  EXPECT_EQ(broadcast, (FailureBroadcast{Kind::kDied, 71, 5, 123456789}));
  EXPECT_NE(protocol::pack_broadcast(Kind::kLate, 0, 0), 0u);
}

}  // namespace
}  // namespace ferry::model::failure_broadcast_model
