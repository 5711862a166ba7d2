#include <algorithm>

#include "protocol/credit.hpp"
#include "protocol/membership_statement.hpp"
#include "world.hpp"

namespace ferry::model::credit_model {
namespace {

using protocol::await_flag;
using protocol::AwaitTraits;
using protocol::Channel;
using protocol::Credit;
using protocol::CreditLayout;
using protocol::CreditTraits;
using protocol::DropOrder;
using protocol::DropTraits;
using protocol::FlagArray;
using protocol::FlagLayout;

/// How a receiver treats its results.
enum class Use {
  kAtOnce,      // receive g, drop g
  kPipelined,   // send g + 1 before receiving g: both buffers in flight
  kOutOfOrder,  // hold g and g + 1, drop g + 1 first
};

/// Every rank sends a row to every rank, writing without a grant.
template <class Traits = CreditTraits, class Base = Sound, class Drop = DropTraits>
Report credits(const Case& what, Use use, std::uint64_t seed = 0) {
  Explorer explorer;
  World<Base> world(explorer, what, {Channel::kArrival, Channel::kCredit});
  CreditLayout layout;
  layout.arrived = world.take_flags("arrived");
  layout.released = world.take_flags("released");
  const std::uint64_t bytes = what.words * sizeof(std::uint64_t);
  const Place buffers = world.take(2 * bytes * static_cast<std::uint64_t>(what.ranks), "buffers");
  const auto slot = [&](Generation g, int source) {
    return buffers.at(bytes * (Credit<Traits>::buffer(g) * static_cast<std::uint64_t>(what.ranks) +
                               static_cast<std::uint64_t>(source)));
  };
  return world.run(
      [&](int rank) {
        const Credit<Traits> mine(layout, rank, world.address(rank, layout.arrived.flags),
                                  world.address(rank, layout.released.flags));
        auto reach = world.reach(rank);
        DeadlineAnywhere watch;
        const auto send = [&](Generation g) {
          const Payload none{};
          for (int peer = 0; peer < what.ranks; ++peer) {
            const Status status = mine.await_credit(peer, g, watch);
            if (!status.ok()) return status;
            const Payload row = g == 0 ? none : payload(rank, peer, g);
            reach.write(peer, slot(g, rank), row.data(), bytes, Credit<Traits>::tag(g));
            mine.announce(reach, peer, g, bytes);
          }
          return Status{};
        };
        const auto check = [&](Generation g) {
          for (int source = 0; source < what.ranks; ++source) {
            expect_payload(world.address(rank, slot(g, source)), payload(source, rank, g),
                           what.words);
          }
        };
        DropOrder<Drop> order;
        const auto drop = [&](Generation g) {
          if (const Generation upto = order.drop(g); upto > 0) mine.release(reach, upto);
        };
        Status status;
        for (Generation g = 1; g <= what.generations; ++g) {
          world.explorer().checkpoint(g);
          if (status = send(g); !status.ok()) return status;
          if (use == Use::kAtOnce) {
            if (status = mine.await_arrivals(g, watch); !status.ok()) return status;
            check(g);
            drop(g);
          } else if (use == Use::kPipelined && g > 1) {
            if (status = mine.await_arrivals(g - 1, watch); !status.ok()) return status;
            check(g - 1);
            drop(g - 1);
          } else if (use == Use::kOutOfOrder && g % 2 == 0) {
            if (status = mine.await_arrivals(g - 1, watch); !status.ok()) return status;
            if (status = mine.await_arrivals(g, watch); !status.ok()) return status;
            check(g);
            drop(g);
            check(g - 1);
            drop(g - 1);
          }
        }
        return status;
      },
      seed);
}

TEST(CreditModel, IsSound) {
  expect_sound("credit, 2 ranks, 4 generations, 3 preemptions",
               credits({2, 4, false, {3, 0}}, Use::kAtOnce));
  expect_sound("credit, 3 ranks, 3 generations", credits({3, 3, false, {2, 0}}, Use::kAtOnce));
  expect_sound("credit, 2 ranks, 5 generations, pipelined",
               credits({2, 5, false, {2, 0}}, Use::kPipelined));
  expect_sound("credit, 3 ranks, 3 generations, pipelined",
               credits({3, 3, false, {2, 0}}, Use::kPipelined));
  expect_sound("credit, 2 ranks, 4 generations, dropped out of order",
               credits({2, 4, false, {2, 0}}, Use::kOutOfOrder));
  expect_sound("credit, 2 ranks, 4 generations, 2 deadlines",
               credits({2, 4, false, {2, 2}}, Use::kPipelined));
  expect_sound("credit, 3 ranks, 2 generations, 1 deadline",
               credits({3, 2, false, {2, 1}}, Use::kAtOnce));
}

TEST(CreditModel, IsSoundOnANetwork) {
  expect_sound("credit, 2 ranks, 4 generations, any order",
               credits({2, 4, true, {.preemptions = 2, .overtakes = kAnyOrder}, 1}, Use::kAtOnce));
  expect_sound("credit, 2 ranks, 3 generations, pipelined, 4 overtakes",
               credits({2, 3, true, {.preemptions = 2, .overtakes = 4}}, Use::kPipelined));
  expect_sound("credit, 3 ranks, 3 generations, 1 overtake",
               credits({3, 3, true, {.preemptions = 2, .overtakes = 1}, 1}, Use::kAtOnce));
}

TEST(CreditModel, RandomSchedulesOfManyRanks) {
  Case large{8, 5, false, {}};
  large.bounds = {.preemptions = 50, .executions = 200};
  const Report report = credits(large, Use::kPipelined, 20261121);
  EXPECT_TRUE(report.passed) << report.failure << "\n" << report.schedule;
}

struct WiderWindow : CreditTraits {
  static constexpr std::uint64_t kWindow = 3;
};
struct OneBuffer : CreditTraits {
  static constexpr std::uint64_t kBuffers = 1;
};
struct Uncounted : CreditTraits {
  static constexpr bool kCounted = false;
};
struct AnyDrop : DropTraits {
  static constexpr bool kHoldBack = false;
};

TEST(CreditModel, MutantsAreCaught) {
  const Case memory{2, 4, false, {2, 0}};
  const Case network{2, 3, true, {.preemptions = 2, .overtakes = kAnyOrder}};
  const Use use = Use::kPipelined;
  expect_caught("credit: relaxed publish", credits<CreditTraits, RelaxedPublish>(memory, use));
  expect_caught("credit: relaxed await",
                credits<WithAwait<CreditTraits, RelaxedAwait>>(memory, use));
  expect_caught("credit: ==", credits<WithAwait<CreditTraits, EqualAwait>>(memory, use));
  expect_caught("credit: any generation", credits<WithAwait<CreditTraits, AnyAwait>>(memory, use));
  expect_caught("credit: last source not awaited",
                credits<WithAwait<CreditTraits, NotTheLastAwait>>(memory, use));
  expect_caught("credit: one credit dropped", credits<WiderWindow>(memory, use));
  expect_caught("credit: one buffer", credits<OneBuffer>(memory, use));
  expect_caught("credit: released out of order",
                credits<CreditTraits, Sound, AnyDrop>(memory, Use::kOutOfOrder));
  expect_caught("credit: bytes not counted", credits<Uncounted>(network, use));
}

/// Two ranks have used an exchange apart, then regroup: both go on from one generation.
struct RegroupTraits {
  static constexpr Generation first(Generation /*used*/, Generation /*least*/, Generation newest) {
    return protocol::MembershipTraits::after(newest);
  }
};
constexpr Generation kOfNewEpoch = 50;  // in payloads

template <class Traits = RegroupTraits>
Report regroups(const Case& what) {
  Explorer explorer;
  World<Sound> world(explorer, what, {Channel::kArrival, Channel::kCredit});
  CreditLayout layout;
  layout.arrived = world.take_flags("arrived");
  layout.released = world.take_flags("released");
  const FlagLayout offers = world.take_flags("offers");
  const std::uint64_t bytes = what.words * sizeof(std::uint64_t);
  const Place buffers = world.take(4 * bytes, "buffers");
  const auto slot = [&](Generation g, int source) {
    return buffers.at(bytes * (Credit<>::buffer(g) * 2 + static_cast<std::uint64_t>(source)));
  };
  return world.run([&](int rank) {
    const Credit<> mine(layout, rank, world.address(rank, layout.arrived.flags),
                        world.address(rank, layout.released.flags));
    auto reach = world.reach(rank);
    DeadlineAnywhere watch;
    const auto send = [&](Generation g, Generation salt) {
      for (int peer = 0; peer < 2; ++peer) {
        const Status status = mine.await_credit(peer, g, watch);
        if (!status.ok()) return status;
        const Payload row = payload(rank, peer, g + salt);
        reach.write(peer, slot(g, rank), row.data(), bytes, Credit<>::tag(g));
        mine.announce(reach, peer, g, bytes);
      }
      return Status{};
    };
    const auto used = static_cast<Generation>(2 - rank);  // nobody received: masked by the other
    for (Generation g = 1; g <= used; ++g) {
      if (const Status status = send(g, 0); !status.ok()) return status;
    }
    for (int peer = 0; peer < 2; ++peer) reach.publish(peer, {offers.place(rank), used, 0, 0});
    const FlagArray all{world.address(rank, offers.flags), offers.stride, 2};
    Generation least = used, newest = used;
    for (int peer = 0; peer < 2; ++peer) {
      const Status status = await_flag(all[peer], peer, 1, protocol::kAnyAhead, watch);
      if (!status.ok()) return status;
      least = std::min(least, status.seen);
      newest = std::max(newest, status.seen);
    }
    const Generation first = Traits::first(used, least, newest);
    mine.release(reach, first);
    for (Generation g = first + 1; g <= first + 2; ++g) {
      Status status = send(g, kOfNewEpoch);
      if (status.ok()) status = mine.await_arrivals(g, watch);
      if (status.code == Status::Code::kOvertaken) explorer.fail("overtaken in the new epoch");
      if (!status.ok()) return status;
      for (int source = 0; source < 2; ++source) {
        expect_payload(world.address(rank, slot(g, source)), payload(source, rank, g + kOfNewEpoch),
                       what.words);
      }
      mine.release(reach, g);
    }
    return Status{};
  });
}

TEST(CreditModel, AnExchangeGoesOnFromOneGenerationAfterARegroup) {
  expect_sound("regroup, 3 preemptions", regroups({2, 2, false, {3, 0}}));
  expect_sound("regroup, 1 deadline", regroups({2, 2, false, {2, 1}}));
}

struct OwnGeneration : RegroupTraits {
  static constexpr Generation first(Generation used, Generation, Generation) { return used; }
};
struct LeastGeneration : RegroupTraits {
  static constexpr Generation first(Generation, Generation least, Generation) { return least; }
};

TEST(CreditModel, MutantsOfARegroupAreCaught) {
  const Case what{2, 2, false, {2, 0}};
  expect_caught("regroup: each from its own generation", regroups<OwnGeneration>(what));
  expect_caught("regroup: from the least", regroups<LeastGeneration>(what));
}

}  // namespace
}  // namespace ferry::model::credit_model
