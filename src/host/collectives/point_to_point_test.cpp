// Transfers between two ranks: sizes around a packet, tags, any order, beside collectives, what
// differs, who is gone, and what a damaged peer may write.
#include "host/collectives/point_to_point.hpp"

#include <algorithm>
#include <atomic>
#include <cstring>
#include <map>
#include <numeric>
#include <random>
#include <tuple>

#include "engine/test_network.hpp"
#include "fabric/local/local.hpp"
#include "host/collectives/engine.hpp"
#include "host/collectives/test_collectives.hpp"

namespace ferry::host::test {
namespace {

std::vector<World> worlds() {
  std::vector<World> all{{.ranks = 2},
                         {.ranks = 4},
                         {.ranks = 3, .fabric = FabricKind::shm},
                         {.ranks = 3, .fabric = FabricKind::sim},
                         {.ranks = 4, .domain_size = 2},
                         {.ranks = 4, .domain_size = 2, .network = FabricKind::sim}};
  if (has_network()) all.push_back({.ranks = 3, .domain_size = 2, .network = FabricKind::ofi});
  return all;
}

using Values = std::vector<std::int32_t>;

/// What rank `from` sends as its message `number`.
Values message(std::int64_t count, int from, int number) {
  Values values(static_cast<std::size_t>(count));
  std::iota(values.begin(), values.end(), 1'000'000 * from + 1000 * number);
  return values;
}

TensorView view(Values& values) {
  return {values.data(), Dtype::i32, {static_cast<std::int64_t>(values.size())}};
}

/// Elements around what a packet carries, and many packets.
constexpr std::int64_t kTransferSizes[] = {0,      1,      100,    8'192,  16'383,
                                           16'384, 16'385, 32'769, 400'001};

// All send before they receive.
TEST(PointToPoint, AroundARing) {
  for (const World& world : worlds()) {
    with_collectives(world, [](Collectives& all) {
      const int to = (all.rank() + 1) % all.size(),
                from = (all.rank() + all.size() - 1) % all.size();
      Stream stream;
      int number = 0;
      for (const std::int64_t count : kTransferSizes) {
        Values sent = message(count, all.rank(), ++number), got(sent.size());
        const Event send = all.send(view(sent), to, 3, {&stream});
        const Event recv = all.recv(view(got), from, 3, {&stream});
        recv.wait();
        ASSERT_EQ(got, message(count, from, number)) << "rank " << all.rank();
        send.wait();
      }
    });
  }
}

TEST(PointToPoint, WithoutAStreamItBlocks) {
  for (const World& world : worlds()) {
    with_collectives(world, [](Collectives& all) {
      for (const std::int64_t count : kTransferSizes) {
        Values values = message(count, 0, 1);
        if (all.rank() == 0) all.send(view(values), 1);
        if (all.rank() == 1) {
          Values got(values.size());
          all.recv(view(got), 0);
          ASSERT_EQ(got, values);
        }
      }
    });
  }
}

// Many transfers of every pair, begun in another order on every rank: messages of one tag arrive in
// order, those of different tags do not wait for each other.
TEST(PointToPoint, AnyOrder) {
  for (const World& world : worlds()) {
    with_collectives(world, [](Collectives& all) {
      constexpr int kTags = 3, kEach = 4;
      const auto size_of_message = [](int from, int to, int tag, int i) {
        std::mt19937 random(kSeed +
                            static_cast<unsigned>(((from * 8 + to) * kTags + tag) * kEach + i));
        return static_cast<std::int64_t>(random() % 2 ? random() % 300 : random() % 40'000);
      };
      struct One {
        bool sends;
        int peer, tag, i = 0;
        Values values{};
        Event done{};
      };
      std::vector<One> ones;
      for (int peer = 0; peer < all.size(); ++peer) {
        for (int tag = 0; tag < kTags && peer != all.rank(); ++tag) {
          for (int i = 0; i < kEach; ++i) {
            ones.push_back({true, peer, tag});
            ones.push_back({false, peer, tag});
          }
        }
      }
      std::mt19937 random(kSeed + static_cast<unsigned>(all.rank()));
      std::shuffle(ones.begin(), ones.end(), random);
      Stream stream;
      std::map<std::tuple<bool, int, int>, int> counts;
      for (One& one : ones) {
        one.i = counts[{one.sends, one.peer, one.tag}]++;
        if (one.sends) {
          one.values = message(size_of_message(all.rank(), one.peer, one.tag, one.i), all.rank(),
                               one.tag * kEach + one.i);
          one.done = all.send(view(one.values), one.peer, one.tag, {&stream});
        } else {
          one.values.resize(
              static_cast<std::size_t>(size_of_message(one.peer, all.rank(), one.tag, one.i)));
          one.done = all.recv(view(one.values), one.peer, one.tag, {&stream});
        }
      }
      for (One& one : ones) {
        one.done.wait();
        if (one.sends) continue;
        const auto count = static_cast<std::int64_t>(one.values.size());
        ASSERT_EQ(one.values, message(count, one.peer, one.tag * kEach + one.i))
            << "rank " << all.rank() << " from " << one.peer << ", tag " << one.tag;
      }
    });
  }
}

// Blocking receives in the opposite order of tags: what is not asked for holds up nothing.
TEST(PointToPoint, TagsInTheOppositeOrder) {
  with_collectives({.ranks = 2}, [](Collectives& all) {
    constexpr int kMessages = 20;  // more than a ring has slots
    if (all.rank() == 0) {
      Stream stream;
      std::vector<Values> sent;
      std::vector<Event> events;
      for (int tag = 0; tag < kMessages; ++tag) {
        sent.push_back(message(tag % 2 ? 10 : 50'000, 0, tag));
      }
      for (int tag = 0; tag < kMessages; ++tag) {
        events.push_back(all.send(view(sent[static_cast<std::size_t>(tag)]), 1, tag, {&stream}));
      }
      for (const Event& event : events) event.wait();
    } else {
      for (int tag = kMessages; tag-- > 0;) {
        Values got(tag % 2 ? 10 : 50'000);
        all.recv(view(got), 0, tag);
        ASSERT_EQ(got, message(static_cast<std::int64_t>(got.size()), 0, tag));
      }
    }
  });
}

// A receive that waits for long stands in nobody's way, and data move while no caller waits.
TEST(PointToPoint, BesideCollectives) {
  for (const World& world : worlds()) {
    with_collectives(world, [](Collectives& all) {
      const int peer = all.rank() ^ 1;
      if (peer >= all.size()) {
        for (int i = 0; i < 4; ++i) all.barrier();
        return;
      }
      Stream stream;
      Values sent = message(300'000, all.rank(), 1), got(sent.size()), sum(50'000, 1);
      all.barrier();
      const Event recv = all.recv(view(got), peer, 0, {&stream});
      all.barrier();
      const Event send = all.send(view(sent), peer, 0, {&stream});
      all.barrier();  // which nobody leaves before all have begun
      while (!recv.ready() || !send.ready()) std::this_thread::yield();
      all.barrier();
      ASSERT_EQ(got, message(300'000, peer, 1));
    });
  }
}

// Other work of the stream begins when the transfers before it have ended.
TEST(PointToPoint, AStreamKeepsItsOrder) {
  with_collectives({.ranks = 2}, [](Collectives& all) {
    Stream stream;
    Values sent(100'000, all.rank() + 1), got(sent.size());
    for (int i = 0; i < 5; ++i) {
      std::fill(got.begin(), got.end(), 0);
      all.send(view(sent), 1 - all.rank(), 0, {&stream});
      all.recv(view(got), 1 - all.rank(), 0, {&stream});
      all.all_reduce(view(got), {.stream = &stream});
      stream.synchronize();
      ASSERT_EQ(got, Values(got.size(), 3));
    }
  });
}

TEST(PointToPoint, SizesThatDifferAreNamed) {
  for (const World& world : worlds()) {
    with_collectives(world, [](Collectives& all) {
      if (all.rank() > 1) return all.barrier();
      const std::string words[] = {"rank 0 sends", "bytes to rank 1 (tag 9), which expects"};
      for (const auto& [sent, expected] : std::initializer_list<std::pair<int, int>>{
               {10, 11}, {11, 10}, {0, 1}, {100'000, 99'999}, {100'000, 3}, {3, 100'000}}) {
        Values x(static_cast<std::size_t>(all.rank() == 0 ? sent : expected), 7);
        expect_error(ErrorKind::mismatch, {words[0].c_str(), words[1].c_str()}, [&] {
          if (all.rank() == 0) {
            all.send(view(x), 1, 9);
          } else {
            all.recv(view(x), 0, 9);
          }
        });
        ASSERT_EQ(x, Values(x.size(), 7));
        Values right = message(50'000, 0, sent);
        if (all.rank() == 0) {
          all.send(view(right), 1, 9);
        } else {
          Values got(right.size());
          all.recv(view(got), 0, 9);
          ASSERT_EQ(got, right);
        }
      }
      all.barrier();
    });
  }
}

TEST(PointToPoint, RefusesWhatCannotBe) {
  with_collectives({.ranks = 2}, [](Collectives& all) {
    Values x(4);
    for (const int peer : {-1, 2, all.rank()}) {
      expect_error(ErrorKind::invalid_argument, {"send: peer: got"},
                   [&] { all.send(view(x), peer); });
      expect_error(ErrorKind::invalid_argument, {"recv: peer: got"},
                   [&] { all.recv(view(x), peer); });
    }
    expect_error(ErrorKind::invalid_argument, {"recv: x: got a null pointer"},
                 [&] { all.recv({nullptr, Dtype::f32, {1}}, 1 - all.rank()); });
    all.barrier();
  });
}

TEST(PointToPoint, ARankThatLeavesIsNamed) {
  for (const World& world : {World{.ranks = 3}, World{.ranks = 2, .domain_size = 1}}) {
    with_collectives(world, [](Collectives& all) {
      // What it sent before counts.
      Values last = message(20'000, 1, 1);
      if (all.rank() == 1) return static_cast<void>(all.send(view(last), 0));
      Values got(last.size());
      if (all.rank() == 0) all.recv(view(got), 1);
      ASSERT_EQ(got, all.rank() == 0 ? last : Values(last.size()));
      try {
        all.recv(view(got), 1);
        ADD_FAILURE() << "nothing thrown";
      } catch (const Error& error) {
        EXPECT_EQ(error.kind(), ErrorKind::peer_left) << error.what();
        EXPECT_EQ(error.peer(), 1) << error.what();
      }
    });
  }
}

TEST(PointToPoint, ADeadlineNamesThePeer) {
  std::atomic<bool> over{false};
  with_collectives(
      {.ranks = 2},
      [&](Collectives& all) {
        Values x(4);
        if (all.rank() == 0) {
          expect_error(ErrorKind::deadline, {"rank 1 did not send 16 bytes (tag 5) within"},
                       [&] { all.recv(view(x), 1, 5); });
          expect_error(ErrorKind::deadline, {"failed earlier"}, [&] { all.barrier(); });
          over = true;
        } else {
          while (!over) std::this_thread::sleep_for(1ms);
          expect_error(ErrorKind::deadline, {"rank 1 missed the deadline (reported by rank 0)"},
                       [&] { all.send(view(x), 0); });
        }
      },
      200ms);
}

// The collectives end with a transfer under way.
void destroy_with_a_transfer(bool while_waiting) {
  const auto bootstraps = thread_bootstrap(2);
  std::atomic<bool> over{false};
  on_ranks(2, [&](int r) {
    Stream stream;
    Values x(4);
    Event never;
    std::thread waiter;
    const auto expect_destroyed = [&] {
      expect_error(ErrorKind::destroyed, {"destroyed"}, [&] { never.wait(); });
    };
    {
      Collectives all(bootstraps[static_cast<std::size_t>(r)], GroupConfig{.deadline = 60s});
      all.barrier();
      if (r == 0) never = all.recv(view(x), 1, 0, {&stream});
      if (r == 0 && while_waiting) waiter = std::thread(expect_destroyed);
      if (waiter.joinable()) std::this_thread::sleep_for(20ms);
      while (r == 1 && !over) std::this_thread::sleep_for(1ms);
    }
    over = true;
    if (waiter.joinable()) waiter.join();
    if (r == 0) expect_destroyed();
  });
}

TEST(PointToPoint, DestroyEndsTransfers) {
  destroy_with_a_transfer(false);
}

TEST(PointToPoint, DestroyEndsTransfersThatAreWaitedFor) {
  destroy_with_a_transfer(true);
}

// What a peer writes is checked, whatever it is.
TEST(PointToPoint, DamagedPacketsAreNamed) {
  constexpr auto kUnknown = static_cast<PacketKind>(77);
  const std::uint64_t most = PacketLayout::of(2).carried;
  const PacketHead heads[] = {
      {kUnknown, 0, 1, 4, 4},
      {PacketKind::message, 0, 1, most + 1, most + 1},
      {PacketKind::message, 0, 1, 4, 8},
      {PacketKind::message, 0, 1, most + 1, 4},
      {PacketKind::message, 0, 1, 4, ~0ull},
      {PacketKind::message, 0, 2, 4, 4},
      {PacketKind::data, 0, 1, 4, 4},
      {PacketKind::accept, 0, 1, 4, 0},
      {PacketKind::refuse, 0, 1, 4, 0},
  };
  for (const PacketHead& head : heads) {
    const auto bootstraps = thread_bootstrap(2);
    std::atomic<bool> read{false};
    on_ranks(2, [&](int r) {
      GroupConfig config;
      config.experts = 1;
      config.deadline = 20s;
      Bootstrap& bootstrap = *bootstraps[static_cast<std::size_t>(r)];
      auto engine = make_host_engine(bootstrap, config, Domains::blocks(2, 0),
                                     fabric::make_local_fabric(bootstrap, 20s));
      const engine::Region region =
          engine->shared_memory()->arena.allocate(PacketLayout::of(2).bytes).value();
      if (r == 1) {
        const std::vector<std::byte> data(most);
        PacketHead forged = head;
        forged.carried = std::min<std::uint64_t>(head.carried, most);
        PacketRing ring(*engine, region);
        ring.write(0, forged, data.data());
        if (forged.carried != head.carried) {
          // In its place, before it is looked at.
          std::memcpy(
              engine->channel().pointer(0, {region.address.segment, region.address.offset}) +
                  PacketLayout::of(2).slots +
                  (protocol::PacketTraits::kSlots + 1) * PacketLayout::of(2).slot_bytes(),
              &head, sizeof(head));
        }
        read = true;
        EXPECT_THROW(engine->barrier(), Error);  // the other rank has failed
        return;
      }
      while (!read) std::this_thread::yield();
      const auto moves = std::make_shared<PointToPoint>(engine, region);
      Values x(1);
      const auto receive = moves->make(false, x.data(), sizeof(x[0]), 1, 0);
      moves->begin(receive, true);
      expect_error(ErrorKind::mismatch, {"rank 1 ", "memory is damaged"},
                   [&] { receive->wait(20s, {}); });
      moves->stop();
    });
  }
}

}  // namespace
}  // namespace ferry::host::test
