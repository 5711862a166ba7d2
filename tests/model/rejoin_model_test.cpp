// Rejoining: ranks that used different generations, that fail and try again, and one that ends in
// the midst.
#include "protocol/rejoin.hpp"

#include "world.hpp"

namespace ferry::model::rejoin_model {
namespace {

using protocol::Channel;
using protocol::Rejoin;
using protocol::RejoinLayout;
using protocol::RejoinTraits;

/// Ranks that have ended say so, in a word of their own at every rank.
template <class Base>
class GoneWatch {
 public:
  GoneWatch(World<Base>& world, const protocol::FlagLayout& ended, int rank, bool polls)
      : flags_{world.address(rank, ended.flags), ended.stride, ended.ranks}, polls_(polls) {}
  std::uint64_t spin_ns() const { return 0; }
  std::uint64_t slice_ns() const { return 0; }
  void awaits(int peer) { peer_ = peer; }
  Status check() {
    Status status;
    const bool gone = flags_[peer_].load(protocol::order::acquire) != 0;
    if (!gone && polls_) return status;
    status.code = gone ? Status::Code::kPeerFailed : Status::Code::kDeadline;
    status.peer = peer_;
    return status;
  }

 private:
  protocol::FlagArray flags_;
  int peer_ = 0;
  bool polls_;  // the end of a slice is no deadline
};

/// `rejoins` times: every rank has used other generations, tries at most `attempts` times, and all
/// that succeed in the last one must have agreed. `ends`: the last rank offers its generation to
/// rank 0 alone and ends. `polls`: ranks poll for the end of others while they wait, and no
/// deadline is over.
template <class Traits = RejoinTraits>
Report rejoin(const Case& what, int rejoins, int attempts, bool ends = false, bool polls = false) {
  Explorer explorer;
  World<Sound> world(explorer, what, {Channel::kOffer, Channel::kAnswer});
  const RejoinLayout layout{world.take_flags("offers"), world.take_flags("answers")};
  const protocol::FlagLayout ended = world.take_flags("ended");
  const auto body = [&](int rank) {
    auto reach = world.reach(rank);
    if (ends && rank == what.ranks - 1) {
      reach.publish(0, {layout.offers.place(rank), 1ull << 48 | 9, 0, 0});
      for (int peer = 0; peer < rank; ++peer) reach.notify(peer, ended.place(rank), 1);
      return Status{Status::Code::kInterrupted, rank, 0, 0};
    }
    Rejoin<Traits> mine(layout, rank, world.address(rank, layout.offers.flags),
                        world.address(rank, layout.answers.flags));
    GoneWatch<Sound> watch(world, ended, rank, polls);
    Status status;
    Generation agreed = 0;
    for (int round = 0; round < rejoins; ++round) {
      const Generation used = agreed + static_cast<Generation>((rank + round) % what.ranks + 1);
      for (int attempt = 0; attempt < attempts; ++attempt) {
        std::array<std::uint8_t, kMaxRanks> absent{};
        status = mine.agree(reach, used, {absent.data(), static_cast<std::size_t>(what.ranks)},
                            watch, agreed);
        if (status.ok()) break;
      }
      if (!status.ok()) return status;
    }
    status.expected = agreed;
    return status;
  };
  const auto finish = [&](const std::array<Status, kMaxRanks>& outcomes) {
    Generation agreed = 0;
    for (int rank = 0; rank < what.ranks; ++rank) {
      const Status& outcome = outcomes[static_cast<std::size_t>(rank)];
      if (!outcome.ok()) {
        if (!ends && (polls || !explorer.slices_used())) explorer.fail("gave up without cause");
        continue;
      }
      if (agreed != 0 && outcome.expected != agreed)
        explorer.fail("ranks go on from different generations");
      agreed = outcome.expected;
    }
  };
  return world.run_without_one(body, finish);
}

TEST(RejoinModel, IsSound) {
  expect_sound("rejoin, 2 ranks, twice", rejoin({2, 0, false, {2, 0}}, 2, 1));
  expect_sound("rejoin, 3 ranks", rejoin({3, 0, false, {2, 0}}, 1, 1));
  expect_sound("rejoin, 2 ranks, 2 deadlines, 3 attempts", rejoin({2, 0, false, {1, 2}}, 1, 3));
  expect_sound("rejoin, 3 ranks, one ends", rejoin({3, 0, false, {1, 1}}, 1, 1, true));
  for (const bool network : {false, true}) {
    expect_sound("rejoin, 2 ranks, twice, waiters poll for ends",
                 rejoin({2, 0, network, {1, 2}}, 2, 1, false, true));
  }
}

struct NoAnswers : RejoinTraits {
  static constexpr bool kAnswers = false;
};
struct NoRounds : RejoinTraits {
  static constexpr bool kRounds = false;
};
struct NoSuccess : RejoinTraits {
  static constexpr bool kSuccess = false;
};
struct OwnGeneration : RejoinTraits {
  static constexpr Generation newer(Generation mine, Generation) { return mine; }
};

TEST(RejoinModel, MutantsAreCaught) {
  expect_caught("rejoin: offers alone", rejoin<NoAnswers>({3, 0, false, {2, 1}}, 1, 1, true));
  expect_caught("rejoin: rounds not told apart", rejoin<NoRounds>({2, 0, false, {2, 0}}, 2, 1));
  expect_caught("rejoin: an offer is no answer",
                rejoin<NoSuccess>({2, 0, true, {1, 2}}, 2, 1, false, true));
  expect_caught("rejoin: each its own", rejoin<OwnGeneration>({2, 0, false, {2, 0}}, 1, 1));
}

}  // namespace
}  // namespace ferry::model::rejoin_model
