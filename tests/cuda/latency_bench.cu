// Times of latency dispatch and combine: periods inside graphs of chained calls, single calls,
// halves.
#include <algorithm>
#include <cstdio>
#include <functional>
#include <vector>

#include "cuda/kernels/base/barrier.hpp"
#include "latency_case.hpp"

namespace ferry::cuda::test {

namespace {

constexpr int kChain = 20;
constexpr int kWarmUp = 5;
constexpr int kSamples = 200;
constexpr int kBusyVectors = 1 << 20;
constexpr int kBusySteps = 60;

__global__ void spin(std::uint64_t ns) {
  std::uint64_t start, now;
  asm volatile("mov.u64 %0, %%globaltimer;" : "=l"(start));
  do {
    asm volatile("mov.u64 %0, %%globaltimer;" : "=l"(now));
  } while (now - start < ns);
}

/// As long and as broad as a GEMM of a decode step: all SMs compute, and read memory.
__global__ void __launch_bounds__(1024) busy(const float4* data, int steps, float* out) {
  float4 sum{};
  const int threads = static_cast<int>(gridDim.x * blockDim.x);
  int at = static_cast<int>(blockIdx.x * blockDim.x + threadIdx.x);
  for (int i = 0; i < steps; ++i, at += threads) {
    const float4 more = __ldg(data + at % kBusyVectors);
#pragma unroll
    for (int n = 0; n < 32; ++n) {
      sum.x = fmaf(sum.x, more.x, more.y);
      sum.y = fmaf(sum.y, more.y, more.z);
      sum.z = fmaf(sum.z, more.z, more.w);
      sum.w = fmaf(sum.w, more.w, more.x);
    }
  }
  if (sum.x + sum.y + sum.z + sum.w == 1.25f) *out = 0;  // never, and nobody knows
}

using Calls = std::function<void(int rank)>;

/// A bench of one group: events and a gate.
class Clock {
 public:
  explicit Clock(KernelGroup& group) : group_(group) {
    group.launch([&](int) {
      for (auto* events : {&begin_, &end_}) {
        events->emplace_back();
        FERRY_CUDA_CHECK(cudaEventCreate(&events->back()));
      }
    });
  }
  ~Clock() {
    for (auto* events : {&begin_, &end_}) {
      for (cudaEvent_t event : *events) cudaEventDestroy(event);
    }
  }

  /// Microseconds of `timed`, between `before` and `after`, the slowest rank of each sample; the
  /// median.
  double time(const Calls& before, const Calls& timed, const Calls& after = [](int) {}) {
    std::vector<double> samples;
    for (int i = 0; i < kWarmUp + kSamples; ++i) {
      gate_.close();
      group_.launch([&](int r) {
        gate_.hold(group_.stream(r));
        BarrierParameters barrier;
        barrier.group = group_.view(r);
        barrier.call.kind = CallKind::barrier;
        barrier.failure = group_.failure(r);
        FERRY_CUDA_CHECK(launch_barrier(barrier, group_.stream(r)));
        before(r);
        FERRY_CUDA_CHECK(cudaEventRecord(begin_[KernelGroup::index(r)], group_.stream(r)));
        timed(r);
        FERRY_CUDA_CHECK(cudaEventRecord(end_[KernelGroup::index(r)], group_.stream(r)));
        after(r);
      });
      gate_.open();
      group_.wait_well();
      double slowest = 0;
      for (int r = 0; r < group_.ranks(); ++r) {
        float ms = 0;
        FERRY_CUDA_CHECK(
            cudaEventElapsedTime(&ms, begin_[KernelGroup::index(r)], end_[KernelGroup::index(r)]));
        slowest = std::max(slowest, ms * 1e3);
      }
      if (i >= kWarmUp) samples.push_back(slowest);
    }
    std::sort(samples.begin(), samples.end());
    return samples[samples.size() / 2];
  }

  /// The period of one of `kChain` calls of a graph.
  double period(const std::function<void(int rank, int i)>& call) {
    std::vector<cudaGraphExec_t> graphs;
    group_.launch([&](int r) {
      cudaGraph_t graph = nullptr;
      cudaGraphExec_t made = nullptr;
      FERRY_CUDA_CHECK(cudaStreamBeginCapture(group_.stream(r), cudaStreamCaptureModeThreadLocal));
      for (int i = 0; i < kChain; ++i) call(r, i);
      FERRY_CUDA_CHECK(cudaStreamEndCapture(group_.stream(r), &graph));
      FERRY_CUDA_CHECK(cudaGraphInstantiate(&made, graph, 0));
      FERRY_CUDA_CHECK(cudaGraphDestroy(graph));
      graphs.push_back(made);
    });
    const auto replay = [&](int r) {
      FERRY_CUDA_CHECK(cudaGraphLaunch(graphs[KernelGroup::index(r)], group_.stream(r)));
    };
    const double us = time(replay, replay) / kChain;
    for (cudaGraphExec_t graph : graphs) FERRY_CUDA_CHECK(cudaGraphExecDestroy(graph));
    return us;
  }

 private:
  KernelGroup& group_;
  Gate gate_;
  std::vector<cudaEvent_t> begin_{}, end_{};
};

void check(cudaError_t error) {
  FERRY_CUDA_CHECK(error);
}

struct Bench {
  KernelGroup& group;
  LatencyRun& run;
  const LatencyCase& c;

  void dispatch(int r, int handle, Halves halves = Halves::both, bool masks = true) const {
    LatencyDispatchParameters p = run.dispatch(r, handle);
    if (!masks) p.view.alarm = nullptr;
    p.halves = halves;
    check(launch_latency_dispatch(p, group.stream(r)));
  }
  void combine(int r, int handle, CombinePath path, Halves halves = Halves::both,
               bool masks = true) const {
    LatencyCombineParameters p = run.combine(r, handle, path);
    if (!masks) p.view.alarm = nullptr;
    p.halves = halves;
    check(launch_latency_combine(p, group.stream(r)));
  }
};

/// What a hook is for: how much longer a GPU full of work takes between the halves.
void measure_overlap(const Bench& b, Clock& clock, const Calls& rest) {
  const std::size_t bytes = kBusyVectors * sizeof(float4);
  std::vector<std::byte*> data;
  for (int r = 0; r < b.c.ranks; ++r) data.push_back(b.group.take(r, bytes + 16, 0).data);
  b.group.settle();
  const Calls work = [&](int r) {
    std::byte* mine = data[KernelGroup::index(r)];
    busy<<<2 * 132, 1024, 0, b.group.stream(r)>>>(reinterpret_cast<const float4*>(mine), kBusySteps,
                                                  reinterpret_cast<float*>(mine + bytes));
    check(cudaGetLastError());
  };
  b.group.launch(work);  // loaded before anybody waits for a peer
  b.group.wait_well();
  const double alone = clock.time(rest, work);
  const double between = clock.time([&](int r) { rest(r), b.dispatch(r, 0, Halves::send); }, work,
                                    [&](int r) { b.dispatch(r, 0, Halves::receive); });
  std::printf("LAT overlap: work alone %.1f, between the halves of a dispatch %.1f (%+.2f %%)\n",
              alone, between, 100 * (between / alone - 1));
}

void verify(const Bench& b, const LatencyWorld& world) {
  for (const CombinePath path : {CombinePath::per_rank, CombinePath::per_slot}) {
    b.group.launch([&](int r) { b.dispatch(r, 0); });
    b.group.wait_well();
    b.group.launch([&](int r) { b.combine(r, 0, path); });
    b.group.wait_well();
    for (int r = 0; r < b.c.ranks; ++r) {
      b.run.check_dispatch(world, r, 0);
      b.run.check_combine(world, r, 0, path);
    }
  }
}

void measure(KernelGroup& group, const LatencyCase& c, std::int64_t tokens, std::uint64_t seed,
             bool verified, bool brief) {
  group.reset_arena();
  LatencyRun run(group, c);
  const Bench b{group, run, c};
  const LatencyWorld world = make_latency_world(
      c, seed, std::vector<std::int64_t>(static_cast<std::size_t>(c.ranks), tokens));
  run.upload(world, 0);
  run.upload(world, 1);
  if (verified) {
    run.upload_results(world, 0);
    verify(b, world);
  }
  // A kernel's first launch may wait for all others of the GPU: none may wait for a peer then.
  group.launch([&](int r) { spin<<<1, 1, 0, group.stream(r)>>>(0); });
  group.wait_well();
  Clock clock(group);
  constexpr CombinePath kRank = CombinePath::per_rank, kSlot = CombinePath::per_slot;
  const auto chain = [&](int r, int i) { b.dispatch(r, i % 2); };
  const auto pair = [&](CombinePath path) {
    return clock.period([&](int r, int i) {
      b.dispatch(r, i % 2);
      b.combine(r, i % 2, path);
    });
  };
  const auto rest = [&](int r) {
    spin<<<1, 1, 0, group.stream(r)>>>(60'000);
    check(cudaGetLastError());
  };
  const double dispatch = clock.period(chain), by_rank = pair(kRank);
  std::printf(
      "LAT T %3lld %s blocks %3d parts %d ll %d ll128 %d weights %s: dispatch %.2f pair %.2f "
      "combine %.2f",
      static_cast<long long>(tokens), c.format == LatencyFormat::as_is ? "bf16" : "fp8 ", c.blocks,
      run.view(0).parts, c.ll, c.ll128, c.weights_with_dispatch ? "early" : "late ", dispatch,
      by_rank, by_rank - dispatch);
  if (!brief) {
    const double by_slot = pair(kSlot);
    const auto sent = [&](int r) {
      b.dispatch(r, 0, Halves::send);
      rest(r);
    };
    const auto received = [&](int r) {
      b.dispatch(r, 0);
      rest(r);
    };
    const auto combining = [&](int r) {
      received(r);
      b.combine(r, 0, kRank, Halves::send);
      rest(r);
    };
    const auto receive = [&](int r) { b.dispatch(r, 0, Halves::receive); };
    const double none = clock.time(rest, [](int) {});
    std::printf(" | by slot: pair %.2f combine %.2f", by_slot, by_slot - dispatch);
    const double without_masks = clock.period([&](int r, int i) {
      b.dispatch(r, i % 2, Halves::both, false);
      b.combine(r, i % 2, kRank, Halves::both, false);
    });
    std::printf(" | without masks: pair %.2f", without_masks);
    std::printf(" | single: dispatch %.2f combine %.2f, halves %.2f+%.2f / %.2f+%.2f (events %.2f)",
                clock.time(rest, [&](int r) { b.dispatch(r, 0); }),
                clock.time(received, [&](int r) { b.combine(r, 0, kRank); }),
                clock.time(
                    rest, [&](int r) { b.dispatch(r, 0, Halves::send); }, receive),
                clock.time(sent, [&](int r) { b.dispatch(r, 0, Halves::receive); }),
                clock.time(received, [&](int r) { b.combine(r, 0, kRank, Halves::send); }),
                clock.time(combining, [&](int r) { b.combine(r, 0, kRank, Halves::receive); }),
                none);
  }
  std::printf("\n");
  if (verified && tokens == 128) measure_overlap(b, clock, rest);
  std::fflush(stdout);
}

}  // namespace

void run_latency_bench(std::uint64_t seed, bool wide_search, const SearchOnly& only) {
  LatencyCase c;
  c.ranks = gpu_count();
  c.topk = c.call_topk = 8;
  c.experts = 256;
  c.hidden = 7168;
  c.capacity = 256;
  c.format = LatencyFormat::e4m3;
  c.blocks = 2 * 132;
  c.ll = kLLTokens;
  c.ll128 = true;
  KernelGroup group(
      {c.ranks, latency_arena_bytes(c) + (std::size_t{64} << 20), 4096, 5'000'000'000});
  if (!wide_search) {
    for (const std::int64_t tokens : {1, 4, 8}) {  // as others, and with words that carry their tag
      c.capacity = 16;
      for (const int ll : {0, kLLTokens}) {
        c.ll = ll;
        measure(group, c, tokens, seed, ll > 0, false);
      }
    }
    for (const std::int64_t tokens : {16, 64, 128, 256}) {
      c.capacity = std::max<std::int64_t>(tokens, 16);
      measure(group, c, tokens, seed, tokens == 128, false);
    }
    c.weights_with_dispatch = true;
    c.capacity = 16;
    measure(group, c, 1, seed, false, false);
    c.capacity = 128;
    measure(group, c, 128, seed, true, false);
    c.format = LatencyFormat::as_is;
    measure(group, c, 128, seed, true, false);
    return;
  }
  const auto one = [&](std::int64_t tokens, int parts, int blocks, bool early) {
    if ((only.tokens > 0 && tokens != only.tokens) || (only.blocks > 0 && blocks != only.blocks)) {
      return;
    }
    c.capacity = std::max<std::int64_t>(tokens, 16);
    c.parts = parts;
    c.blocks = blocks;
    c.weights_with_dispatch = early;
    for (const bool ll128 : {false, true}) {
      if (ll128 && tokens <= kLLTokens) continue;
      c.ll128 = ll128;
      measure(group, c, tokens, seed, false, true);
    }
  };
  for (const std::int64_t tokens : {1, 4, 8, 16, 64, 128, 256}) {
    for (const int blocks : {16, 33, 66, 132, 264}) {
      if (tokens > 16 && blocks < 132) continue;
      for (const bool early : {false, true}) one(tokens, 7, blocks, early);
    }
  }
  for (const int parts : {2, 4}) {
    for (const int blocks : {132, 264}) one(128, parts, blocks, true);
  }
}

}  // namespace ferry::cuda::test
