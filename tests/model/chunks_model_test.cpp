// Rows that cross a network in chunks and are passed on by memory: source, forwarder, receiver.
#include "protocol/chunks.hpp"

#include "protocol/delivery.hpp"
#include "protocol/swap.hpp"
#include "world.hpp"

namespace ferry::model::chunks_model {
namespace {

using protocol::Channel;
using protocol::Chunks;
using protocol::ChunkTraits;
using protocol::Delivery;
using protocol::FlagLayout;
using protocol::Swap;
using protocol::SwapLayout;
using protocol::SwapTraits;

constexpr int kForwarder = 0, kReceiver = 1, kSource = 2;  // domains: 0 and 1, 2 alone
constexpr std::uint64_t kChunks = 2;                       // of each generation

/// What the steps around chunks rely on, as parameters.
struct ForwardTraits {
  /// Chunks are counted for ever: a flag that is there from an exchange before is no chunk of this.
  static constexpr std::uint64_t number(Generation g, std::uint64_t chunk) {
    return (g - 1) * kChunks + chunk + 1;
  }
  /// The forwarder says "delivered" when it has passed on all of them.
  static constexpr std::uint64_t passed_on() { return kChunks; }
};

template <class Traits = ChunkTraits, class Base = Sound, class Steps = ForwardTraits,
          class Grant = SwapTraits>
class Forwarding {
 public:
  static Report explore(Case what, std::uint64_t seed = 0) {
    what.ranks = 3;
    what.network = true;
    what.domain_size = 2;
    Explorer explorer;
    World<Base> world(explorer, what, {Channel::kSwap, Channel::kChunk});
    Forwarding scene(world);
    return world.run([&](int rank) { return scene.body(rank); }, seed);
  }

 private:
  explicit Forwarding(World<Base>& world) : world_(world) {
    grants_.message_bytes = sizeof(std::uint64_t);
    grants_.slot_stride = sizeof(std::uint64_t);
    grants_.flags = world.take_flags("swapped");
    grants_.slots = world.take(grants_.slots_bytes(), "slots");
    crossed_ = world.take_flags("crossed");
    delivered_ = world.take_flags("delivered");
    stage_ = world.take(kChunks * bytes(), "stage");
    region_ = world.take(kChunks * bytes(), "region");
  }

  std::uint64_t bytes() const { return world_.what().words * sizeof(std::uint64_t); }
  static Payload row(Generation g, std::uint64_t chunk) {
    return payload(kSource, static_cast<int>(chunk), g);
  }

  Status body(int rank) {
    const Swap<Grant> grant(grants_, rank, world_.address(rank, grants_.slots),
                            world_.address(rank, grants_.flags.flags));
    const Chunks<Traits> chunks(crossed_, rank, world_.address(rank, crossed_.flags));
    const Delivery<> delivery(delivered_, rank, world_.address(rank, delivered_.flags));
    auto reach = world_.reach(rank);
    DeadlineAnywhere watch;
    for (Generation g = 1; g <= world_.what().generations; ++g) {
      world_.explorer().checkpoint(g);
      const std::uint64_t here = rank == kForwarder ? stage_.offset : region_.offset;
      for (int peer = 0; peer < 3; ++peer) grant.post(reach, peer, g, &here);
      if (Status status = grant.await(g, watch); !status.ok()) return status;
      Status status;
      if (rank == kSource) send(chunks, reach, g);
      if (rank == kForwarder) status = forward(chunks, delivery, reach, g, watch);
      if (rank == kReceiver) {
        status = delivery.await_from(kForwarder, g, watch);
        for (std::uint64_t c = 0; status.ok() && c < kChunks; ++c) {
          expect_payload(world_.address(rank, region_.at(c * bytes())), row(g, c),
                         world_.what().words);
        }
      }
      if (!status.ok()) return status;
    }
    return {};
  }

  template <class R>
  void send(const Chunks<Traits>& chunks, R& reach, Generation g) {
    for (std::uint64_t c = 0; c < kChunks; ++c) {
      const std::uint64_t number = Steps::number(g, c);
      const Payload data = row(g, c);
      reach.write(kForwarder, stage_.at(c * bytes()), data.data(), bytes(),
                  Chunks<Traits>::tag(number));
      chunks.send(reach, kForwarder, number, bytes());
    }
  }

  template <class R>
  Status forward(const Chunks<Traits>& chunks, const Delivery<>& delivery, R& reach, Generation g,
                 DeadlineAnywhere& watch) {
    for (std::uint64_t c = 0; c < kChunks; ++c) {
      if (c == Steps::passed_on()) delivery.deliver(reach, kReceiver, g, 0);
      const std::uint64_t number = Steps::number(g, c);
      if (!chunks.arrived(kSource, number)) {
        if (Status status = chunks.await(kSource, number, watch); !status.ok()) return status;
      }
      Payload data{};
      protocol::read_bytes(data.data(), world_.address(kForwarder, stage_.at(c * bytes())),
                           bytes());
      reach.write(kReceiver, region_.at(c * bytes()), data.data(), bytes(), 0);
    }
    if (Steps::passed_on() >= kChunks) delivery.deliver(reach, kReceiver, g, 0);
    return {};
  }

  World<Base>& world_;
  SwapLayout grants_{};
  FlagLayout crossed_{};
  FlagLayout delivered_{};
  Place stage_{};
  Place region_{};
};

TEST(ChunksModel, AreSound) {
  expect_sound("chunks, 2 generations, 1 preemption, 1 overtake",
               Forwarding<>::explore({3, 2, true, {1, 0}, 1}));
  expect_sound("chunks of 2 words, 1 generation, any order",
               Forwarding<>::explore({3, 1, true, {.preemptions = 1, .overtakes = kAnyOrder}, 2}));
  expect_sound("chunks, 2 generations, 1 deadline",
               Forwarding<>::explore({3, 2, true, {.preemptions = 1, .slices = 1}, 1}));
}

struct Uncounted : ChunkTraits {
  static constexpr bool kCounted = false;
};
struct OneTag : ChunkTraits {
  static constexpr std::uint64_t tagged(std::uint64_t) { return 0; }
};
struct NumbersRestart : ForwardTraits {
  static constexpr std::uint64_t number(Generation, std::uint64_t chunk) { return chunk + 1; }
};
struct DeliversBeforeTheLast : ForwardTraits {
  static constexpr std::uint64_t passed_on() { return kChunks - 1; }
};

TEST(ChunksModel, MutantsAreCaught) {
  const Case one{3, 2, true, {.preemptions = 1, .overtakes = 2}, 1};
  const Case two{3, 1, true, {.preemptions = 1, .overtakes = 3}, 2};
  expect_caught("chunks: bytes not counted", Forwarding<Uncounted>::explore(one));
  expect_caught("chunks: one tag for all", Forwarding<OneTag>::explore(two));
  expect_caught("chunks: numbers begin again",
                Forwarding<ChunkTraits, Sound, NumbersRestart>::explore(one));
  expect_caught("chunks: delivered before the last",
                Forwarding<ChunkTraits, Sound, DeliversBeforeTheLast>::explore(one));
  expect_caught("chunks: relaxed await",
                Forwarding<WithAwait<ChunkTraits, RelaxedAwait>>::explore(one));
  expect_caught("chunks: the one before",
                Forwarding<WithAwait<ChunkTraits, PreviousAwait>>::explore(one));
  expect_caught("chunks: any number", Forwarding<WithAwait<ChunkTraits, AnyAwait>>::explore(one));
  expect_caught("chunks: relaxed publish", Forwarding<ChunkTraits, RelaxedPublish>::explore(one));
  expect_caught("chunks: all tags counted together",
                Forwarding<ChunkTraits, CountTogether>::explore(two));
  expect_caught(
      "chunks: grant not awaited",
      Forwarding<ChunkTraits, Sound, ForwardTraits, WithAwait<SwapTraits, PreviousAwait>>::explore(
          one));
}

}  // namespace
}  // namespace ferry::model::chunks_model
