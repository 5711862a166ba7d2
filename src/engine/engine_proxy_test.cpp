// The proxy without a GPU: threads make the commands and wait for the words that streams wait for.
#include "engine/proxy.hpp"

#include <algorithm>
#include <barrier>
#include <cstring>
#include <memory>

#include "core/layout.hpp"
#include "engine/test_groups.hpp"
#include "fabric/domains/domain_fabric.hpp"
#include "fabric/local/local.hpp"
#include "fabric/sim/sim.hpp"
#include "protocol/watch.hpp"

namespace ferry::engine::test {
namespace {

using protocol::Command;
using protocol::CommandSlot;

constexpr std::uint64_t kSlots = 4;
constexpr std::size_t kChunk = 512;
constexpr std::size_t kSlotBytes = sizeof(StepMessage) + fabric::kMaxHandleBytes;

/// One rank, a domain of its own: its control segment and a staging buffer for others, over `sim`.
struct Seat {
  GroupConfig config;
  std::shared_ptr<Memory> memory;
  ControlLayout layout;
  fabric::Segment control, staging;
  std::unique_ptr<Channel> channel;
  std::vector<CommandSlot> slots = std::vector<CommandSlot>(kSlots);
  struct alignas(128) Line {
    std::uint64_t word = 0, sleepers = 0;
  };
  Line arrived, taken;
  std::vector<std::byte> out = std::vector<std::byte>(64 * kChunk);
  std::vector<Error> failures;  // of the proxy's thread, to be read when it has ended
  std::unique_ptr<Proxy> proxy;
  std::uint64_t commands = 0, arrivals = 0;

  Seat(Bootstrap& bootstrap, std::chrono::nanoseconds deadline) {
    config.deadline = deadline;
    memory = std::make_shared<Memory>(fabric::make_domain_fabric(
        Domains::blocks(bootstrap.size(), 1), fabric::make_local_fabric(bootstrap, 20s),
        fabric::make_sim_fabric(bootstrap, {}, 20s)));
    layout = make_control_layout(bootstrap.size(), kSlotBytes);
    control = memory->fabric->register_memory(layout.bytes);
    staging = memory->fabric->register_memory(64 * kChunk);
    for (const fabric::Segment& segment : {control, staging}) {
      const auto handles = bootstrap.all_gather(segment.handle, 20s);
      for (int peer = 0; peer < bootstrap.size(); ++peer) {
        if (peer == bootstrap.rank()) continue;
        memory->fabric->attach(peer, segment.id, segment.bytes,
                               handles[static_cast<std::size_t>(peer)]);
      }
    }
    bootstrap.all_gather({}, 20s);
    channel = std::make_unique<Channel>(memory, config, control, layout);
    proxy = std::make_unique<Proxy>(*channel, ring(), ProxyWords{&arrived.word, &taken.word},
                                    deadline, [this](const Error& e) { failures.push_back(e); });
  }
  ~Seat() {
    channel->leave();
    proxy->stop();
  }

  protocol::CommandRing<> ring() { return {slots.data(), kSlots, &taken.word}; }
  int rank() const { return channel->rank(); }
  int size() const { return channel->size(); }

  /// A call in which every rank sends `chunks` to every other.
  std::shared_ptr<CrossingCall> call(std::uint64_t chunks, std::uint64_t plan = 1, int portions = 1,
                                     std::vector<int> together = {}) {
    auto made = std::make_shared<CrossingCall>();
    made->stage = "test: crossing";
    made->head.call.kind = CallKind::dispatch;
    made->head.call.exchange.plan_number = plan;
    made->head.staging_segment = staging.id;
    made->first = commands;
    made->puts = chunks * static_cast<std::uint64_t>(size() - 1);
    made->from = out.data();
    const std::uint64_t room = chunks * kChunk;
    for (int peer = 0; peer < size(); ++peer) {
      if (peer == rank()) continue;
      // At each peer the blocks lie by ascending source.
      const int before = rank() - (peer < rank() ? 1 : 0);
      made->windows.push_back(
          {peer, made->windows.size() * room, static_cast<std::uint64_t>(before) * room, room});
      made->sources.push_back({peer, static_cast<std::int64_t>(chunks)});
    }
    made->portions = portions;
    made->together = std::move(together);
    made->number = arrivals += static_cast<std::uint64_t>(portions);
    commands += 1 + made->puts;
    proxy->submit(made);
    return made;
  }
  /// What a kernel does, on this thread: fills the own staging buffer and makes the commands, never
  /// more than the ring holds. `most`: so many puts.
  void produce(const CrossingCall& call, std::uint64_t chunks, std::uint64_t most = ~0ull) {
    begin(call);
    put(call, chunks, 0, std::min(call.puts, most));
  }
  void begin(const CrossingCall& call) {
    protocol::DeadlineWatch watch(20s);
    ASSERT_TRUE(ring().await_room(call.first, watch).ok());
    ring().post(call.first, {Command::Kind::begin});
  }
  void put(const CrossingCall& call, std::uint64_t chunks, std::uint64_t first, std::uint64_t end) {
    protocol::DeadlineWatch watch(20s);
    for (std::uint64_t i = first; i < end; ++i) {
      const std::uint64_t window = i / chunks, from = i * kChunk;
      std::memset(out.data() + from, static_cast<int>(call.number * 16 + i % 16), kChunk);
      ASSERT_TRUE(ring().await_room(call.first + 1 + i, watch).ok());
      ring().post(call.first + 1 + i,
                  {Command::Kind::put, window, from, from - call.windows[window].from, kChunk});
    }
  }
  /// What a stream does.
  bool await_arrival(std::uint64_t number, std::chrono::nanoseconds most = 20s) {
    protocol::DeadlineWatch watch(most);
    return protocol::Flag{&arrived.word}
        .wait_until([number](std::uint64_t seen) { return seen >= number; }, watch)
        .ok();
  }
};

void with_seats(int ranks, std::chrono::nanoseconds deadline,
                const std::function<void(Seat&)>& body) {
  const auto bootstraps = thread_bootstrap(ranks);
  on_ranks(ranks, [&](int r) {
    Bootstrap& bootstrap = *bootstraps[static_cast<std::size_t>(r)];
    Seat seat(bootstrap, deadline);
    body(seat);
    bootstrap.all_gather({}, 60s);
  });
}

TEST(Proxy, CarriesMoreThanTheRingHolds) {
  constexpr std::uint64_t kChunks = 7;
  with_seats(3, 20s, [&](Seat& seat) {
    for (int round = 0; round < 5; ++round) {
      const auto call = seat.call(kChunks);
      seat.produce(*call, kChunks);
      ASSERT_TRUE(seat.await_arrival(call->number));
      EXPECT_TRUE(call->crossed.load());
      for (int peer = 0, block = 0; peer < seat.size(); ++peer) {
        if (peer == seat.rank()) continue;
        const auto window = static_cast<std::uint64_t>(seat.rank() - (peer < seat.rank() ? 1 : 0));
        for (std::uint64_t i = 0; i < kChunks; ++i) {
          const std::byte* at =
              seat.staging.data + (static_cast<std::uint64_t>(block) * kChunks + i) * kChunk;
          const auto sent = static_cast<std::byte>(call->number * 16 + (window * kChunks + i) % 16);
          for (const std::size_t byte : {std::size_t{0}, kChunk - 1}) EXPECT_EQ(at[byte], sent);
        }
        ++block;
      }
      seat.proxy->run([&] { seat.channel->swap("barrier", {}); }, {});  // before it is written anew
    }
    EXPECT_TRUE(seat.failures.empty());
  });
}

// Each rank makes chunks only when it has a portion of the other's, so no portion waits for a chunk
// that comes after it, on either side.
TEST(Proxy, PortionsComeWhileLaterChunksAreNotMadeYet) {
  constexpr std::uint64_t kChunks = 6, kEach = 2;
  constexpr int kPortions = 3;
  with_seats(2, 20s, [&](Seat& seat) {
    for (int round = 0; round < 3; ++round) {
      const auto call = seat.call(kChunks, 1, kPortions);
      const auto await_portion = [&](std::uint64_t portion) {
        ASSERT_TRUE(seat.await_arrival(call->number - kPortions + 1 + portion));
        for (std::uint64_t i = portion * kEach; i < (portion + 1) * kEach; ++i) {
          EXPECT_EQ(seat.staging.data[i * kChunk], static_cast<std::byte>(call->number * 16 + i));
        }
      };
      seat.begin(*call);
      if (seat.rank() == 0) {
        seat.put(*call, kChunks, 0, 2);
        await_portion(0);
        await_portion(1);
        seat.put(*call, kChunks, 2, 6);
      } else {
        await_portion(0);
        seat.put(*call, kChunks, 0, 5);
        await_portion(1);
        // All of rank 0's may be here; the last portion also says that the own staging buffer is
        // free.
        const protocol::Flag arrived{&seat.arrived.word};
        EXPECT_LT(arrived.load(protocol::order::acquire), call->number);
        seat.put(*call, kChunks, 5, 6);
      }
      await_portion(2);
      EXPECT_TRUE(call->crossed.load());
    }
    EXPECT_TRUE(seat.failures.empty());
  });
}

// Ranks 0 and 1 go on together; rank 2 holds back what rank 1 waits for.
TEST(Proxy, WhoWillWaitForOthersGetsTheLastPortionWithThem) {
  constexpr std::uint64_t kChunks = 4;
  std::atomic<bool> checked{false};
  with_seats(3, 20s, [&](Seat& seat) {
    const std::vector<int> pair{0, 1};
    const auto call = seat.call(kChunks, 1, 2, seat.rank() < 2 ? pair : std::vector<int>{});
    seat.begin(*call);
    if (seat.rank() == 2) {
      seat.put(*call, kChunks, 0, 2 * kChunks - 1);
      while (!checked.load()) std::this_thread::sleep_for(1ms);
      seat.put(*call, kChunks, 2 * kChunks - 1, 2 * kChunks);
    } else {
      seat.put(*call, kChunks, 0, 2 * kChunks);
    }
    if (seat.rank() == 0) {
      EXPECT_TRUE(seat.await_arrival(call->number - 1));
      EXPECT_FALSE(seat.await_arrival(call->number, 30ms));
      checked.store(true);
    }
    ASSERT_TRUE(seat.await_arrival(call->number));
    EXPECT_TRUE(seat.failures.empty());
  });
}

TEST(Proxy, ARankThatDoesNotComeIsNamedAndWaitsAreLetGo) {
  with_seats(2, 300ms, [](Seat& seat) {
    if (seat.rank() == 1) return;  // leaves only after the other's deadline
    const auto call = seat.call(1);
    seat.produce(*call, 1);
    ASSERT_TRUE(seat.await_arrival(call->number));  // let go
    ASSERT_TRUE(seat.await_arrival(call->number + 7));
    while (!call->ended.load()) std::this_thread::sleep_for(1ms);
    EXPECT_FALSE(call->crossed.load());
    ASSERT_EQ(seat.failures.size(), 1u);
    EXPECT_EQ(seat.failures[0].kind(), ErrorKind::deadline);
    EXPECT_EQ(seat.failures[0].peer(), 1);
    EXPECT_EQ(seat.failures[0].context().stage, "test: crossing");
    expect_error(ErrorKind::deadline, {"rank 1"}, [&] { seat.channel->check_usable("later"); });
    const auto later = seat.call(1);  // ends at once
    while (!later->ended.load()) std::this_thread::sleep_for(1ms);
    EXPECT_FALSE(later->crossed.load());
  });
}

TEST(Proxy, GoesOnInTheNextEpoch) {
  std::barrier together(2);
  with_seats(2, 20s, [&](Seat& seat) {
    std::shared_ptr<CrossingCall> lost;
    if (seat.rank() == 0) {
      lost = seat.call(2);
      seat.produce(*lost, 2);
    }
    seat.channel->stop(false);
    seat.proxy->pause();
    ASSERT_TRUE(seat.await_arrival(1000));  // let go
    const auto refused = seat.call(1);
    for (const auto& call : {lost, refused}) {
      if (!call) continue;
      EXPECT_TRUE(call->ended.load());
      EXPECT_FALSE(call->crossed.load());
    }
    together.arrive_and_wait();
    seat.channel->begin_epoch({.number = 2, .first = 100, .ranks = {0, 1}});
    std::fill(seat.slots.begin(), seat.slots.end(), CommandSlot{});
    seat.commands = seat.arrivals = 0;
    seat.proxy->resume();
    for (int round = 0; round < 3; ++round) {
      const auto call = seat.call(2);
      EXPECT_FALSE(seat.await_arrival(call->number, 1ms));
      seat.produce(*call, 2);
      ASSERT_TRUE(seat.await_arrival(call->number));
      EXPECT_TRUE(call->crossed.load());
      EXPECT_EQ(seat.staging.data[0], static_cast<std::byte>(call->number * 16));
      seat.proxy->run([&] { seat.channel->swap("barrier", {}); }, {});
    }
    seat.proxy->stop();
    seat.proxy->resume();  // it was stopped for good
    expect_error(ErrorKind::destroyed, {"destroyed"}, [&] { seat.proxy->run([] {}, {}); });
  });
}

TEST(Proxy, AKernelThatDoesNotComeEndsAtTheDeadline) {
  with_seats(2, 300ms, [](Seat& seat) {
    const auto call = seat.call(2);
    seat.produce(*call, 2, seat.rank() == 0 ? 1 : ~0ull);
    ASSERT_TRUE(seat.await_arrival(call->number + 7));
    while (!call->ended.load()) std::this_thread::sleep_for(1ms);
    ASSERT_EQ(seat.failures.size(), 1u);
    EXPECT_FALSE(call->crossed.load());
  });
}

TEST(Proxy, RanksInDifferentCallsAreRefusedAndGoOn) {
  with_seats(2, 20s, [](Seat& seat) {
    const auto wrong = seat.call(2, seat.rank() == 0 ? 1 : 2);
    seat.produce(*wrong, 2);
    ASSERT_TRUE(seat.await_arrival(wrong->number));
    while (!wrong->ended.load()) std::this_thread::sleep_for(1ms);
    ASSERT_TRUE(wrong->refused.has_value());
    EXPECT_EQ(wrong->refused->kind(), ErrorKind::mismatch);
    const auto right = seat.call(2);
    seat.produce(*right, 2);
    ASSERT_TRUE(seat.await_arrival(right->number));
    while (!right->ended.load()) std::this_thread::sleep_for(1ms);
    EXPECT_FALSE(right->refused.has_value());
    EXPECT_TRUE(seat.failures.empty());
  });
}

TEST(Proxy, WhatAllRanksThrewInAStepExcusesNoLaterFailure) {
  with_seats(2, 2s, [](Seat& seat) {
    expect_error(ErrorKind::mismatch, {"all alike"}, [&] {
      const auto step = [&] {
        seat.channel->all_ranks_throw();
        throw Error(ErrorKind::mismatch, "all alike");
      };
      seat.proxy->run(step, {});
    });
    const auto call = seat.call(1);
    call->agree = [](Channel&) { throw Error(ErrorKind::exhausted, "this rank alone"); };
    seat.produce(*call, 1);
    ASSERT_TRUE(seat.await_arrival(call->number + 7));
    while (!call->ended.load()) std::this_thread::sleep_for(1ms);
    EXPECT_FALSE(call->refused.has_value());
    ASSERT_EQ(seat.failures.size(), 1u);
  });
}

TEST(Proxy, CommandsBeyondTheirWindowFailTheGroup) {
  with_seats(2, 2s, [](Seat& seat) {
    const auto call = seat.call(1);
    if (seat.rank() == 0) {
      seat.ring().post(call->first, {Command::Kind::begin});
      seat.ring().post(call->first + 1, {Command::Kind::put, 0, 0, kChunk, 1});
    } else {
      seat.produce(*call, 1);
    }
    ASSERT_TRUE(seat.await_arrival(call->number + 7));
    while (!call->ended.load()) std::this_thread::sleep_for(1ms);
    ASSERT_EQ(seat.failures.size(), 1u);
  });
}

TEST(Proxy, StepsRunInTurnAndThrowToTheirCaller) {
  with_seats(1, 20s, [](Seat& seat) {
    expect_error(ErrorKind::exhausted, {"no more"}, [&] {
      seat.proxy->run([] { throw Error(ErrorKind::exhausted, "no more"); }, {});
    });
    int polled = 0;
    seat.proxy->run([] { std::this_thread::sleep_for(100ms); }, [&] { ++polled; });
    EXPECT_GT(polled, 0);
    seat.proxy->stop();
    expect_error(ErrorKind::destroyed, {"destroyed"}, [&] { seat.proxy->run([] {}, {}); });
  });
}

}  // namespace
}  // namespace ferry::engine::test
