// Latency dispatch and combine on GPUs against a naive reading of their definition: hooks, graphs,
// masks.
//   kernel_latency_test [--seed N] [--repeat N] [--replays N]
//                       [--only matrix | full | graphs | failures | masks]
//   kernel_latency_test --small [--ranks N]     a few short cases, for sanitize.sh
#include <algorithm>
#include <cstdio>
#include <string>

#include "cuda/kernels/base/load.hpp"
#include "latency_exchange.hpp"

namespace ferry::cuda::test {

namespace {

void load_kernels() {
  for (int i = 0; i < gpu_count(); ++i) {
    FERRY_CUDA_CHECK(cudaSetDevice(i));
    FERRY_CUDA_CHECK(load_latency_kernels());
    FERRY_CUDA_CHECK(load_barrier_kernels());
  }
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
  const int ll_tokens[] = {0, 3, kLLTokens};
  c.ll = ll_tokens[random.below(3)];
  c.ll128 = random.below(2) == 0;
  return c;
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
  // Sent, and dropped unread: the next ones are whole.
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

/// Every way to send and every format, a few tokens each.
void run_small(std::uint64_t seed, int ranks) {
  int cases = 0;
  for (const LatencyFormat format : {LatencyFormat::as_is, LatencyFormat::e4m3,
                                     LatencyFormat::e4m3_pow2, LatencyFormat::e4m3_packed}) {
    for (const auto& [ll, ll128] : {std::pair{0, false}, {0, true}, {kLLTokens, false}}) {
      LatencyCase c;
      c.ranks = ranks;
      c.topk = c.call_topk = 4;
      c.experts = 3 * ranks;
      c.hidden = cases % 2 == 0 ? 264 : 1024;
      c.capacity = ll == 0 ? 12 : ll;
      c.ll = ll;
      c.ll128 = ll128;
      c.format = format;
      c.weights_with_dispatch = cases % 2 == 0;
      c.blocks = 4;
      run_case(c, seed + static_cast<std::uint64_t>(cases++) * 64);
    }
  }
  std::printf("%d ranks: %d small cases as expected\nPASSED\n", ranks, cases);
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
    for (const bool ll128 : {false, true}) {
      LatencyCase c = full_case(ranks);
      c.format = format;
      c.ll128 = ll128;
      run_case(c, 5);
      c.blocks = c.blocks * 3 / 4;  // some SMs have two, some one
      run_case(c, 7);
    }
  }
  for (const LatencyFormat format :
       {LatencyFormat::e4m3, LatencyFormat::as_is, LatencyFormat::e4m3_packed}) {
    for (const std::int64_t capacity : {1, kLLTokens}) {
      LatencyCase c = full_case(ranks);
      c.format = format;
      c.capacity = capacity;
      c.ll = kLLTokens;
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
void run_graphs(std::uint64_t seed, int replays, int sample, bool ll128) {
  LatencyCase c;
  c.ranks = std::max(2, gpu_count());
  c.topk = c.call_topk = 4;
  c.experts = 3 * c.ranks;
  c.hidden = 1040;
  c.capacity = 24;
  c.ll = kLLTokens;
  c.ll128 = ll128;
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
  std::printf("graphs, ll128 %d: %d replays, %llu compared\n", ll128, replays,
              static_cast<unsigned long long>(samples));
  std::fflush(stdout);
}

}  // namespace

int run_main(int argc, char** argv) {
  const auto number = [&](const char* name, int otherwise) {
    return static_cast<int>(option(argc, argv, name, otherwise));
  };
  const auto seed = static_cast<std::uint64_t>(option(argc, argv, "--seed", 1));
  std::string only;
  for (int i = 1; i + 1 < argc; ++i) {
    if (std::string(argv[i]) == "--only") only = argv[i + 1];
  }
  prepare_process();
  std::printf("seed %llu, %d GPUs\n", static_cast<unsigned long long>(seed), gpu_count());
  load_kernels();
  if (has_option(argc, argv, "--small")) {
    run_small(seed, number("--ranks", 1));
    return 0;
  }
  const auto wanted = [&](const char* name) { return only.empty() || only == name; };
  if (wanted("matrix")) run_matrix(seed, number("--repeat", 1));
  if (wanted("full")) run_full();
  for (const bool ll128 : {false, true}) {
    if (wanted("graphs")) run_graphs(seed, number("--replays", 400), 20, ll128);
  }
  if (wanted("failures")) run_failure_tests();
  if (wanted("masks")) {
    run_missing_tests();
    run_mask_tests(seed);
  }
  std::printf("OK\n");
  return 0;
}

}  // namespace ferry::cuda::test

int main(int argc, char** argv) {
  return ferry::cuda::test::run_main(argc, argv);
}
