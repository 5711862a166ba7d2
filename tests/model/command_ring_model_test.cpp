// Commands from several producers through a ring that is smaller than what they make.
#include "protocol/command_ring.hpp"

#include "world.hpp"

namespace ferry::model::command_ring_model {
namespace {

using protocol::Command;
using protocol::CommandRing;
using protocol::CommandRingTraits;
using protocol::CommandSlot;
using protocol::order;

constexpr std::uint64_t kSlots = 2;
constexpr int kProducers = 2, kConsumer = 2;

Command command(std::uint64_t number) {
  return {Command::Kind::put, number + 1, number + 2, number + 3, number + 4};
}

/// Producers make the commands in turn, as blocks of a kernel do that is started when there is
/// room; the consumer takes them in order.
template <class Traits = CommandRingTraits>
Report commands(const Case& given, std::uint64_t seed = 0) {
  Case what = given;
  what.ranks = kProducers + 1;
  Explorer explorer;
  World<Sound> world(explorer, what, {});
  const Place slots = world.take(kSlots * sizeof(CommandSlot), "slots");
  const Place taken = world.take(sizeof(std::uint64_t), "taken");
  return world.run(
      [&](int rank) {
        const CommandRing<Traits> ring(
            reinterpret_cast<CommandSlot*>(world.address(kConsumer, slots)), kSlots,
            reinterpret_cast<std::uint64_t*>(world.address(kConsumer, taken)));
        DeadlineAnywhere watch;
        Status status;
        for (std::uint64_t n = 0; n < what.generations && status.ok(); ++n) {
          if (rank == kConsumer) {
            Command got;
            status = ring.await(n, got, watch);
            if (status.ok() && got != command(n)) explorer.fail("took another command");
          } else if (static_cast<int>(n % kProducers) == rank) {
            status = ring.await_room(n, watch);
            if (status.ok()) ring.post(n, command(n));
          }
        }
        return status;
      },
      seed);
}

TEST(CommandRingModel, IsSound) {
  expect_sound("command ring, 6 commands", commands({.generations = 6, .bounds = {2, 0}}));
  expect_sound("command ring, 4 commands, 3 preemptions",
               commands({.generations = 4, .bounds = {3, 0}}));
  expect_sound("command ring, 4 commands, 1 deadline",
               commands({.generations = 4, .bounds = {2, 1}}));
}

struct RelaxedPost : CommandRingTraits {
  static constexpr order kPost = order::relaxed;
};
struct RelaxedPoll : CommandRingTraits {
  static constexpr order kPoll = order::relaxed;
};
struct RelaxedTaken : CommandRingTraits {
  static constexpr order kTaken = order::relaxed;
};
struct RelaxedRoom : CommandRingTraits {
  static constexpr order kRoom = order::relaxed;
};
struct OneTooMany : CommandRingTraits {
  static constexpr std::uint64_t kSpare = 1;
};
struct AnyLap : CommandRingTraits {
  FERRY_FN static constexpr bool is(std::uint64_t word, std::uint64_t) { return word != 0; }
};

TEST(CommandRingModel, MutantsAreCaught) {
  const Case what{.generations = 5, .bounds = {2, 0}};
  expect_caught("command ring: relaxed post", commands<RelaxedPost>(what));
  expect_caught("command ring: relaxed poll", commands<RelaxedPoll>(what));
  expect_caught("command ring: relaxed taken", commands<RelaxedTaken>(what));
  expect_caught("command ring: relaxed room", commands<RelaxedRoom>(what));
  expect_caught("command ring: one command too many", commands<OneTooMany>(what));
  expect_caught("command ring: any lap", commands<AnyLap>(what));
}

}  // namespace
}  // namespace ferry::model::command_ring_model
