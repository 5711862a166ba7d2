// Latency dispatch and combine on GPUs against a naive reading of their definition: hooks, graphs,
// masks; times.
//   kernel_latency_test [--seed N] [--repeat N] [--replays N] [--bench | --search [--tokens N]
//   [--blocks N]] [--only matrix | full | graphs | failures | masks]
#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <string>

#include "cuda/kernels/load.hpp"
#include "latency_case.hpp"

namespace ferry::cuda::test {

namespace {

void load_kernels() {
  for (int i = 0; i < gpu_count(); ++i) {
    FERRY_CUDA_CHECK(cudaSetDevice(i));
    FERRY_CUDA_CHECK(load_latency_kernels());
    FERRY_CUDA_CHECK(load_barrier_kernels());
  }
}

GroupOptions options_for(const LatencyCase& c) {
  return {c.ranks, latency_arena_bytes(c) + (std::size_t{8} << 20), 4096, 20'000'000'000};
}

LatencyCase random_case(int ranks, std::int64_t hidden, Random& random) {
  LatencyCase c;
  c.ranks = ranks;
  const int topks[] = {1, 2, 8, 9, 32};
  c.topk = topks[random.below(5)];
  c.call_topk = random.below(3) == 0 ? 1 + static_cast<int>(random.below(c.topk)) : c.topk;
  const std::int64_t experts[] = {ranks * 3 + 1, 64, ranks > 1 ? ranks - 1 : 1, 9, ranks};
  c.experts = experts[random.below(5)];
  const Dtype dtypes[] = {Dtype::bf16, Dtype::f32, Dtype::f16};
  c.dtype = dtypes[random.below(3)];
  c.format = static_cast<LatencyFormat>(random.below(4));
  c.hidden = hidden;
  c.capacity = 1 + random.below(hidden > 2000 ? 6 : 50);
  c.wide = random.below(2) == 0;
  c.weights_with_dispatch = random.below(2) == 0;
  c.routes = static_cast<Routes>(random.below(5));
  c.blocks = 1 + static_cast<int>(random.below(12));
  const int fews[] = {0, 3, kFewTokens};
  c.few = fews[random.below(3)];
  return c;
}

void launch_dispatch_all(KernelGroup& group, LatencyRun& run, int handle, Halves halves) {
  group.launch([&](int r) {
    LatencyDispatchParameters p = run.dispatch(r, handle);
    p.halves = halves;
    p.waits = run.waits(r);
    FERRY_CUDA_CHECK(launch_latency_dispatch(p, group.stream(r)));
  });
}

void launch_combine_all(KernelGroup& group, LatencyRun& run, int handle, CombinePath path,
                        Halves halves, bool timed = false) {
  group.launch([&](int r) {
    LatencyCombineParameters p = run.combine(r, handle, path);
    p.halves = halves;
    if (timed) p.waits = run.waits(r);  // a kernel of its own
    FERRY_CUDA_CHECK(launch_latency_combine(p, group.stream(r)));
  });
}

CombinePath path_of(std::uint64_t bit) {
  return bit % 2 == 0 ? CombinePath::per_rank : CombinePath::per_slot;
}

void exchange_once(KernelGroup& group, LatencyRun& run, const LatencyCase& c, std::uint64_t seed) {
  const int handle = static_cast<int>(seed % 2);
  const LatencyWorld world = make_latency_world(c, seed);
  run.upload(world, handle);
  run.poison(handle);
  launch_dispatch_all(group, run, handle, Halves::both);
  group.wait_well();
  for (int r = 0; r < c.ranks; ++r) run.check_dispatch(world, r, handle);
  run.upload_results(world, handle);
  const CombinePath path = path_of(seed / 2);
  launch_combine_all(group, run, handle, path, Halves::both, seed / 4 % 2 == 0);
  group.wait_well();
  for (int r = 0; r < c.ranks; ++r) run.check_combine(world, r, handle, path);
}

/// Two generations in flight, received and combined in either order.
void exchange_hooked(KernelGroup& group, LatencyRun& run, const LatencyCase& c,
                     std::uint64_t seed) {
  const LatencyWorld worlds[2] = {make_latency_world(c, seed), make_latency_world(c, seed + 1)};
  for (const int h : {0, 1}) {
    run.upload(worlds[h], h);
    run.poison(h);
    launch_dispatch_all(group, run, h, Halves::send);
  }
  const int first = static_cast<int>(seed / 2 % 2);
  for (const int h : {first, 1 - first}) launch_dispatch_all(group, run, h, Halves::receive);
  group.wait_well();
  for (const int h : {0, 1}) {
    for (int r = 0; r < c.ranks; ++r) run.check_dispatch(worlds[h], r, h);
    run.upload_results(worlds[h], h);
  }
  const CombinePath path = path_of(seed / 4);
  for (const int h : {1 - first, first}) launch_combine_all(group, run, h, path, Halves::send);
  for (const int h : {0, 1}) launch_combine_all(group, run, h, path, Halves::receive);
  group.wait_well();
  for (const int h : {0, 1}) {
    for (int r = 0; r < c.ranks; ++r) run.check_combine(worlds[h], r, h, path);
  }
}

void run_case(const LatencyCase& c, std::uint64_t seed) {
  KernelGroup group(options_for(c));
  LatencyRun run(group, c);
  for (std::uint64_t i = 0; i < 3; ++i) exchange_once(group, run, c, seed + i);
  exchange_hooked(group, run, c, seed + 7);
  // Sent, and dropped without a look: the next ones are whole.
  launch_dispatch_all(group, run, 0, Halves::send);
  exchange_hooked(group, run, c, seed + 11);
  exchange_once(group, run, c, seed + 13);
  for (int r = 0; r < c.ranks; ++r) {
    if (run.generation(r) != 9 || run.alarm(r).masked != 0) stop("generations do not add up");
  }
}

void run_matrix(std::uint64_t seed, int repeat) {
  int cases = 0;
  for (const int ranks : {1, 2, 3, 4, 8}) {
    for (int round = 0; round < repeat; ++round) {
      for (const std::int64_t hidden : {16, 24, 520, 1024, 2880, 7168, 9000}) {
        const std::uint64_t own = seed * 1000003 + static_cast<std::uint64_t>(cases++) * 64;
        Random random(own);
        run_case(random_case(ranks, hidden, random), own);
      }
    }
    std::printf("ranks %d: %d cases so far\n", ranks, cases);
    std::fflush(stdout);
  }
}

LatencyCase full_case(int ranks) {
  LatencyCase c;
  c.ranks = ranks;
  c.topk = c.call_topk = 8;
  c.experts = 256;
  c.hidden = 7168;
  c.capacity = 128;
  c.format = LatencyFormat::e4m3;
  c.blocks = ranks > gpu_count() ? 16 : 2 * 132;
  return c;
}

void run_full() {
  const int ranks = std::max(2, gpu_count());
  for (const LatencyFormat format : {LatencyFormat::e4m3, LatencyFormat::as_is}) {
    LatencyCase c = full_case(ranks);
    c.format = format;
    run_case(c, 5);
  }
  for (const LatencyFormat format :
       {LatencyFormat::e4m3, LatencyFormat::as_is, LatencyFormat::e4m3_packed}) {
    for (const std::int64_t capacity : {1, kFewTokens}) {
      LatencyCase c = full_case(ranks);
      c.format = format;
      c.capacity = capacity;
      c.few = kFewTokens;
      for (const bool early : {false, true}) {
        c.weights_with_dispatch = early;
        run_case(c, 6);
      }
    }
  }
  std::printf("full shape, %d ranks: good\n", ranks);
  std::fflush(stdout);
}

/// One graph of two exchanges, replayed with other routes and tokens; eager calls in between.
/// Every `sample`-th replay is compared.
void run_graphs(std::uint64_t seed, int replays, int sample) {
  LatencyCase c;
  c.ranks = std::max(2, gpu_count());
  c.topk = c.call_topk = 4;
  c.experts = 3 * c.ranks;
  c.hidden = 1040;
  c.capacity = 24;
  c.few = kFewTokens;
  c.format = LatencyFormat::e4m3;
  c.blocks = 8;
  KernelGroup group(options_for(c));
  LatencyRun run(group, c);
  std::vector<std::int64_t> tokens;  // fixed in a graph
  for (int r = 0; r < c.ranks; ++r) tokens.push_back(r == 1 ? 0 : c.capacity - r);
  run.upload(make_latency_world(c, seed, tokens), 0);
  run.upload(make_latency_world(c, seed, tokens), 1);
  std::vector<cudaGraphExec_t> graphs;
  group.launch([&](int r) {
    cudaGraph_t graph = nullptr;
    cudaGraphExec_t made = nullptr;
    FERRY_CUDA_CHECK(cudaStreamBeginCapture(group.stream(r), cudaStreamCaptureModeThreadLocal));
    for (const int h : {0, 1}) {
      FERRY_CUDA_CHECK(launch_latency_dispatch(run.dispatch(r, h), group.stream(r)));
      FERRY_CUDA_CHECK(launch_latency_combine(run.combine(r, h, path_of(1)), group.stream(r)));
      FERRY_CUDA_CHECK(launch_latency_dispatch(run.dispatch(r, h), group.stream(r)));
      FERRY_CUDA_CHECK(launch_latency_combine(run.combine(r, h, path_of(0)), group.stream(r)));
    }
    FERRY_CUDA_CHECK(cudaStreamEndCapture(group.stream(r), &graph));
    FERRY_CUDA_CHECK(cudaGraphInstantiate(&made, graph, 0));
    FERRY_CUDA_CHECK(cudaGraphDestroy(graph));
    graphs.push_back(made);
  });
  const auto replay = [&] {
    group.launch([&](int r) {
      FERRY_CUDA_CHECK(cudaGraphLaunch(graphs[static_cast<std::size_t>(r)], group.stream(r)));
    });
  };
  for (int i = 0; i < replays; ++i) {
    if (i % sample != 0) {
      replay();
      continue;
    }
    group.wait_well();
    const std::uint64_t own = seed + 10 * static_cast<std::uint64_t>(i);
    const LatencyWorld worlds[2] = {make_latency_world(c, own, tokens),
                                    make_latency_world(c, own + 1, tokens)};
    for (const int h : {0, 1}) {
      run.upload(worlds[h], h);
      run.upload_results(worlds[h], h);
      run.poison(h);
    }
    replay();
    group.wait_well();
    for (const int h : {0, 1}) {
      for (int r = 0; r < c.ranks; ++r) {
        run.check_dispatch(worlds[h], r, h);
        run.check_combine(worlds[h], r, h, path_of(0));
      }
    }
    launch_dispatch_all(group, run, 1, Halves::both);  // eager, in between
  }
  group.wait_well();
  const auto samples = static_cast<std::uint64_t>((replays + sample - 1) / sample);
  for (int r = 0; r < c.ranks; ++r) {
    const std::uint64_t expected = 4 * static_cast<std::uint64_t>(replays) + samples;
    if (run.generation(r) != expected) stop("generations drift");
    FERRY_CUDA_CHECK(cudaGraphExecDestroy(graphs[static_cast<std::size_t>(r)]));
  }
  std::printf("graphs: %d replays, %llu compared\n", replays,
              static_cast<unsigned long long>(samples));
  std::fflush(stdout);
}

/// Rank 1 does not come, or its rows do not: the others mask it, and go on.
void test_masks(bool header_comes, int few) {
  LatencyCase c = small_latency_case();
  c.few = few;
  if (few > 0) c.capacity = few;
  GroupOptions options = options_for(c);
  options.deadline_ns = 30'000'000;
  KernelGroup group(options);
  LatencyRun run(group, c);
  exchange_once(group, run, c, 3);  // all is well
  const Absent absent{header_comes ? -1 : 1, header_comes ? 1 : -1};
  std::vector<std::int64_t> tokens{c.capacity / 2, header_comes ? c.capacity / 3 : 0, c.capacity};
  for (const std::uint64_t again : {0, 1, 2}) {
    const CombinePath path = path_of(again);
    const LatencyWorld world = make_latency_world(c, 40 + again, tokens);
    run.upload(world, 0);
    run.poison(0);
    group.launch([&](int r) {
      if (r == 1 && (!header_comes || again > 0)) return;
      LatencyDispatchParameters p = run.dispatch(r, 0);
      if (r == 1) {  // its tags go astray
        p.halves = Halves::send;
        p.view.layout.row_tags = p.view.layout.bytes;
        p.view.layout.few_rows = p.view.layout.bytes;
      }
      FERRY_CUDA_CHECK(launch_latency_dispatch(p, group.stream(r)));
    });
    group.wait(5);
    if (again > 0) tokens[1] = 0;  // masked before: it has no rows at all
    LatencyWorld seen = world;
    if (again > 0) {
      seen.inputs[1] = {};
    }
    for (const int r : {0, 2}) {
      expect("a mask is fatal", group.fatal(r).written == 0, describe(group.fatal(r)));
      expect("masked", run.masked(r, 1) && !run.masked(r, 0) && !run.masked(r, 2));
      expect("alarm", run.alarm(r).masked == 1, std::to_string(run.alarm(r).masked));
      run.check_dispatch(seen, r, 0, absent);
    }
    run.upload_results(seen, 0);
    group.launch([&](int r) {
      if (r == 1) return;
      FERRY_CUDA_CHECK(launch_latency_combine(run.combine(r, 0, path), group.stream(r)));
    });
    group.wait(5);
    for (const int r : {0, 2}) run.check_combine(seen, r, 0, path, absent);
  }
  std::printf("masks, %s, few %d: as expected\n", header_comes ? "rows missing" : "rank missing",
              few);
}

/// Rank 1 sends its rows and then no sums.
void test_missing_sums(int few) {
  LatencyCase c = small_latency_case();
  c.few = few;
  if (few > 0) c.capacity = few;
  GroupOptions options = options_for(c);
  options.deadline_ns = 30'000'000;
  KernelGroup group(options);
  LatencyRun run(group, c);
  const LatencyWorld world = make_latency_world(c, 9, {c.capacity, c.capacity / 3, c.capacity - 2});
  run.upload(world, 1);
  launch_dispatch_all(group, run, 1, Halves::both);
  group.wait_well();
  for (int r = 0; r < 3; ++r) run.check_dispatch(world, r, 1);
  run.upload_results(world, 1);
  group.launch([&](int r) {
    LatencyCombineParameters p = run.combine(r, 1, CombinePath::per_rank);
    if (r == 1) {
      p.halves = Halves::send;
      // The tags of the first halves of its rows come, those of the second go astray.
      p.view.layout.sum_tags = p.view.layout.bytes;
      p.view.layout.few_sums = p.view.layout.bytes;
    }
    FERRY_CUDA_CHECK(launch_latency_combine(p, group.stream(r)));
  });
  group.wait(5);
  for (const int r : {0, 2}) {
    expect("missing sums", run.masked(r, 1) && run.alarm(r).masked == 1);
    run.check_combine(world, r, 1, CombinePath::per_rank, {-1, 1});
  }
  std::printf("missing sums, few %d: as expected\n", few);
}

void expect_failure(const char* what, const Failure& got, Reason reason, int peer) {
  if (got.written != 0 && got.reason == reason && got.peer == peer) return;
  stop(std::string(what) + ": " + describe(got));
}

void test_failures() {
  const LatencyCase c = small_latency_case();
  GroupOptions options = options_for(c);
  options.deadline_ns = 30'000'000;
  {  // without masks, a missing rank ends the group
    KernelGroup group(options);
    LatencyRun run(group, c);
    exchange_once(group, run, c, 2);
    run.upload(make_latency_world(c, 1, {3, 4, 5}), 0);
    for (int again = 0; again < 2; ++again) {
      group.launch([&](int r) {
        if (r == 1) return;
        LatencyDispatchParameters p = run.dispatch(r, 0);
        p.view.alarm = nullptr;
        FERRY_CUDA_CHECK(launch_latency_dispatch(p, group.stream(r)));
      });
      group.wait(5);
    }
    for (const int r : {0, 2}) expect_failure("deadline", group.fatal(r), Reason::deadline, 1);
    // None of the group's calls has ended: latency calls do not count among them.
    for (const int r : {0, 2}) expect("calls ended", group.fatal(r).written == 1);
  }
  {  // formats that differ
    options.deadline_ns = 5'000'000'000;
    KernelGroup group(options);
    LatencyRun run(group, c);
    run.upload(make_latency_world(c, 1, {3, 4, 5}), 0);
    group.launch([&](int r) {
      LatencyDispatchParameters p = run.dispatch(r, 0);
      if (r == 2) p.format = LatencyFormat::e4m3_pow2;
      FERRY_CUDA_CHECK(launch_latency_dispatch(p, group.stream(r)));
    });
    group.wait(10);
    expect_failure("mismatch", group.fatal(0), Reason::mismatch, 2);
  }
  {  // one rank brings weights with its dispatch, the others do not
    KernelGroup group(options);
    LatencyRun run(group, c);
    run.upload(make_latency_world(c, 1, {3, 4, 5}), 0);
    group.launch([&](int r) {
      LatencyDispatchParameters p = run.dispatch(r, 0);
      if (r == 2) p.slot_weights = run.slot_weights(r, 0);
      FERRY_CUDA_CHECK(launch_latency_dispatch(p, group.stream(r)));
    });
    group.wait(10);
    expect_failure("weights", group.fatal(0), Reason::mismatch, 2);
  }
  for (const int few : {0, 8}) {  // paths that differ, one rank against two
    LatencyCase own = c;
    own.few = few;
    KernelGroup group(options_for(own));
    LatencyRun run(group, own);
    const LatencyWorld world =
        few > 0 ? make_latency_world(own, 1, {4, 4, 4}) : make_latency_world(own, 1, {20, 20, 20});
    run.upload(world, 0);
    launch_dispatch_all(group, run, 0, Halves::both);
    group.wait_well();
    group.launch([&](int r) {
      const CombinePath path = r == 2 ? CombinePath::per_slot : CombinePath::per_rank;
      LatencyCombineParameters p = run.combine(r, 0, path);
      p.view.alarm = nullptr;
      p.view.group.deadline_ns = 300'000'000;
      FERRY_CUDA_CHECK(launch_latency_combine(p, group.stream(r)));
    });
    group.wait(10);
    for (int r = 0; r < 3; ++r) {
      const Reason reason = group.fatal(r).reason;
      expect(
          "paths that differ",
          group.fatal(r).written != 0 && (reason == Reason::mismatch || reason == Reason::deadline),
          describe(group.fatal(r)));
    }
    expect("which is told", group.fatal(0).reason == Reason::mismatch ||
                                group.fatal(1).reason == Reason::mismatch ||
                                group.fatal(2).reason == Reason::mismatch);
  }
  {  // a route that is none: its rank sends nothing, all are told, the next call is whole
    KernelGroup group(options);
    LatencyRun run(group, c);
    LatencyWorld world = make_latency_world(c, 1, {3, 4, 5});
    world.inputs[1].ids[3 * 3 + 1] = c.experts;
    run.upload(world, 0);
    run.poison(0);
    launch_dispatch_all(group, run, 0, Halves::both);
    group.wait(10);
    LatencyWorld seen = world;
    seen.inputs[1] = {};
    for (int r = 0; r < 3; ++r) {
      expect_failure("bad route", *group.failure(r), Reason::bad_route, 1);
      expect("detail", group.failure(r)->detail == 3 * 64 + 1);
      run.check_dispatch(seen, r, 0);
    }
    launch_combine_all(group, run, 0, CombinePath::per_rank, Halves::both);
    group.clear_failures();
    // Of two such ranks the first is told of.
    LatencyWorld two = world;
    two.inputs[2].ids[0] = c.experts;
    run.upload(two, 0);
    launch_dispatch_all(group, run, 0, Halves::both);
    group.wait(10);
    for (int r = 0; r < 3; ++r) {
      expect_failure("two bad routes", *group.failure(r), Reason::bad_route, 1);
      expect("detail", group.failure(r)->detail == 3 * 64 + 1);
    }
    launch_combine_all(group, run, 0, CombinePath::per_rank, Halves::both);
    group.clear_failures();
    exchange_once(group, run, c, 6);
    // One expert named more often than its block has places.
    world.inputs[1] = make_latency_world(c, 2, {0, c.capacity, 0}).inputs[1];
    for (std::int64_t t = 0; t < c.capacity; ++t) {
      world.inputs[1].ids[KernelGroup::index(static_cast<int>(t * 3))] = 4;
      if (t == 5) world.inputs[1].ids[KernelGroup::index(static_cast<int>(t * 3 + 1))] = 4;
    }
    run.upload(world, 0);
    run.poison(0);
    launch_dispatch_all(group, run, 0, Halves::both);
    group.wait(10);
    for (int r = 0; r < 3; ++r) {
      expect_failure("crowded", *group.failure(r), Reason::too_many, 1);
      run.check_dispatch(seen, r, 0);
    }
    group.clear_failures();
    exchange_once(group, run, c, 8);
    for (int r = 0; r < 3; ++r) expect("no masks", run.alarm(r).masked == 0);
  }
  std::printf("failures: as expected\n");
}

}  // namespace

int run_main(int argc, char** argv) {
  std::uint64_t seed = 1;
  int repeat = 1, replays = 400;
  bool bench = false, search = false;
  std::string only;
  SearchOnly search_only;
  for (int i = 1; i < argc; ++i) {
    const std::string word = argv[i];
    if (word == "--bench") bench = true;
    if (word == "--search") search = true;
    if (word == "--only" && i + 1 < argc) only = argv[++i];
    if (word == "--seed" && i + 1 < argc) seed = std::strtoull(argv[++i], nullptr, 10);
    if (word == "--tokens" && i + 1 < argc) search_only.tokens = std::atoi(argv[++i]);
    if (word == "--blocks" && i + 1 < argc) search_only.blocks = std::atoi(argv[++i]);
    if (word == "--repeat" && i + 1 < argc) repeat = std::atoi(argv[++i]);
    if (word == "--replays" && i + 1 < argc) replays = std::atoi(argv[++i]);
  }
  prepare_process();
  std::printf("seed %llu, %d GPUs\n", static_cast<unsigned long long>(seed), gpu_count());
  load_kernels();
  if (bench || search) {
    run_latency_bench(seed, search, search_only);
  } else {
    const auto wanted = [&](const char* name) { return only.empty() || only == name; };
    if (wanted("matrix")) run_matrix(seed, repeat);
    if (wanted("full")) run_full();
    if (wanted("graphs")) run_graphs(seed, replays, 20);
    if (wanted("failures")) test_failures();
    if (wanted("masks")) {
      for (const int few : {0, kFewTokens}) {
        test_masks(false, few), test_masks(true, few), test_missing_sums(few);
      }
      run_mask_tests(seed);
    }
  }
  std::printf("OK\n");
  return 0;
}

}  // namespace ferry::cuda::test

int main(int argc, char** argv) {
  return ferry::cuda::test::run_main(argc, argv);
}
