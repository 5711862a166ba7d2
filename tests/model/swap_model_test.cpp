#include "protocol/swap.hpp"

#include "world.hpp"

namespace ferry::model::swap_model {
namespace {

using protocol::AwaitTraits;
using protocol::Channel;
using protocol::order;
using protocol::Swap;
using protocol::SwapLayout;
using protocol::SwapTraits;

template <class Traits = SwapTraits, class Base = Sound>
Report swap(const Case& what, std::uint64_t seed = 0) {
  Explorer explorer;
  World<Base> world(explorer, what, {Channel::kSwap});
  SwapLayout layout;
  layout.message_bytes = what.words * sizeof(std::uint64_t);
  layout.slot_stride = layout.message_bytes;
  layout.flags = world.take_flags("flags");
  layout.slots = world.take(layout.slots_bytes(), "slots");
  return world.run(
      [&](int rank) {
        const Swap<Traits> mine(layout, rank, world.address(rank, layout.slots),
                                world.address(rank, layout.flags.flags));
        auto reach = world.reach(rank);
        DeadlineAnywhere watch;
        for (Generation g = 1; g <= what.generations; ++g) {
          world.explorer().checkpoint(g);
          for (int peer = 0; peer < what.ranks; ++peer) {
            const Payload message = payload(rank, peer, g);
            mine.post(reach, peer, g, &message);
          }
          const Status status = mine.await(g, watch);
          if (!status.ok()) return status;
          for (int source = 0; source < what.ranks; ++source) {
            expect_payload(mine.message(source, g), payload(source, rank, g), what.words);
          }
        }
        return Status{};
      },
      seed);
}

TEST(SwapModel, IsSound) {
  expect_sound("swap, 2 ranks, 4 generations, 3 preemptions", swap({2, 4, false, {3, 0}}));
  expect_sound("swap, 3 ranks, 3 generations", swap({3, 3, false, {2, 0}}));
}

TEST(SwapModel, IsSoundWhenDeadlinesEndWaits) {
  expect_sound("swap, 2 ranks, 4 generations, 2 deadlines", swap({2, 4, false, {2, 2}}));
  expect_sound("swap, 3 ranks, 2 generations, 1 deadline", swap({3, 2, false, {2, 1}}));
  expect_sound("swap, 2 ranks, network, 1 deadline", swap({2, 3, true, {2, 1}}));
}

TEST(SwapModel, IsSoundOnANetwork) {
  expect_sound("swap, 2 ranks, 4 generations, any order",
               swap({2, 4, true, {.preemptions = 2, .overtakes = kAnyOrder}}));
  expect_sound("swap, 3 ranks, 3 generations, 2 overtakes", swap({3, 3, true, {2, 0}}));
  expect_sound("swap, 3 ranks, 2 generations, 3 overtakes",
               swap({3, 2, true, {.preemptions = 2, .overtakes = 3}}));
}

TEST(SwapModel, RandomSchedulesOfManyRanks) {
  for (const bool network : {false, true}) {
    Case large{network ? 4 : 8, 5, network, {}};
    large.bounds = {.preemptions = 50, .executions = 300, .overtakes = 50};
    const Report report = swap(large, 20261121);
    EXPECT_TRUE(report.passed) << report.failure << "\n" << report.schedule;
  }
}

struct OneSlot : SwapTraits {
  static constexpr std::uint64_t kSlots = 1;
};
struct Uncounted : SwapTraits {
  static constexpr bool kCounted = false;
};

TEST(SwapModel, MutantsAreCaught) {
  const Case memory{3, 3, false, {2, 0}};
  const Case network{2, 3, true, {.preemptions = 2, .overtakes = kAnyOrder}};
  expect_caught("swap: relaxed publish", swap<SwapTraits, RelaxedPublish>(memory));
  expect_caught("swap: relaxed await", swap<WithAwait<SwapTraits, RelaxedAwait>>(memory));
  expect_caught("swap: ==", swap<WithAwait<SwapTraits, EqualAwait>>(memory));
  expect_caught("swap: previous generation", swap<WithAwait<SwapTraits, PreviousAwait>>(memory));
  expect_caught("swap: any generation", swap<WithAwait<SwapTraits, AnyAwait>>(memory));
  expect_caught("swap: last rank not awaited",
                swap<WithAwait<SwapTraits, NotTheLastAwait>>(memory));
  expect_caught("swap: one slot", swap<OneSlot>(memory));
  expect_caught("swap: bytes not counted", swap<Uncounted>(network));
}

// The bookkeeping of counted signals, under swap: the one protocol whose generations overlap.
TEST(CountedSignalModel, MutantsAreCaught) {
  const Case network{2, 3, true, {.preemptions = 2, .overtakes = kAnyOrder}};
  expect_caught("counted: all tags together", swap<SwapTraits, CountTogether>(network));
  expect_caught("counted: nothing", swap<SwapTraits, CountNothing>(network));
  expect_caught("counted: one piece is enough", swap<SwapTraits, CountFirstPiece>(network));
  expect_caught("counted: flags in any order", swap<SwapTraits, AnyOrder>(network));
}

}  // namespace
}  // namespace ferry::model::swap_model
