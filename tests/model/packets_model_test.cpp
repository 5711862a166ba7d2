// Packets both ways between ranks, through rings of two slots.
#include "protocol/packets.hpp"

#include "world.hpp"

namespace ferry::model::packets_model {
namespace {

using protocol::Channel;
using protocol::Packets;
using protocol::PacketTraits;

struct TwoSlots : PacketTraits {
  static constexpr std::uint64_t kSlots = 2;
  static constexpr std::uint64_t kWindow = 2;
};

/// Every rank sends `generations` packets to every other one, as early as it may: packet n + 1 goes
/// before packet n of the peers is taken. `kTakesEarly`: says so
/// before it has read.
template <class Traits = TwoSlots, class Base = Sound, bool kTakesEarly = false>
Report packets(const Case& what, std::uint64_t seed = 0) {
  Explorer explorer;
  World<Base> world(explorer, what, {Channel::kPacket, Channel::kPacketTaken});
  const auto posted = world.take_flags("posted"), taken = world.take_flags("taken");
  const std::uint64_t bytes = what.words * sizeof(std::uint64_t);
  const auto ranks = static_cast<std::uint64_t>(what.ranks);
  const Place slots = world.take(2 * bytes * ranks, "slots");
  const auto slot = [&](int sender, std::uint64_t n) {
    return slots.at(bytes *
                    (Packets<Traits>::slot(n) * ranks + static_cast<std::uint64_t>(sender)));
  };
  const auto body = [&](int rank) {
    const Packets<Traits> mine(posted, taken, rank, world.address(rank, posted.flags),
                               world.address(rank, taken.flags));
    auto reach = world.reach(rank);
    DeadlineAnywhere watch;
    const auto send = [&](std::uint64_t n) {
      for (int peer = 0; peer < what.ranks; ++peer) {
        if (peer == rank) continue;
        if (!mine.may_write(peer, n)) {
          if (Status status = mine.await_slot(peer, n, watch); !status.ok()) return status;
        }
        const Payload data = payload(rank, peer, n);
        reach.write(peer, slot(rank, n), data.data(), bytes, Packets<Traits>::tag(n));
        mine.post(reach, peer, n, bytes);
      }
      return Status{};
    };
    const auto receive = [&](std::uint64_t n) {
      for (int peer = 0; peer < what.ranks; ++peer) {
        if (peer == rank) continue;
        if (!mine.arrived(peer, n)) {
          if (Status status = mine.await(peer, n, watch); !status.ok()) return status;
        }
        if (kTakesEarly) mine.take(reach, peer, n);
        expect_payload(world.address(rank, slot(peer, n)), payload(peer, rank, n), what.words);
        if (!kTakesEarly) mine.take(reach, peer, n);
      }
      return Status{};
    };
    Status status;
    for (std::uint64_t n = 1; status.ok() && n <= what.generations; ++n) {
      world.explorer().checkpoint(n);
      status = send(n);
      if (status.ok() && n > 1) status = receive(n - 1);
    }
    return status.ok() ? receive(what.generations) : status;
  };
  return world.run(body, seed);
}

TEST(PacketsModel, AreSound) {
  expect_sound("packets, 2 ranks, 4 packets, 1 preemption", packets({2, 4, false, {1, 0}}));
  expect_sound("packets, 2 ranks, 3 packets, 2 preemptions", packets({2, 3, false, {2, 0}, 1}));
  expect_sound("packets, 3 ranks, 2 packets, 0 preemptions", packets({3, 2, false, {0, 0}, 1}));
  expect_sound("packets, 2 ranks, 3 packets, 1 deadline", packets({2, 3, false, {1, 1}, 1}));
  expect_sound("packets, 2 ranks, 3 packets, 2 overtakes",
               packets({2, 3, true, {.preemptions = 1, .overtakes = 2}, 1}));
  expect_sound("packets of 2 words, 2 ranks, 2 packets, 2 overtakes",
               packets({2, 2, true, {.preemptions = 0, .overtakes = 2}}));
}

struct WiderWindow : TwoSlots {
  static constexpr std::uint64_t kWindow = 3;
};
struct Uncounted : TwoSlots {
  static constexpr bool kCounted = false;
};
struct OneTag : TwoSlots {
  static constexpr std::uint64_t tagged(std::uint64_t) { return 0; }
};

TEST(PacketsModel, MutantsAreCaught) {
  const Case memory{2, 4, false, {2, 0}};
  const Case network{2, 3, true, {.preemptions = 1, .overtakes = 3}};
  expect_caught("packets: window wider than the ring", packets<WiderWindow>(memory));
  expect_caught("packets: taken before it was read", packets<TwoSlots, Sound, true>(memory));
  expect_caught("packets: relaxed publish", packets<TwoSlots, RelaxedPublish>(memory));
  expect_caught("packets: relaxed load", packets<WithAwait<TwoSlots, RelaxedAwait>>(memory));
  expect_caught("packets: the one before", packets<WithAwait<TwoSlots, PreviousAwait>>(memory));
  expect_caught("packets: any number", packets<WithAwait<TwoSlots, AnyAwait>>(memory));
  expect_caught("packets: bytes not counted", packets<Uncounted>(network));
  expect_caught("packets: one tag for all", packets<OneTag>(network));
  expect_caught("packets: flags in any order", packets<TwoSlots, AnyOrder>(network));
}

}  // namespace
}  // namespace ferry::model::packets_model
