#include "dispatch_bench.hpp"

#include <algorithm>
#include <cstdio>
#include <vector>

#include "cuda/kernels/base/barrier.hpp"
#include "dispatch_case.hpp"

namespace ferry::cuda::test {

namespace {

constexpr int kSamples = 30;
constexpr int kWarmUp = 5;

struct Events {
  std::vector<cudaEvent_t> begin, end;
};

struct Times {
  double median = 0;
  double p95 = 0;
};

/// Microseconds of one of `calls` calls that follow each other, the slowest rank of each sample.
template <class Call>
Times measure(KernelGroup& group, Gate& gate, const Events& events, int calls, const Call& call) {
  std::vector<double> samples;
  for (int i = 0; i < kWarmUp + kSamples; ++i) {
    gate.close();
    group.launch([&](int r) {
      const auto at = KernelGroup::index(r);
      gate.hold(group.stream(r));
      BarrierParameters barrier;
      barrier.group = group.view(r);
      barrier.call.kind = CallKind::barrier;
      barrier.failure = group.failure(r);
      FERRY_CUDA_CHECK(launch_barrier(barrier, group.stream(r)));
      FERRY_CUDA_CHECK(cudaEventRecord(events.begin[at], group.stream(r)));
      for (int c = 0; c < calls; ++c) call(r);
      FERRY_CUDA_CHECK(cudaEventRecord(events.end[at], group.stream(r)));
    });
    gate.open();
    group.wait_well();
    double slowest = 0;
    for (int r = 0; r < group.ranks(); ++r) {
      float ms = 0;
      const auto at = KernelGroup::index(r);
      FERRY_CUDA_CHECK(cudaEventElapsedTime(&ms, events.begin[at], events.end[at]));
      slowest = std::max(slowest, ms * 1e3 / calls);
    }
    if (i >= kWarmUp) samples.push_back(slowest);
  }
  std::sort(samples.begin(), samples.end());
  return {samples[samples.size() / 2], samples[samples.size() * 95 / 100]};
}

void run_shape(KernelGroup& group, Gate& gate, const Events& events, const char* name,
               const DispatchCase& base, std::uint64_t seed) {
  group.reset_arena();
  const World world = make_world(base, seed);
  DispatchRun run(group, world);
  run.launch_plans();
  run.launch_dispatches(true);
  run.launch_all_routes();
  group.wait_well();
  double received = 0, wire = 0;
  for (int r = 0; r < base.ranks; ++r) {
    run.check_rows(r);
    run.check_side(r, true);
    received += static_cast<double>(world.recv_rows(r)) / base.ranks;
    wire += static_cast<double>(world.wire_rows(r)) / base.ranks;
  }
  const auto row = static_cast<double>(base.row_bytes + 4 * base.scale_columns);
  const auto line = [&](const char* kind, int sms, const Times& four, const Times& one) {
    std::printf(
        "{\"bench\":\"dispatch\",\"kind\":\"%s\",\"shape\":\"%s\",\"ranks\":%d,\"tokens\":%lld,"
        "\"row_bytes\":%.0f,\"sms\":%d,\"us_median\":%.2f,\"us_p95\":%.2f,\"us_single\":%.2f,"
        "\"logical_gbs\":%.1f,\"wire_gbs\":%.1f}\n",
        kind, name, base.ranks, static_cast<long long>(base.tokens[0]), row, sms, four.median,
        four.p95, one.median, received * row / four.median / 1e3, wire * row / four.median / 1e3);
    std::fflush(stdout);
  };
  const auto both = [&](const char* kind, int sms, const auto& call) {
    line(kind, sms, measure(group, gate, events, 4, call), measure(group, gate, events, 1, call));
  };
  // `quiet`: the CPU is told nothing.
  const auto plan = [&](int r, bool quiet) {
    PlanParameters p = run.plan_parameters(r);
    if (quiet) p.counts = nullptr, p.count_words = nullptr;
    FERRY_CUDA_CHECK(launch_plan(p, group.stream(r)));
  };
  both("plan", 1, [&](int r) { plan(r, false); });
  both("plan quiet", 1, [&](int r) { plan(r, true); });
  const bool small = base.tokens[0] <= 128;
  for (const int sms : small ? std::vector{8, 16, 24, 32} : std::vector{4, 8, 16, 24, 64}) {
    const auto dispatch = [&](int r, bool routes, bool early, bool glued) {
      DispatchParameters p = run.dispatch_parameters(r, routes);
      p.sms = sms;
      p.early = early;
      p.glued = glued;
      FERRY_CUDA_CHECK(launch_dispatch(p, group.stream(r)));
    };
    both("cached", sms, [&](int r) { dispatch(r, false, false, false); });
    both("full", sms, [&](int r) { plan(r, false), dispatch(r, true, false, false); });
    both("full early", sms, [&](int r) { plan(r, false), dispatch(r, true, true, false); });
    both("full glued", sms, [&](int r) { plan(r, false), dispatch(r, true, true, true); });
    if (!small || sms != 24) continue;
    both("full quiet", sms, [&](int r) { plan(r, true), dispatch(r, true, false, false); });
    both("full early quiet", sms, [&](int r) { plan(r, true), dispatch(r, true, true, false); });
    both("full glued quiet", sms, [&](int r) { plan(r, true), dispatch(r, true, true, true); });
    // With an event behind the plan, which keeps the dispatch from coming early.
    both("full event", sms, [&](int r) {
      plan(r, false);
      FERRY_CUDA_CHECK(cudaEventRecord(events.end[KernelGroup::index(r)], group.stream(r)));
      dispatch(r, true, false, false);
    });
  }
  if (base.scale_columns > 0) return;
  for (const int sms : {8, 16, 24}) {
    both("combine", sms, [&](int r) {
      CombineParameters p = run.combine_parameters(r);
      p.sms = sms;
      FERRY_CUDA_CHECK(launch_combine(p, group.stream(r)));
    });
  }
}

}  // namespace

void run_dispatch_bench(std::uint64_t seed, bool small) {
  const int ranks = gpu_count();
  KernelGroup group({ranks, std::size_t{2} << 30, 4096 * 4, 20'000'000'000});
  Gate gate;
  Events events;
  for (int r = 0; r < ranks; ++r) {
    FERRY_CUDA_CHECK(cudaSetDevice(group.device(r)));
    events.begin.emplace_back();
    events.end.emplace_back();
    FERRY_CUDA_CHECK(cudaEventCreate(&events.begin.back()));
    FERRY_CUDA_CHECK(cudaEventCreate(&events.end.back()));
  }
  for (const std::int64_t tokens : {1, 128, 4096}) {
    if (small && tokens > 128) continue;
    DispatchCase c;
    c.ranks = ranks;
    c.topk = 8;
    c.experts = 256;
    c.tokens.assign(static_cast<std::size_t>(ranks), tokens);
    c.sms = 8;
    c.row_bytes = 14336;
    run_shape(group, gate, events, "bf16", c, seed);
    c.row_bytes = 7168;
    c.scale_columns = 56;
    run_shape(group, gate, events, "fp8", c, seed);
    c.quantize = true;
    run_shape(group, gate, events, "bf16 to fp8", c, seed);
  }
}

}  // namespace ferry::cuda::test
