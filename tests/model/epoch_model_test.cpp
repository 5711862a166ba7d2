// Two ranks go on without a third in a new epoch: no flag, message or failure broadcast of the old
// one counts in it, whenever the third one writes.
#include "protocol/failure_broadcast.hpp"
#include "protocol/membership_statement.hpp"
#include "protocol/swap.hpp"
#include "world.hpp"

namespace ferry::model::epoch_model {
namespace {

using protocol::await_flag;
using protocol::Channel;
using protocol::FailureBroadcasts;
using protocol::FailureBroadcastTraits;
using protocol::Flag;
using protocol::FlagArray;
using protocol::FlagLayout;
using protocol::kAnyAhead;
using protocol::MembershipTraits;
using protocol::Swap;
using protocol::SwapLayout;
using Kind = protocol::FailureBroadcast::Kind;

constexpr int kLost = 2;
constexpr Generation kOfNewEpoch = 50;  // in payloads

struct EpochTraits {
  using Broadcasts = FailureBroadcastTraits;
  static constexpr bool kHoles = true;
  /// The first generation of the new epoch. `used`: the newest of this rank; `newest`: of both.
  static constexpr Generation first(Generation /*used*/, Generation newest) {
    return MembershipTraits::after(newest);
  }
};

template <class Traits>
struct Places {
  SwapLayout swap;
  FlagLayout broadcasts, offers;
  Place mine;
};

/// The membership in two ranks: both say what they used (protocol/membership.hpp does it for many).
/// 0: the other one did not come.
template <class Traits, class Base>
Generation agree(World<Base>& world, const Places<Traits>& places, int rank, Generation used) {
  auto reach = world.reach(rank);
  for (const int peer : {0, 1}) {
    reach.publish(peer, {places.offers.place(rank), used + 1, 0, 0});  // 0: none yet
  }
  const FlagArray offers{world.address(rank, places.offers.flags), places.offers.stride, 3};
  DeadlineAnywhere deadline;
  Generation newest = 0;
  for (const int peer : {0, 1}) {
    const Status status = await_flag(offers[peer], peer, 1, kAnyAhead, deadline);
    if (!status.ok()) return 0;
    newest = std::max(newest, status.seen - 1);
  }
  return Traits::first(used, newest);
}

template <class Traits = EpochTraits>
Report epochs(const Case& what) {
  Explorer explorer;
  World<Sound> world(explorer, what, {Channel::kSwap});
  Places<Traits> places;
  places.swap.message_bytes = what.words * sizeof(std::uint64_t);
  places.swap.slot_stride = places.swap.message_bytes;
  places.swap.flags = world.take_flags("flags");
  places.swap.slots = world.take(places.swap.slots_bytes(), "slots");
  places.broadcasts = world.take_flags("broadcasts");
  places.offers = world.take_flags("offers");
  places.mine = world.take(sizeof(std::uint64_t), "mine");
  const auto body = [&](int rank) {
    std::array<std::uint8_t, 3> live{1, 1, 1};
    const Swap<> swap(places.swap, rank, world.address(rank, places.swap.slots),
                      world.address(rank, places.swap.flags.flags), live.data());
    const FailureBroadcasts<typename Traits::Broadcasts> broadcasts(
        places.broadcasts, rank, world.address(rank, places.broadcasts.flags),
        reinterpret_cast<std::uint64_t*>(world.address(rank, places.mine)), live.data());
    auto reach = world.reach(rank);
    const auto post = [&](Generation g, Generation salt) {
      for (int peer = 0; peer < what.ranks; ++peer) {
        const Payload message = payload(rank, peer, g + salt);
        if (live[static_cast<std::size_t>(peer)] != 0) swap.post(reach, peer, g, &message);
      }
    };
    Generation used = 0;
    Status status;
    while (used < 2 && status.ok()) {
      post(++used, 0);
      DeadlineAnywhere deadline;
      if (rank != kLost) status = swap.await(used, deadline);  // the lost rank writes when it likes
    }
    if (!status.ok() || rank == kLost) broadcasts.raise(reach, Kind::kLate, kLost, used);
    if (rank == kLost) return Status{};

    const Generation first = agree(world, places, rank, used);
    if (first == 0) return Status{};
    if (Traits::kHoles) live[kLost] = 0;
    for (Generation g = first; g < first + 2; ++g) {
      post(g, kOfNewEpoch);
      DeadlineAnywhere deadline;
      status = swap.await(g, deadline);
      if (status.code == Status::Code::kDeadline && status.peer != kLost) return Status{};
      if (!status.ok()) explorer.fail("waits for a rank that is lost, or was overtaken");
      for (const int source : {0, 1}) {
        expect_payload(swap.message(source, g), payload(source, rank, g + kOfNewEpoch), what.words);
      }
      const auto told = broadcasts.scan(first - 1);
      if (told && told->kind == Kind::kLate)
        explorer.fail("a failure of the old epoch is believed");
    }
    broadcasts.raise(reach, Kind::kFailed, rank, first, first - 1);
    const auto told = broadcasts.scan(first - 1);
    if (!told || told->kind != Kind::kFailed)
      explorer.fail("a failure of the new epoch is not heard");
    return Status{};
  };
  return world.run_without_one(body, [](const auto&) {});
}

TEST(EpochModel, NothingOfTheOldEpochCounts) {
  expect_sound("epochs, 1 deadline", epochs({3, 2, false, {1, 1}}));
  expect_sound("epochs, 2 deadlines", epochs({3, 2, false, {0, 2}, 1}));
}

struct NextOfOwn : EpochTraits {
  static constexpr Generation first(Generation used, Generation) { return used + 1; }
};
struct AwaitsHoles : EpochTraits {
  static constexpr bool kHoles = false;
};
struct BroadcastsOfAnyEpoch : EpochTraits {
  struct Broadcasts : FailureBroadcastTraits {
    static constexpr bool kEpochs = false;
  };
};

TEST(EpochModel, MutantsAreCaught) {
  const Case what{3, 2, false, {2, 1}};
  expect_caught("epochs: each its own next generation", epochs<NextOfOwn>(what));
  expect_caught("epochs: waits for a hole", epochs<AwaitsHoles>(what));
  expect_caught("epochs: broadcasts of any epoch", epochs<BroadcastsOfAnyEpoch>(what));
}

}  // namespace
}  // namespace ferry::model::epoch_model
