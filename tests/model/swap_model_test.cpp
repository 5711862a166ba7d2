#include "protocol/swap.hpp"

#include "world.hpp"

namespace ferry::model {
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
  expect_sound("2 ranks, 4 generations, 3 preemptions", swap({2, 4, false, {3, 0}}));
  expect_sound("3 ranks, 3 generations", swap({3, 3, false, {2, 0}}));
  expect_sound("2 ranks, 4 generations, deadline", swap({2, 4, false, {2, 2}}));
  expect_sound("3 ranks, 3 generations, deadline", swap({3, 3, false, {2, 1}}));
  expect_sound("2 ranks, 4 generations, network", swap({2, 4, true, {2, 0, 3000000, kAnyOrder}}));
  expect_sound("3 ranks, 3 generations, network", swap({3, 3, true, {2, 0}, 1})); expect_sound("3 ranks, 3 generations, network, 2 words", swap({3, 3, true, {2, 0}}));
  expect_sound("2 ranks, 3 generations, network, deadline", swap({2, 3, true, {2, 1}}));
}

}  // namespace
}  // namespace ferry::model
