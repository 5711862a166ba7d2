// The store and its clients in memory: no sockets, no clock but the test's.
#include <gtest/gtest.h>

#include <algorithm>
#include <chrono>
#include <memory>
#include <random>

#include "bootstrap/store_client.hpp"
#include "bootstrap/store_server.hpp"
#include "bootstrap/test_ranks.hpp"

namespace ferry::bootstrap {
namespace {

using namespace std::chrono_literals;
using State = StoreClient::State;

Nonce numbered_nonce(int n) {
  return sha256(bytes_of("nonce " + std::to_string(n)));
}

// A store and its clients, joined by wires that cut the bytes into random pieces.
class World {
 public:
  explicit World(int size, unsigned seed = 1)
      : server({.size = size, .secret = "secret", .nonce = [this] { return next_nonce(); }}),
        size_(size),
        random_(seed) {}

  struct Wire {
    StoreServer::Connection id = 0;
    std::unique_ptr<StoreClient> client;
  };

  Wire& dial(int rank, int size = 0, const std::string& secret = "secret") {
    wires_.push_back(std::make_unique<Wire>());
    Wire& wire = *wires_.back();
    wire.id = server.open(now);
    wire.client = std::make_unique<StoreClient>(StoreClient::Config{
        .rank = rank, .size = size ? size : size_, .secret = secret, .nonce = next_nonce()});
    return wire;
  }
  void hang_up(Wire& wire) { server.forget(wire.id); }

  // Moves bytes until none move any more.
  void settle() {
    for (bool moved = true; moved;) {
      moved = false;
      std::shuffle(wires_.begin(), wires_.end(), random_);
      for (auto& wire : wires_) {
        FrameQueue& up = wire->client->output();
        if (!up.empty()) {
          const auto piece = some_of(up.front());
          server.receive(wire->id, piece);
          up.written(piece.size());
          moved = true;
        }
        const auto down = some_of(server.output(wire->id));
        if (!down.empty()) {
          wire->client->receive(std::vector<std::byte>(down.begin(), down.end()));
          server.written(wire->id, down.size());
          moved = true;
        }
      }
    }
  }

  StoreServer server;
  StoreServer::TimePoint now{};

 private:
  Nonce next_nonce() { return numbered_nonce(nonces_++); }
  std::span<const std::byte> some_of(std::span<const std::byte> bytes) {
    if (bytes.empty()) return bytes;
    return bytes.first(std::min(bytes.size(), std::size_t(1 + random_() % 40)));
  }

  int size_;
  int nonces_ = 0;
  std::mt19937 random_;
  std::vector<std::unique_ptr<Wire>> wires_;
};

std::vector<World::Wire*> all_joined(World& world, int size) {
  std::vector<World::Wire*> wires;
  for (int r = 0; r < size; ++r) wires.push_back(&world.dial(r));
  world.settle();
  for (auto* wire : wires) EXPECT_EQ(wire->client->state(), State::joined);
  return wires;
}

TEST(Store, GathersHoweverTheBytesAreCut) {
  for (unsigned seed = 1; seed <= 30; ++seed) {
    World world(4, seed);
    auto wires = all_joined(world, 4);
    for (int round = 0; round < 5; ++round) {
      for (int r = 0; r < 4; ++r) {
        wires[std::size_t(r)]->client->give(bytes_of(std::string(std::size_t(r * round), 'x')));
      }
      world.settle();
      for (auto* wire : wires) {
        ASSERT_TRUE(wire->client->complete()) << "seed " << seed;
        const auto parts = wire->client->take();
        for (int r = 0; r < 4; ++r) EXPECT_EQ(parts[std::size_t(r)].size(), std::size_t(r * round));
      }
    }
  }
}

TEST(Store, RefusesWithTheReason) {
  World world(2);
  auto wires = all_joined(world, 2);
  const auto code = [&](int rank, int size, const std::string& secret) {
    auto& visitor = world.dial(rank, size, secret);
    world.settle();
    EXPECT_EQ(visitor.client->state(), State::refused);
    EXPECT_EQ(world.server.fate(visitor.id), StoreServer::Fate::ending);
    const RefusalCode got =
        visitor.client->refusal() ? visitor.client->refusal()->code : RefusalCode::none;
    world.hang_up(visitor);
    return got;
  };
  EXPECT_EQ(code(1, 2, "guess"), RefusalCode::wrong_secret);
  EXPECT_EQ(code(1, 3, "guess"), RefusalCode::wrong_secret);  // a stranger learns nothing else
  EXPECT_EQ(code(1, 3, "secret"), RefusalCode::other_size);
  EXPECT_EQ(code(5, 2, "secret"), RefusalCode::rank_out_of_range);
  EXPECT_EQ(code(1, 2, "secret"), RefusalCode::rank_taken);
  wires[1]->client->leave(Farewell::left);
  world.settle();
  EXPECT_EQ(code(1, 2, "secret"), RefusalCode::rank_gone);
  EXPECT_FALSE(world.server.failed());
}

TEST(Store, AClientKnowsAnImpostor) {
  // It guesses nothing right, but says welcome.
  StoreClient client({.rank = 1, .size = 2, .secret = "secret", .nonce = numbered_nonce(0)});
  FrameQueue impostor;
  impostor.push({.type = FrameType::challenge}, std::vector<std::byte>(32));
  impostor.push({.type = FrameType::welcome}, std::vector<std::byte>(32));
  while (!impostor.empty()) {
    client.receive(impostor.front());
    impostor.written(impostor.front().size());
  }
  EXPECT_EQ(client.state(), State::impostor);
}

TEST(Store, AProofCannotBeReplayed) {
  // What one connection said is worth nothing on another: the store's nonce is new.
  World world(2);
  StoreClient client({.rank = 1, .size = 2, .secret = "secret", .nonce = numbered_nonce(77)});
  const auto id = world.server.open(world.now);
  std::vector<std::byte> said;
  for (int step = 0; step < 8; ++step) {
    while (!client.output().empty()) {
      const auto piece = client.output().front();
      said.insert(said.end(), piece.begin(), piece.end());
      world.server.receive(id, piece);
      client.output().written(piece.size());
    }
    const auto down = world.server.output(id);
    const std::vector<std::byte> copy(down.begin(), down.end());
    client.receive(copy);
    world.server.written(id, copy.size());
  }
  ASSERT_EQ(client.state(), State::joined);
  world.server.receive(id, {});
  const auto replay = world.server.open(world.now);
  world.server.receive(replay, said);
  EXPECT_EQ(world.server.fate(replay), StoreServer::Fate::ending);  // refused: wrong secret
}

TEST(Store, ADeadRankIsNamedToEverybody) {
  for (bool giving : {false, true}) {
    World world(3);
    auto wires = all_joined(world, 3);
    if (giving) wires[0]->client->give(bytes_of("x"));
    world.settle();
    world.hang_up(*wires[1]);
    world.settle();
    for (int r : {0, 2}) {
      const auto& failure = wires[std::size_t(r)]->client->failure();
      ASSERT_TRUE(failure);
      EXPECT_EQ(failure->kind, FailureKind::died);
      EXPECT_EQ(failure->peer, 1u);
    }
    auto& late = world.dial(1);
    world.settle();
    ASSERT_TRUE(late.client->refusal());
    EXPECT_EQ(late.client->refusal()->code, RefusalCode::rank_gone);
  }
}

TEST(Store, LeavingAfterTheLastGatherIsNoFailure) {
  World world(2);
  auto wires = all_joined(world, 2);
  for (auto* wire : wires) wire->client->give(bytes_of("x"));
  world.settle();
  EXPECT_TRUE(wires[0]->client->complete());
  wires[1]->client->leave(Farewell::left);
  world.settle();
  world.hang_up(*wires[1]);
  EXPECT_FALSE(world.server.failed());
  wires[0]->client->take();
  wires[0]->client->give(bytes_of("y"));
  world.settle();
  ASSERT_TRUE(wires[0]->client->failure());
  EXPECT_EQ(wires[0]->client->failure()->kind, FailureKind::left);
  EXPECT_EQ(wires[0]->client->failure()->peer, 1u);
}

TEST(Store, AskingNamesWhoIsAbsentAndWhoIsSilent) {
  World world(4);
  auto& zero = world.dial(0);
  world.dial(2);
  world.dial(3, 4, "guess");
  world.settle();
  zero.client->give({});
  world.settle();
  zero.client->ask();
  world.settle();
  const auto& absences = zero.client->absences();
  ASSERT_TRUE(absences);
  EXPECT_EQ(absences->absent.listed, (std::vector<int>{1, 3}));
  EXPECT_EQ(absences->silent.listed, (std::vector<int>{2}));
  EXPECT_EQ(absences->refused, 1u);
  EXPECT_EQ(absences->last_refusal, RefusalCode::wrong_secret);
  EXPECT_EQ(absences->first(), 1);
}

TEST(Store, GivingUpIsToldToEverybody) {
  World world(3);
  auto& zero = world.dial(0);
  auto& two = world.dial(2);
  world.settle();
  zero.client->give({});
  two.client->give({});
  world.settle();
  zero.client->leave(Farewell::deadline);
  world.settle();
  ASSERT_TRUE(two.client->failure());
  EXPECT_EQ(two.client->failure()->kind, FailureKind::deadline);
  EXPECT_EQ(two.client->failure()->peer, 1u);
  EXPECT_EQ(two.client->failure()->by, 0u);
  auto& late = world.dial(1);
  world.settle();
  ASSERT_TRUE(late.client->refusal());
  EXPECT_EQ(late.client->refusal()->code, RefusalCode::group_over);
  EXPECT_EQ(late.client->refusal()->got, 0u);
}

TEST(Store, ManyMissingRanksFitOneFrame) {
  World world(5000);
  auto& zero = world.dial(0);
  world.settle();
  zero.client->give({});
  zero.client->ask();
  world.settle();
  ASSERT_TRUE(zero.client->absences());
  EXPECT_EQ(zero.client->absences()->absent.total, 4999u);
  EXPECT_EQ(zero.client->absences()->absent.listed.size(), RankList::kListed);
}

// A rank that skips a gather, or gives twice: forged with the right keys, as a bug would do it.
TEST(Store, AWrongSequenceNamesTheRank) {
  for (std::uint64_t wrong : {std::uint64_t(1), std::uint64_t(0)}) {
    World world(2);
    auto& zero = world.dial(0);
    auto& one = world.dial(1);
    world.settle();
    if (wrong == 0) one.client->give(bytes_of("first"));
    one.client->output().push({.type = FrameType::give, .sequence = wrong, .rank = 1}, {});
    world.settle();
    ASSERT_TRUE(zero.client->failure());
    EXPECT_EQ(zero.client->failure()->kind, FailureKind::wrong_sequence);
    EXPECT_EQ(zero.client->failure()->peer, 1u);
    EXPECT_EQ(zero.client->failure()->got, wrong);
  }
}

TEST(Store, ARankMaySpeakForItselfOnly) {
  World world(2);
  auto wires = all_joined(world, 2);
  wires[1]->client->output().push({.type = FrameType::give, .rank = 0}, {});
  world.settle();
  ASSERT_TRUE(wires[0]->client->failure());
  EXPECT_EQ(wires[0]->client->failure()->kind, FailureKind::broken_frame);
  EXPECT_EQ(wires[0]->client->failure()->peer, 1u);
}

TEST(Store, WhatIsAnnouncedIsBoundedTogether) {
  World world(6);
  auto wires = all_joined(world, 6);
  // Five ranks announce 16 MiB each and send only the start: over 64 MiB with the fifth.
  const auto large =
      std::make_shared<const SharedPayload>(std::vector<std::byte>(kMaxMessageBytes));
  for (int r = 1; r < 6; ++r) {
    FrameQueue& output = wires[std::size_t(r)]->client->output();
    output.push_shared({.type = FrameType::give, .rank = std::uint32_t(r)}, large);
    world.server.receive(wires[std::size_t(r)]->id, output.front());
    output.clear();
  }
  world.settle();
  ASSERT_TRUE(wires[0]->client->failure());
  EXPECT_EQ(wires[0]->client->failure()->kind, FailureKind::too_much);
  EXPECT_EQ(wires[0]->client->failure()->peer, 5u);
}

TEST(Store, SlowHandshakesAreDropped) {
  World world(2);
  const auto idle = world.server.open(world.now);
  const auto half = world.server.open(world.now);
  world.server.receive(half, bytes_of("FRRY"));
  ASSERT_TRUE(world.server.next_tick());
  EXPECT_EQ(*world.server.next_tick(), world.now + 5s);
  world.server.tick(world.now + 4999ms);
  EXPECT_EQ(world.server.fate(idle), StoreServer::Fate::open);
  world.server.tick(world.now + 5s);
  EXPECT_EQ(world.server.fate(idle), StoreServer::Fate::dropped);
  EXPECT_EQ(world.server.fate(half), StoreServer::Fate::dropped);
}

TEST(Store, StrangersAreBoundedAndTheOldestGoes) {
  World world(2);
  const auto first = world.server.open(world.now);
  for (int i = 0; i < 65; ++i) world.server.open(world.now);
  EXPECT_EQ(world.server.surplus(), std::nullopt);
  world.server.open(world.now);
  ASSERT_EQ(world.server.surplus(), first);
  world.server.evict(first);
  EXPECT_EQ(world.server.fate(first), StoreServer::Fate::dropped);
  EXPECT_EQ(world.server.surplus(), std::nullopt);
  EXPECT_EQ(world.server.pending(), 66u);
}

TEST(Store, SilentStrangersAndSuchAsSaidHelloHaveRoomOfTheirOwn) {
  World world(2);
  auto& rank = world.dial(1);
  for (FrameQueue& output = rank.client->output(); !output.empty();) {
    const auto piece = output.front();
    world.server.receive(rank.id, piece);
    output.written(piece.size());
  }
  const auto silent = world.server.open(world.now);
  for (int i = 0; i < 66; ++i) world.server.open(world.now);
  EXPECT_EQ(world.server.surplus(), silent);  // not the older one, which said hello
  world.server.evict(silent);
  for (int i = 0; i < 65; ++i) world.dial(0, 0, "guessed");
  world.settle();
  EXPECT_EQ(world.server.surplus(), std::nullopt);
  EXPECT_EQ(rank.client->state(), State::joined);
}

TEST(Store, WhoIsAdmittedMakesRoomAndRank0sOwnConnectionIsNoStranger) {
  World world(2);
  const auto own = world.server.open_own();
  for (int r : {0, 1}) world.dial(r);
  world.settle();
  EXPECT_EQ(world.server.pending(), 0u);
  world.server.tick(world.now + 24h);
  EXPECT_EQ(world.server.fate(own), StoreServer::Fate::open);
}

TEST(Store, ClosingIsToldToEverybody) {
  for (bool waiting : {false, true}) {
    World world(3);
    auto wires = all_joined(world, 3);
    if (waiting) wires[1]->client->give({});
    world.settle();
    world.server.close();
    world.settle();
    EXPECT_EQ(wires[1]->client->state(), State::closed);
    EXPECT_EQ(wires[1]->client->failure().has_value(), waiting);
    if (waiting) {
      EXPECT_EQ(wires[1]->client->failure()->kind, FailureKind::left);
      EXPECT_EQ(wires[1]->client->failure()->peer, 0u);
    }
  }
}

}  // namespace
}  // namespace ferry::bootstrap
