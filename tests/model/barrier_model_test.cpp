#include "protocol/barrier.hpp"

#include "world.hpp"

namespace ferry::model::barrier_model {
namespace {

using protocol::Barrier;
using protocol::BarrierTraits;
using protocol::Channel;
using protocol::FlagLayout;

/// Each rank writes its cell, all meet, each reads all cells, all meet again, and so on.
template <class Traits = BarrierTraits, class Base = Sound>
Report barrier(const Case& what, std::uint64_t seed = 0) {
  Explorer explorer;
  World<Base> world(explorer, what, {Channel::kBarrier});
  const FlagLayout layout = world.take_flags("flags");
  const Place cell = world.take(sizeof(Generation), "cell");
  return world.run(
      [&](int rank) {
        const Barrier<Traits> mine(layout, rank, world.address(rank, layout.flags));
        auto reach = world.reach(rank);
        DeadlineAnywhere watch;
        auto* const own = reinterpret_cast<Generation*>(world.address(rank, cell));
        for (Generation g = 1; g <= what.generations; ++g) {
          world.explorer().checkpoint(g);
          if (g % 2 == 1) {
            protocol::write(own, g);
          } else {
            for (int peer = 0; peer < what.ranks; ++peer) {
              const auto* theirs = reinterpret_cast<const Generation*>(world.address(peer, cell));
              if (protocol::read(theirs) != g - 1) world.explorer().fail("wrong data on ", theirs);
            }
          }
          mine.arrive(reach, g * 3);  // generations may have gaps
          const Status status = mine.await(g * 3, watch);
          if (!status.ok()) return status;
        }
        return Status{};
      },
      seed);
}

TEST(BarrierModel, IsSound) {
  expect_sound("barrier, 2 ranks, 5 generations, 3 preemptions", barrier({2, 5, false, {3, 0}}));
  expect_sound("barrier, 3 ranks, 4 generations", barrier({3, 4, false, {2, 0}}));
  expect_sound("barrier, 2 ranks, 2 deadlines", barrier({2, 4, false, {2, 2}}));
  expect_sound("barrier, 3 ranks, 1 deadline", barrier({3, 2, false, {2, 1}}));
}

TEST(BarrierModel, IsSoundOnANetwork) {
  expect_sound("barrier, 2 ranks, network, any order",
               barrier({2, 4, true, {.preemptions = 2, .overtakes = kAnyOrder}}));
  expect_sound("barrier, 3 ranks, network, 2 overtakes", barrier({3, 3, true, {2, 0}}));
}

TEST(BarrierModel, RandomSchedulesOfManyRanks) {
  Case large{8, 6, false, {}};
  large.bounds = {.preemptions = 50, .executions = 300};
  const Report report = barrier(large, 20261121);
  EXPECT_TRUE(report.passed) << report.failure << "\n" << report.schedule;
}

struct ConstantValue : BarrierTraits {
  static constexpr std::uint64_t value(Generation) { return 1; }
};
struct SkipsGeneration : BarrierTraits {  // two barriers share one value
  static constexpr std::uint64_t value(Generation generation) { return (generation / 3 + 1) / 2; }
};

TEST(BarrierModel, MutantsAreCaught) {
  const Case memory{3, 4, false, {2, 0}};
  expect_caught("barrier: relaxed publish", barrier<BarrierTraits, RelaxedPublish>(memory));
  expect_caught("barrier: relaxed await", barrier<WithAwait<BarrierTraits, RelaxedAwait>>(memory));
  expect_caught("barrier: ==", barrier<WithAwait<BarrierTraits, EqualAwait>>(memory));
  expect_caught("barrier: last rank not awaited",
                barrier<WithAwait<BarrierTraits, NotTheLastAwait>>(memory));
  expect_caught("barrier: the value does not grow", barrier<ConstantValue>(memory));
  expect_caught("barrier: a generation skipped", barrier<SkipsGeneration>(memory));
}

}  // namespace
}  // namespace ferry::model::barrier_model
