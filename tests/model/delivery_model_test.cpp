#include "protocol/delivery.hpp"

#include "protocol/swap.hpp"
#include "world.hpp"

namespace ferry::model::delivery_model {
namespace {

using protocol::Channel;
using protocol::Delivery;
using protocol::DeliveryTraits;
using protocol::FlagLayout;
using protocol::Loan;
using protocol::LoanTraits;
using protocol::Swap;
using protocol::SwapLayout;
using protocol::SwapTraits;

/// A swap of one word for each pair, as the engines use it for grants and descriptors.
template <class Base>
SwapLayout take_swap(World<Base>& world) {
  SwapLayout layout;
  layout.message_bytes = sizeof(std::uint64_t);
  layout.slot_stride = sizeof(std::uint64_t);
  layout.flags = world.take_flags("swapped");
  layout.slots = world.take(layout.slots_bytes(), "slots");
  return layout;
}

/// Push: grants by swap, rows into the granted memory, the same memory in every generation.
template <class Traits = DeliveryTraits, class Base = Sound, class Grant = SwapTraits>
Report push(const Case& what, std::uint64_t seed = 0) {
  Explorer explorer;
  World<Base> world(explorer, what, {Channel::kSwap, Channel::kDelivery});
  const SwapLayout grants = take_swap(world);
  const FlagLayout delivered = world.take_flags("delivered");
  const std::uint64_t bytes = what.words * sizeof(std::uint64_t);
  const Place region = world.take(bytes * static_cast<std::uint64_t>(what.ranks), "region");
  return world.run(
      [&](int rank) {
        const Swap<Grant> grant(grants, rank, world.address(rank, grants.slots),
                                world.address(rank, grants.flags.flags));
        const Delivery<Traits> delivery(delivered, rank, world.address(rank, delivered.flags));
        auto reach = world.reach(rank);
        DeadlineAnywhere watch;
        for (Generation g = 1; g <= what.generations; ++g) {
          world.explorer().checkpoint(g);
          for (int peer = 0; peer < what.ranks; ++peer) {
            const std::uint64_t offset = region.at(bytes * static_cast<std::uint64_t>(peer)).offset;
            grant.post(reach, peer, g, &offset);  // where `peer` may write into our region
          }
          if (Status status = grant.await(g, watch); !status.ok()) return status;
          for (int peer = 0; peer < what.ranks; ++peer) {
            std::uint64_t offset = 0;
            protocol::read_bytes(&offset, grant.message(peer, g), sizeof(offset));
            const Payload row = payload(rank, peer, g);
            reach.write(peer, Place{0, offset}, row.data(), bytes, Delivery<Traits>::tag(g));
            delivery.deliver(reach, peer, g, bytes);
          }
          if (Status status = delivery.await(g, watch); !status.ok()) return status;
          for (int source = 0; source < what.ranks; ++source) {
            const std::byte* row =
                world.address(rank, region.at(bytes * static_cast<std::uint64_t>(source)));
            expect_payload(row, payload(source, rank, g), what.words);
          }
        }
        return Status{};
      },
      seed);
}

/// Pull: descriptors by swap, readers read the owner's memory, give it back, the owner writes
/// again.
template <class Traits = LoanTraits, class Base = Sound>
Report pull(const Case& what, std::uint64_t seed = 0) {
  Explorer explorer;
  World<Base> world(explorer, what, {Channel::kSwap, Channel::kLoan});
  const SwapLayout descriptors = take_swap(world);
  const FlagLayout done = world.take_flags("done");
  const Place rows = world.take(sizeof(Payload), "rows");
  return world.run(
      [&](int rank) {
        const Swap<> describe(descriptors, rank, world.address(rank, descriptors.slots),
                              world.address(rank, descriptors.flags.flags));
        const Loan<Traits> loan(done, rank, world.address(rank, done.flags));
        auto reach = world.reach(rank);
        DeadlineAnywhere watch;
        for (Generation g = 1; g <= what.generations; ++g) {
          world.explorer().checkpoint(g);
          if (g > 1) {
            if (Status status = loan.await(g - 1, watch); !status.ok()) return status;
          }
          const Payload mine = payload(rank, 0, g);
          protocol::write_bytes(world.address(rank, rows), mine.data(), sizeof(mine));
          const std::uint64_t offset = rows.offset;
          for (int peer = 0; peer < what.ranks; ++peer) describe.post(reach, peer, g, &offset);
          if (Status status = describe.await(g, watch); !status.ok()) return status;
          for (int owner = 0; owner < what.ranks; ++owner) {
            std::uint64_t at = 0;
            protocol::read_bytes(&at, describe.message(owner, g), sizeof(at));
            expect_payload(world.address(owner, Place{0, at}), payload(owner, 0, g), 2);
            loan.give_back(reach, owner, g);
          }
        }
        return Status{};
      },
      seed);
}

TEST(DeliveryModel, PushIsSound) {
  expect_sound("push, 2 ranks, 3 generations, 3 preemptions", push({2, 3, false, {3, 0}}));
  expect_sound("push, 3 ranks, 3 generations", push({3, 3, false, {2, 0}}));
  expect_sound("push, 2 ranks, 3 generations, 2 deadlines", push({2, 3, false, {2, 2}}));
  expect_sound("push, 3 ranks, 2 generations, 1 deadline", push({3, 2, false, {2, 1}}));
}

TEST(DeliveryModel, PushIsSoundOnANetwork) {
  expect_sound("push, 2 ranks, 3 generations, any order",
               push({2, 3, true, {.preemptions = 2, .overtakes = kAnyOrder}}));
  expect_sound("push, 3 ranks, 3 generations, 2 overtakes", push({3, 3, true, {2, 0}, 1}));
}

TEST(DeliveryModel, PullIsSound) {
  expect_sound("pull, 2 ranks, 3 generations, 3 preemptions", pull({2, 3, false, {3, 0}}));
  expect_sound("pull, 3 ranks, 3 generations", pull({3, 3, false, {2, 0}}));
  expect_sound("pull, 2 ranks, 3 generations, 2 deadlines", pull({2, 3, false, {2, 2}}));
  expect_sound("pull, 3 ranks, 2 generations, 1 deadline", pull({3, 2, false, {2, 1}}));
}

TEST(DeliveryModel, RandomSchedulesOfManyRanks) {
  Case large{8, 4, false, {}};
  large.bounds = {.preemptions = 50, .executions = 200};
  for (const Report& report : {push(large, 20261121), pull(large, 20261122)}) {
    EXPECT_TRUE(report.passed) << report.failure << "\n" << report.schedule;
  }
}

struct Uncounted : DeliveryTraits {
  static constexpr bool kCounted = false;
};
struct ReturnsEarly : LoanTraits {
  static constexpr std::uint64_t kSlack = 1;
};

TEST(DeliveryModel, MutantsAreCaught) {
  const Case memory{3, 3, false, {2, 0}};
  const Case network{2, 2, true, {2, 0}};
  expect_caught("push: relaxed publish", push<DeliveryTraits, RelaxedPublish>(memory));
  expect_caught("push: relaxed await", push<WithAwait<DeliveryTraits, RelaxedAwait>>(memory));
  expect_caught("push: previous generation",
                push<WithAwait<DeliveryTraits, PreviousAwait>>(memory));
  expect_caught("push: any generation", push<WithAwait<DeliveryTraits, AnyAwait>>(memory));
  expect_caught("push: last source not awaited",
                push<WithAwait<DeliveryTraits, NotTheLastAwait>>(memory));
  expect_caught("push: grant not awaited",
                push<DeliveryTraits, Sound, WithAwait<SwapTraits, PreviousAwait>>(memory));
  expect_caught("push: bytes not counted", push<Uncounted>(network));
  expect_caught("push: all tags counted together", push<DeliveryTraits, CountTogether>(network));
}

TEST(LoanModel, MutantsAreCaught) {
  const Case memory{3, 3, false, {2, 0}};
  expect_caught("pull: relaxed publish", pull<LoanTraits, RelaxedPublish>(memory));
  expect_caught("pull: relaxed await", pull<WithAwait<LoanTraits, RelaxedAwait>>(memory));
  expect_caught("pull: last reader not awaited",
                pull<WithAwait<LoanTraits, NotTheLastAwait>>(memory));
  expect_caught("pull: a generation too early", pull<ReturnsEarly>(memory));
}

}  // namespace
}  // namespace ferry::model::delivery_model
