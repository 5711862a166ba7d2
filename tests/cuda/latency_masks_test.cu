// Latency kernels: ranks that are gone, masks that the host sets, rejoining, and waits.
#include <algorithm>
#include <cstdio>
#include <vector>

#include "latency_case.hpp"

namespace ferry::cuda::test {

namespace {

constexpr std::uint64_t kShort = 30'000'000, kLong = 20'000'000'000;
constexpr CombinePath kPath = CombinePath::per_rank;

__global__ void hold(std::uint64_t ns) {
  std::uint64_t start, now;
  asm volatile("mov.u64 %0, %%globaltimer;" : "=l"(start));
  do {
    asm volatile("mov.u64 %0, %%globaltimer;" : "=l"(now));
  } while (now - start < ns);
}

/// Three ranks and their exchange.
class Trio {
 public:
  explicit Trio(bool weights_with_dispatch = false)
      : c_(case_of(weights_with_dispatch)),
        group_({c_.ranks, latency_arena_bytes(c_) + (std::size_t{8} << 20), 4096, kLong}),
        run_(group_, c_) {
    // Lazy loading would wait for kernels that wait.
    group_.launch([&](int r) { hold<<<1, 1, 0, group_.stream(r)>>>(0); });
    group_.wait_well();
  }

  KernelGroup& group() { return group_; }
  LatencyRun& run() { return run_; }

  /// A dispatch of `ranks` with these deadlines; returns what was sent.
  LatencyWorld dispatch(const std::vector<int>& ranks, std::uint64_t seed,
                        std::uint64_t deadline_ns) {
    LatencyWorld world = make_latency_world(c_, seed, {12, 15, 20});
    run_.upload(world, 0);
    run_.poison(0);
    group_.launch([&](int r) {
      if (std::find(ranks.begin(), ranks.end(), r) == ranks.end()) return;
      LatencyDispatchParameters p = run_.dispatch(r, 0);
      p.view.group.deadline_ns = deadline_ns;
      FERRY_CUDA_CHECK(launch_latency_dispatch(p, group_.stream(r)));
    });
    group_.wait(10);
    for (int r = 0; r < c_.ranks; ++r) {
      expect("a mask is fatal", group_.fatal(r).written == 0, describe(group_.fatal(r)));
      if (std::find(ranks.begin(), ranks.end(), r) == ranks.end()) {
        world.inputs[KernelGroup::index(r)] = {};
      }
    }
    return world;
  }
  /// Dispatch and combine of those ranks, without a trace of others.
  void exchange(const std::vector<int>& ranks, std::uint64_t seed, std::uint64_t deadline_ns) {
    const LatencyWorld world = dispatch(ranks, seed, deadline_ns);
    for (const int r : ranks) run_.check_dispatch(world, r, 0);
    run_.upload_results(world, 0);
    combine(ranks, deadline_ns);
    const int missing = ranks.size() < 3 ? 3 - sum(ranks) : -1;
    for (const int r : ranks) run_.check_combine(world, r, 0, kPath, {missing, -1});
  }
  void combine(const std::vector<int>& ranks, std::uint64_t deadline_ns) {
    group_.launch([&](int r) {
      if (std::find(ranks.begin(), ranks.end(), r) == ranks.end()) return;
      LatencyCombineParameters p = run_.combine(r, 0, kPath);
      p.view.group.deadline_ns = deadline_ns;
      FERRY_CUDA_CHECK(launch_latency_combine(p, group_.stream(r)));
    });
    group_.wait(10);
  }
  void rejoin(const std::vector<int>& ranks, std::uint64_t deadline_ns) {
    group_.launch([&](int r) {
      if (std::find(ranks.begin(), ranks.end(), r) == ranks.end()) return;
      LatencyRejoinParameters p;
      p.view = run_.view(r);
      p.view.group.deadline_ns = deadline_ns;
      p.failure = group_.failure(r);
      FERRY_CUDA_CHECK(launch_latency_rejoin(p, group_.stream(r)));
    });
    group_.wait(10);
  }
  void set_mask(int rank, int peer, bool masked) {
    group_.launch([&](int r) {
      if (r != rank) return;
      FERRY_CUDA_CHECK(launch_latency_mask(run_.view(r), peer, masked, group_.stream(r)));
    });
    group_.wait(10);
  }
  bool sees(int rank, int peer) {
    const bool seen = run_.alarm(rank).ranks[peer] != 0;
    expect("the host sees other masks than the GPU", seen == run_.masked(rank, peer));
    return seen;
  }

 private:
  static LatencyCase case_of(bool weights_with_dispatch) {
    LatencyCase c = small_latency_case();
    c.weights_with_dispatch = weights_with_dispatch;
    return c;
  }
  /// Of two ranks of three: the third is 3 - sum.
  static int sum(const std::vector<int>& ranks) {
    int all = 0;
    for (const int r : ranks) all += r;
    return all;
  }
  LatencyCase c_;
  KernelGroup group_;
  LatencyRun run_;
};

/// The CPU says that rank 1 has ended: it is masked at once, long before the deadline.
void test_dead(std::uint64_t seed) {
  Trio trio;
  trio.exchange({0, 1, 2}, seed, kLong);
  for (const int r : {0, 2}) trio.run().set_gone(r, 1, Gone::dead);
  for (int again = 0; again < 3; ++again) {
    trio.exchange({0, 2}, seed + 1 + static_cast<std::uint64_t>(again), kLong);
    for (const int r : {0, 2}) {
      expect("dead: masks", trio.sees(r, 1) && !trio.sees(r, 0) && !trio.sees(r, 2));
      expect("dead: count", trio.run().alarm(r).masked == 1 && trio.run().alarm(r).behind == 0);
    }
  }
  // Those that are left rejoin without it.
  trio.rejoin({0, 2}, kLong);
  for (const int r : {0, 2}) expect("dead: rejoined", trio.sees(r, 1) && !trio.sees(r, 2 - r));
  trio.exchange({0, 2}, seed + 9, kLong);
  std::printf("dead: as expected\n");
}

/// Rank 1 is late and comes back: it learns at once that the others went on, and all rejoin.
void test_rejoin(std::uint64_t seed) {
  Trio trio;
  trio.exchange({0, 1, 2}, seed, kLong);
  for (std::uint64_t i = 0; i < 5; ++i) trio.exchange({0, 2}, seed + 1 + i, kShort);
  expect("late: masks", trio.sees(0, 1) && trio.sees(2, 1) && !trio.sees(0, 2));
  // What they sent to it before they knew, and then: nobody sends to it any more, and it does not
  // wait for its own deadline.
  (void)trio.dispatch({1}, seed + 6, kLong);
  expect("not evicted yet", trio.run().alarm(1).masked == 0);
  const LatencyWorld alone = trio.dispatch({1}, seed + 7, kLong);
  trio.run().check_dispatch(alone, 1, 0);
  expect("evicted", trio.run().alarm(1).behind != 0 && trio.run().alarm(1).masked == 2);
  expect("evicted: masks", trio.sees(1, 0) && trio.sees(1, 2));
  for (std::uint64_t round = 0; round < 3; ++round) {
    trio.rejoin({0, 1, 2}, kLong);
    for (int r = 0; r < 3; ++r) {
      expect("rejoin failed", trio.group().failure(r)->written == 0,
             describe(*trio.group().failure(r)));
      expect("rejoined", trio.run().alarm(r).behind == 0);
      for (int peer = 0; peer < 3; ++peer) expect("a mask is left", !trio.sees(r, peer));
      expect("generations differ", trio.run().generation(r) == trio.run().generation(0));
    }
    const std::uint64_t before = trio.run().generation(0);
    expect("generations go back", before > 6);
    for (std::uint64_t i = 0; i < 5; ++i) trio.exchange({0, 1, 2}, seed + 20 + i, kLong);
    expect("generations do not add up", trio.run().generation(1) == before + 5);
  }
  for (int r = 0; r < 3; ++r) {
    expect("masks after rejoining", trio.run().alarm(r).masked == (r == 1 ? 2u : 1u));
  }
  // One does not come: the others say so, and a later attempt of all is good.
  trio.rejoin({0, 2}, kShort);
  for (const int r : {0, 2}) {
    const Failure& failure = *trio.group().failure(r);
    expect("a rejoin of two", failure.reason == Reason::deadline && failure.peer == 1,
           describe(failure));
  }
  trio.group().clear_failures();
  trio.rejoin({0, 1, 2}, kLong);
  for (int r = 0; r < 3; ++r) {
    expect("a second attempt", trio.group().failure(r)->written == 0);
  }
  trio.exchange({0, 1, 2}, seed + 40, kLong);
  std::printf("rejoin: as expected\n");
}

/// The host masks and unmasks; in step on all ranks.
void test_host_masks(std::uint64_t seed) {
  Trio trio;
  for (std::uint64_t i = 0; i < 2; ++i) {
    trio.exchange({0, 1, 2}, seed + 10 * i, kLong);
    for (const int r : {0, 2}) trio.set_mask(r, 1, true);
    expect("masks of the host", trio.sees(0, 1) && trio.sees(2, 1) && !trio.sees(0, 2));
    trio.exchange({0, 2}, seed + 10 * i + 1, kLong);
    for (const int r : {0, 2}) trio.set_mask(r, i == 0 ? 1 : -1, false);
    expect("masks are left", !trio.sees(0, 1) && !trio.sees(2, 1));
    trio.rejoin({0, 1, 2}, kLong);
    trio.exchange({0, 1, 2}, seed + 10 * i + 2, kLong);
  }
  for (int r = 0; r < 3; ++r) expect("no deadline", trio.run().alarm(r).masked == 0);
  std::printf("masks of the host: as expected\n");
}

/// Masked at a dispatch and no longer at its combine: there are no sums to wait for, and who was
/// evicted is so no more when both sides have taken their masks back.
void test_taken_back(std::uint64_t seed) {
  Trio trio;
  trio.exchange({0, 1, 2}, seed, kLong);
  for (const int r : {0, 2}) trio.set_mask(r, 1, true);
  const LatencyWorld world = trio.dispatch({0, 1, 2}, seed + 1, kLong);
  expect("evicted", trio.run().alarm(1).behind != 0 && trio.sees(1, 0) && trio.sees(1, 2));
  trio.set_mask(1, 0, false);
  expect("behind still", trio.run().alarm(1).behind != 0);
  for (const int r : {0, 2}) trio.set_mask(r, 1, false);
  trio.set_mask(1, -1, false);
  expect("behind no more", trio.run().alarm(1).behind == 0);
  LatencyWorld seen = world;
  seen.inputs[1] = {};
  for (const int r : {0, 2}) trio.run().check_dispatch(seen, r, 0);
  trio.run().upload_results(seen, 0);
  trio.combine({0, 1, 2}, kLong);
  for (int r = 0; r < 3; ++r) {
    for (int peer = 0; peer < 3; ++peer) expect("masked by a combine", !trio.sees(r, peer));
  }
  for (const int r : {0, 2}) trio.run().check_combine(seen, r, 0, kPath, {1, -1});
  for (std::uint64_t i = 0; i < 3; ++i) trio.exchange({0, 1, 2}, seed + 2 + i, kLong);
  std::printf("masks taken back: as expected\n");
}

/// The CPU finds rank 1 dead after it has offered to rejoin: that is not forgotten.
void test_dead_in_rejoin(std::uint64_t seed) {
  Trio trio;
  trio.exchange({0, 1, 2}, seed, kLong);
  trio.run().set_gone(0, 1, Gone::dead);
  trio.group().launch([&](int r) {
    if (r == 0) hold<<<1, 1, 0, trio.group().stream(r)>>>(100'000'000);
  });
  trio.rejoin({0, 1, 2}, kLong);
  expect("dead in a rejoin", trio.sees(0, 1) && !trio.sees(0, 2));
  std::printf("dead in a rejoin: as expected\n");
}

/// Rank 1 comes 3 ms late: the others have waited for it, and hardly for each other.
void test_waits(std::uint64_t seed) {
  Trio trio(true);  // else sums wait for the weights of rank 1
  KernelGroup& group = trio.group();
  LatencyRun& run = trio.run();
  trio.exchange({0, 1, 2}, seed, kLong);
  const LatencyWorld world = make_latency_world(small_latency_case(), seed + 1, {20, 20, 20});
  run.upload(world, 0);
  run.upload_results(world, 0);
  const auto waited = [&](const std::function<void(int, std::uint64_t*)>& call) {
    group.launch([&](int r) {
      FERRY_CUDA_CHECK(cudaMemsetAsync(run.wait_ns(r), 0, 3 * 8, group.stream(r)));
    });
    group.wait_well();
    group.launch([&](int r) {
      if (r == 1) hold<<<1, 1, 0, group.stream(r)>>>(3'000'000);
      call(r, run.view(r).words->wait_ns);
      auto* sums = reinterpret_cast<std::int64_t*>(run.wait_ns(r));
      FERRY_CUDA_CHECK(launch_latency_waits(run.view(r).words, sums, 3, group.stream(r)));
      FERRY_CUDA_CHECK(launch_latency_waits(run.view(r).words, sums, 3, group.stream(r)));
    });
    group.wait_well();
    for (const int r : {0, 2}) {
      const auto ns = group.download<std::int64_t>(r, run.wait_ns(r), 3);
      const std::string all = std::to_string(ns[0]) + " " + std::to_string(ns[1]) + " " +
                              std::to_string(ns[2]) + " on rank " + std::to_string(r);
      // Launches one after another cost some microseconds each.
      expect("waits", ns[1] > 1'500'000 && ns[1] < 1'000'000'000, all);
      expect("waits for others", ns[2 - static_cast<std::size_t>(r)] < ns[1] - 500'000, all);
    }
  };
  waited([&](int r, std::uint64_t* wait_ns) {
    LatencyDispatchParameters p = run.dispatch(r, 0);
    p.wait_ns = wait_ns;
    FERRY_CUDA_CHECK(launch_latency_dispatch(p, group.stream(r)));
  });
  for (int r = 0; r < 3; ++r) run.check_dispatch(world, r, 0);
  waited([&](int r, std::uint64_t* wait_ns) {
    LatencyCombineParameters p = run.combine(r, 0, kPath);
    p.wait_ns = wait_ns;
    FERRY_CUDA_CHECK(launch_latency_combine(p, group.stream(r)));
  });
  for (int r = 0; r < 3; ++r) run.check_combine(world, r, 0, kPath);
  std::printf("waits: as expected\n");
}

/// Rank 0 fails while it delivers: rank 1 has its rows, rank 2 has not, and is a call behind when
/// it gives up. Then it computes for a while; rank 1, which waits for it, must not mask it.
void test_held_up(std::uint64_t seed) {
  static constexpr std::uint32_t kMasked = 0xffffffff;
  Trio trio(true);
  KernelGroup& group = trio.group();
  LatencyRun& run = trio.run();
  trio.exchange({0, 1, 2}, seed, kLong);
  group.launch([&](int r) {  // rank 2 is not told
    if (r != 0) return;
    FERRY_CUDA_CHECK(cudaMemcpyAsync(&run.view(0).words->masked[2], &kMasked, sizeof(kMasked),
                                     cudaMemcpyHostToDevice, group.stream(r)));
  });
  group.wait_well();
  const LatencyWorld world = make_latency_world(small_latency_case(), seed + 1, {20, 20, 20});
  run.upload(world, 0);
  group.launch([&](int r) {
    LatencyDispatchParameters dispatch = run.dispatch(r, 0);
    dispatch.view.group.deadline_ns = kShort;
    FERRY_CUDA_CHECK(launch_latency_dispatch(dispatch, group.stream(r)));
    if (r == 0) return;
    // Ranks are launched one after another: rank 1's deadline must not begin before rank 2's.
    hold<<<1, 1, 0, group.stream(r)>>>(kShort / (r == 1 ? 8 : 4));
    LatencyCombineParameters combine = run.combine(r, 0, kPath);
    combine.view.group.deadline_ns = kShort;
    FERRY_CUDA_CHECK(launch_latency_combine(combine, group.stream(r)));
  });
  group.wait(10);
  for (const int r : {1, 2}) {
    expect("held up: a mask is fatal", group.fatal(r).written == 0, describe(group.fatal(r)));
    expect("held up: the one that failed", trio.sees(r, 0));
    expect("held up: the one that was held up", !trio.sees(r, 3 - r));
  }
  std::printf("held up: as expected\n");
}

}  // namespace

void run_mask_tests(std::uint64_t seed) {
  test_dead(seed);
  test_rejoin(seed);
  test_host_masks(seed);
  test_taken_back(seed);
  test_dead_in_rejoin(seed);
  test_waits(seed);
  test_held_up(seed);
  std::fflush(stdout);
}

}  // namespace ferry::cuda::test
