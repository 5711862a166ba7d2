// Latency mode of the CUDA engine with masks: ranks that die or come late, and what the others do.
// Skips without a GPU.
#include <gtest/gtest.h>
#include <signal.h>
#include <unistd.h>

#include <atomic>
#include <chrono>
#include <functional>
#include <thread>

#include "engine_graph.hpp"
#include "engine_latency.hpp"
#include "engine_seat.hpp"

namespace ferry::test {
namespace {

constexpr std::uint64_t kMaskSeed = 20261126;
constexpr LatencyTrip kTrip{CombinePath::per_rank, true, false, nullptr, {}};

std::uint64_t count_of(const LatencyExchange& latency) {
  return std::atomic_ref(const_cast<std::uint64_t&>(*latency.mask_count()))
      .load(std::memory_order_acquire);
}

bool is_evicted(const std::function<void()>& call) {
  return kind_of(call) == ErrorKind::evicted;
}

/// A rank's place in an exchange with masks.
struct Masked {
  World world;
  OnGpu mine;
  LatencyExchange latency;
  int rank;
  const Copier& copier;

  Masked(Seat& seat, const Shape& shape, std::uint64_t seed)
      : world(seat.size(), shape, seed),
        mine(seat.on_gpu(world)),
        latency(seat.group, latency_config(shape, true)),
        rank(seat.rank()),
        copier(seat.copier) {}
  void trip(const std::set<int>& absent = {}, const LatencyTrip& with = kTrip) {
    latency_trip(latency, world, rank, mine, with, copier, absent);
  }
};

TEST_P(EngineTest, ALateRankIsMaskedAndRejoins) {
  const Shape shape;
  GroupConfig config = config_for(shape);
  config.deadline = 3s;
  on_ranks(GetParam().ranks, GetParam().threads, config, [&](Seat& seat) {
    Masked at(seat, shape, kMaskSeed);
    std::set<int> others;
    for (int r = 0; r < seat.size(); ++r) {
      if (r != 1) others.insert(r);
    }
    seat.meet();
    for (int i = 0; i < 3; ++i) at.trip();
    need(count_of(at.latency) == 0, "a mask too early");
    need_masked(at.latency, {}, "at first");
    seat.meet();
    if (seat.rank() != 1) {
      at.trip({1});
      need(count_of(at.latency) == 1, "one mask");
      need_masked(at.latency, {1}, "after the deadline");
      for (int i = 0; i < 3; ++i) at.trip({1});
      need(count_of(at.latency) == 1, "still one mask");
    }
    seat.meet();
    if (seat.rank() == 1) {
      // The first is what the others sent before they knew.
      bool told = false;
      for (int i = 0; i < 4 && !told; ++i) {
        told = is_evicted([&] { (void)latency_dispatch(at.latency, at.mine, kTrip); });
      }
      need(told, "it did not learn that it was evicted");
      need_masked(at.latency, others, "evicted");
    }
    seat.meet();
    at.latency.rejoin();
    need_masked(at.latency, {}, "after rejoining");
    for (int i = 0; i < 3; ++i) at.trip();
    seat.meet();
  });
}

/// Rank 2 does not combine. Rank 1 has masked it and comes to the rejoin at once; the others wait
/// for it until their deadline, and come half a deadline after that of rank 1.
TEST_P(EngineTest, ARejoinWaitsForRanksThatAreHeldUp) {
  if (GetParam().ranks < 3) GTEST_SKIP() << "needs a rank that is held up";
  const Shape shape;
  GroupConfig config = config_for(shape);
  config.deadline = 3s;
  on_ranks(GetParam().ranks, GetParam().threads, config, [&](Seat& seat) {
    Masked at(seat, shape, kMaskSeed + 3);
    seat.meet();
    at.trip();
    const LatencyReceived received = latency_dispatch(at.latency, at.mine, kTrip);
    seat.meet();
    if (seat.rank() == 1) at.latency.set_mask(2, true);
    if (seat.rank() == 2) {
      std::this_thread::sleep_for(config.deadline * 3 / 2);
    } else {
      const LatencyCombined sums = latency_combine(at.latency, at.mine, received, kTrip);
      check_latency_sums(at.world, seat.rank(), kTrip.path, sums.x, seat.copier, {2});
      if (seat.rank() != 1) std::this_thread::sleep_for(config.deadline / 2);
    }
    at.latency.rejoin();
    need_masked(at.latency, {}, "after rejoining");
    at.trip();
    seat.meet();
  });
}

TEST_P(EngineTest, MasksAreSetAndCleared) {
  const Shape shape;
  each(shape, [&](Seat& seat) {
    Masked at(seat, shape, kMaskSeed + 1);
    const auto refused = [&](const std::function<void()>& call) {
      return kind_of(call) == ErrorKind::invalid_argument;
    };
    LatencyExchange plain(seat.group, latency_config(shape));
    need(refused([&] { (void)plain.masked(); }), "masks of an exchange without");
    need(refused([&] { plain.rejoin(); }), "rejoin of an exchange without masks");
    need(refused([&] { at.latency.set_mask(seat.rank(), true); }), "a mask of this rank");
    need(refused([&] { at.latency.set_mask(seat.size(), true); }), "a mask of no rank");
    {
      LatencyTrip by_slot = kTrip;
      by_slot.path = CombinePath::per_slot;
      const LatencyReceived received = latency_dispatch(at.latency, at.mine, kTrip);
      need(refused([&] { (void)latency_combine(at.latency, at.mine, received, by_slot); }),
           "slots with masks");
      (void)latency_combine(at.latency, at.mine, received, kTrip);
    }
    seat.meet();
    // Every rank alone, then all together again.
    std::set<int> others;
    for (int r = 0; r < seat.size(); ++r) {
      if (r == seat.rank()) continue;
      at.latency.set_mask(r, true);
      others.insert(r);
    }
    need_masked(at.latency, others, "set");
    seat.meet();
    at.latency.clear_masks();
    need_masked(at.latency, {}, "cleared");
    seat.meet();
    at.latency.rejoin();
    at.trip();
    need(count_of(at.latency) == 0, "no deadline masked a rank");
    // A result from before a rejoin may be read, and no more.
    const LatencyReceived old = latency_dispatch(at.latency, at.mine, kTrip);
    at.latency.rejoin();
    check_latency_rows(at.world, seat.rank(), old, seat.copier);
    need(is_evicted([&] { (void)latency_combine(at.latency, at.mine, old, kTrip); }),
         "a result from before a rejoin was combined");
    at.trip();
    seat.meet();
  });
}

/// Killed in the midst of exchanges: the others mask it long before their deadline, go on, and
/// rejoin without it; captured exchanges, too.
TEST(EngineEndTest, AKilledRankIsMaskedAtOnce) {
  if (gpu_count() == 0) GTEST_SKIP() << "NO GPU";
  const Shape shape;
  const RankBody body = seated(config_for(shape), [&](Seat& seat) {
    Masked at(seat, shape, kMaskSeed + 2);
    OwnStream own(seat.device);
    LatencyTrip captured = kTrip;
    captured.stream = &own.stream;
    LatencyCombined sums;
    seat.meet();
    const Graph graph(own.raw, [&] {
      sums = latency_combine(at.latency, at.mine, latency_dispatch(at.latency, at.mine, captured),
                             captured);
    });
    seat.meet();
    for (int i = 0; i < 3; ++i) at.trip();
    graph.run();
    check_latency_sums(at.world, seat.rank(), kTrip.path, sums.x, seat.copier);
    seat.meet();
    if (seat.rank() == 1) kill(getpid(), SIGKILL);
    const auto start = std::chrono::steady_clock::now();
    at.trip({1});
    need(std::chrono::steady_clock::now() - start < 10s, "the deadline was waited for");
    need(count_of(at.latency) == 1, "one mask");
    need_masked(at.latency, {1}, "killed");
    for (int i = 0; i < 5; ++i) at.trip({1});
    for (int i = 0; i < 5; ++i) {
      graph.run();
      check_latency_sums(at.world, seat.rank(), kTrip.path, sums.x, seat.copier, {1});
    }
    at.latency.rejoin();
    need_masked(at.latency, {1}, "rejoined");
    for (int i = 0; i < 5; ++i) at.trip({1});
  });
  const auto problems = run_ranks(3, 1, body, 90);
  ASSERT_EQ(problems.size(), 1u) << (problems.empty() ? "" : problems.back());
  EXPECT_NE(problems[0].find("rank 1: its process ended"), std::string::npos) << problems[0];
}

}  // namespace
}  // namespace ferry::test
