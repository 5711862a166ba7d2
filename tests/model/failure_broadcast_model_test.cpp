#include "protocol/failure_broadcast.hpp"

#include "protocol/barrier.hpp"
#include "world.hpp"

namespace ferry::model {
namespace {

using protocol::Barrier;
using protocol::Channel;
using protocol::Flag;
using protocol::FlagLayout;
using protocol::Notice;
using protocol::Notices;
using protocol::NoticeTraits;
using protocol::order;
using Kind = protocol::Notice::Kind;

/// Rank 0 has two threads (fibers 0 and `ranks`) that blame different ranks at once; everybody
/// looks twice. One notice of rank 0 may exist in the world, and a notice once seen never changes.
template <class Traits = NoticeTraits>
Report two_threads(const Case& what) {
  Explorer explorer;
  World<Sound> world(explorer, what, {}, what.ranks + 1);
  const FlagLayout layout = world.take_flags("notices");
  const Place mine = world.take(sizeof(std::uint64_t), "mine");
  return world.run([&](int fiber) {
    const int rank = fiber % what.ranks;
    const Notices<Traits> notices(layout, rank, world.address(rank, layout.flags),
                                  reinterpret_cast<std::uint64_t*>(world.address(rank, mine)));
    auto reach = world.reach(rank);
    if (rank == 0) {
      const int culprit = fiber == 0 ? 1 : 2;
      const Notice spread = notices.raise(reach, Kind::kFailed, culprit, 7);
      const std::optional<Notice> seen = notices.scan();
      if (!seen || seen->culprit != spread.culprit) world.explorer().fail("two notices of rank 0");
      return Status{};
    }
    const std::optional<Notice> first = notices.scan();
    const std::optional<Notice> second = notices.scan();
    if (first && !(second && *first == *second)) world.explorer().fail("a notice changed");
    return Status{};
  });
}

/// Asks the notices when a slice ends, as the engines do: a notice names the culprit.
template <class Traits>
struct NoticeWatch {
  const Notices<Traits>* notices;
  std::uint64_t spin_ns() { return 0; }
  std::uint64_t slice_ns() { return 0; }
  Status check() {
    Status status;
    if (const std::optional<Notice> notice = notices->scan()) {
      status.code = Status::Code::kPeerFailed;
      status.peer = notice->culprit;
    }
    return status;
  }
};

/// Rank 0 died. The last rank finds out; the others wait in a barrier until a notice tells them.
/// Rank 1 also suspects rank 2 of being late, which is no reason to believe it.
template <class Traits = NoticeTraits>
Report death(const Case& what) {
  Explorer explorer;
  World<Sound> world(explorer, what, {});
  const FlagLayout flags = world.take_flags("flags");
  const FlagLayout layout = world.take_flags("notices");
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
      const Notices<Traits> notices(layout, rank, world.address(rank, layout.flags), nullptr);
      const std::optional<Notice> notice = notices.scan();
      if (!notice || notice->culprit != 0) explorer.fail("a notice did not reach every rank");
    }
  };
  return world.run_without_one(
      [&](int rank) {
        if (rank == 0) return Status{};
        const Notices<Traits> notices(layout, rank, world.address(rank, layout.flags),
                                      reinterpret_cast<std::uint64_t*>(world.address(rank, mine)));
        auto reach = world.reach(rank);
        const Barrier<> barrier(flags, rank, world.address(rank, flags.flags));
        barrier.arrive(reach, 1);
        if (rank == 1) notices.raise(reach, Kind::kLate, 2, 1);
        if (rank == last) notices.raise(reach, Kind::kDied, 0, 1);
        NoticeWatch<Traits> watch{&notices};
        if (rank == 1) {  // its own suspicion is out: it waits for the truth alone
          return Flag{reinterpret_cast<std::uint64_t*>(world.address(rank, layout.place(last)))}
              .wait_until([](std::uint64_t word) { return word != 0; }, watch, order::relaxed);
        }
        return barrier.await(1, watch);
      },
      finish);
}

TEST(NoticeModel, IsSound) {
  expect_sound("notice, 2 threads of rank 0, 2 ranks, 3 preemptions",
               two_threads({2, 1, false, {3, 0}}));
  expect_sound("notice, 2 threads of rank 0, 3 ranks", two_threads({3, 1, false, {2, 0}}));
  expect_sound("notice, rank 0 of 3 died", death({3, 1, false, {2, 0}}));
}

struct LastWins : NoticeTraits {
  static constexpr bool kFirstWins = false;
};
struct NotToTheLast : NoticeTraits {
  static constexpr int told(int ranks) { return ranks - 1; }
};
struct OnlyTheFirst : NoticeTraits {
  static constexpr int scanned(int) { return 1; }
};
struct Weakest : NoticeTraits {
  static constexpr bool stronger(const Notice& a, const Notice& b) {
    return b.kind == Kind::kNone || a.kind < b.kind;
  }
};
struct FirstFound : NoticeTraits {
  static constexpr bool stronger(const Notice&, const Notice& b) { return b.kind == Kind::kNone; }
};

TEST(NoticeModel, MutantsAreCaught) {
  const Case three{3, 1, false, {2, 0}};
  expect_caught("notice: the last one wins", two_threads<LastWins>(three));
  expect_caught("notice: the last rank is not told", death<NotToTheLast>(three));
  expect_caught("notice: reporters overlooked", death<OnlyTheFirst>(three));
  expect_caught("notice: the weakest believed", death<Weakest>(three));
  expect_caught("notice: the lowest reporter believed", death<FirstFound>(three));
}

TEST(Notice, PacksAndUnpacks) {
  const std::uint64_t word = protocol::pack_notice(Kind::kDied, 71, 123456789);
  const Notice notice = protocol::unpack_notice(word, 5);
  EXPECT_EQ(notice, (Notice{Kind::kDied, 71, 5, 123456789}));
  EXPECT_NE(protocol::pack_notice(Kind::kLate, 0, 0), 0u);
}

}  // namespace
}  // namespace ferry::model
