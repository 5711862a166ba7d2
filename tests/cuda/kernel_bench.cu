// Speed of kernels without the engine, with the choices that its calls do not offer. What its calls
// take: `ferry bench`. Nothing is compared: the kernel tests do that. A line of JSON a figure.
//   kernel_bench dispatch [--kind 0,1,2] [--beside 0,16,48] [--parts 16] [--piece 0] [--group 0]
//                         [--alignment 128]    bf16, fp8, bf16 to fp8; its fan-out beside it
//   kernel_bench combine  [--vectors 0] [--warps 0] [--stages 0] [--pulls 0] [--spread 1]
//                         [--weights 0,1]
//   kernel_bench sums     the same, [--sum-sms 80]: of slots, beside their combine
//   kernel_bench latency  [--blocks 264] [--kernel-parts 0] [--ll 1] [--ll128 0,1] [--bf16 0,1]
//                         [--early 0,1] [--masks 0,1]    periods in graphs; weights with dispatch
//   kernel_bench overlap  work of all SMs alone, and between the halves of a latency dispatch
// All: [--ranks N] (as many as GPUs) [--tokens 128,4096] [--hidden 7168] [--sms 8,16,24]. Lists are
// swept; zeros: as the engine chooses.
#include <algorithm>
#include <cstdio>
#include <functional>
#include <map>
#include <string>
#include <vector>

#include "combine_case.hpp"
#include "cuda/kernels/base/barrier.hpp"
#include "cuda/kernels/base/load.hpp"
#include "following_case.hpp"
#include "latency_case.hpp"

namespace ferry::cuda::test {
namespace {

constexpr int kChain = 20;  // calls in a graph
constexpr int kBusyVectors = 1 << 20;
constexpr int kBusySteps = 60;
constexpr auto kSlack = std::size_t{256} << 20;

using Call = std::function<void(int rank)>;
using Chosen = std::map<std::string, int>;
using Options = std::vector<std::pair<const char*, std::vector<int>>>;  // name, values unless given

std::size_t at(std::int64_t value) {
  return static_cast<std::size_t>(value);
}

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
  int place = static_cast<int>(blockIdx.x * blockDim.x + threadIdx.x);
  for (int i = 0; i < steps; ++i, place += threads) {
    const float4 more = __ldg(data + place % kBusyVectors);
#pragma unroll
    for (int n = 0; n < 32; ++n) {
      sum.x = fmaf(sum.x, more.x, more.y);
      sum.y = fmaf(sum.y, more.y, more.z);
      sum.z = fmaf(sum.z, more.z, more.w);
      sum.w = fmaf(sum.w, more.w, more.x);
    }
  }
  if (sum.x + sum.y + sum.z + sum.w == 1.25f) *out = 0;  // never, but the compiler cannot know
}

/// Of the command line, and what each case does with it.
struct Bench {
  int argc;
  char** argv;
  int ranks = static_cast<int>(option(argc, argv, "--ranks", gpu_count()));
  std::int64_t hidden = option(argc, argv, "--hidden", 7168);

  /// Visits every combination of the values of all options.
  void sweep(const Options& options, const std::function<void(const Chosen&)>& visit,
             const Chosen& chosen = {}) const {
    if (chosen.size() == options.size()) return visit(chosen);
    const auto& [name, otherwise] = options[chosen.size()];
    for (const int value : option_list(argc, argv, (std::string("--") + name).c_str(), otherwise)) {
      Chosen more = chosen;
      more[name] = value;
      sweep(options, visit, more);
    }
  }
};

/// Times calls of all ranks. Prints.
class Clock {
 public:
  explicit Clock(KernelGroup& group) : group_(group), events_(at(2 * group.ranks())) {
    group.launch([&](int r) {
      FERRY_CUDA_CHECK(cudaEventCreate(&events_[at(2 * r)]));
      FERRY_CUDA_CHECK(cudaEventCreate(&events_[at(2 * r + 1)]));
    });
  }
  ~Clock() {
    for (cudaEvent_t event : events_) cudaEventDestroy(event);
  }

  /// Microseconds of `timed`, aligned by a barrier on the GPUs; the slowest rank of each sample;
  /// ascending.
  std::vector<double> time(const Call& before, const Call& timed, const Call& after, int samples) {
    constexpr int kWarmUp = 5;
    std::vector<double> found;
    for (int i = 0; i < kWarmUp + samples; ++i) {
      gate_.close();
      group_.launch([&](int r) {
        gate_.hold(group_.stream(r));
        BarrierParameters barrier;
        barrier.group = group_.view(r);
        barrier.call.kind = CallKind::barrier;
        barrier.failure = group_.failure(r);
        FERRY_CUDA_CHECK(launch_barrier(barrier, group_.stream(r)));
        before(r);
        FERRY_CUDA_CHECK(cudaEventRecord(events_[at(2 * r)], group_.stream(r)));
        timed(r);
        FERRY_CUDA_CHECK(cudaEventRecord(events_[at(2 * r + 1)], group_.stream(r)));
        after(r);
      });
      gate_.open();
      group_.wait_well();
      float slowest = 0;
      for (int r = 0; r < group_.ranks(); ++r) {
        float ms = 0;
        FERRY_CUDA_CHECK(cudaEventElapsedTime(&ms, events_[at(2 * r)], events_[at(2 * r + 1)]));
        slowest = std::max(slowest, ms);
      }
      if (i >= kWarmUp) found.push_back(double{slowest} * 1e3);
    }
    std::sort(found.begin(), found.end());
    return found;
  }

  /// Of one of four calls that follow each other.
  std::vector<double> calls(const Call& call) {
    constexpr int kCalls = 4;
    return divided(time(
                       nothing,
                       [&](int r) {
                         for (int i = 0; i < kCalls; ++i) call(r);
                       },
                       nothing, 30),
                   kCalls);
  }

  /// Of one of the calls of a graph behind another replay of it.
  std::vector<double> period(const std::function<void(int rank, int i)>& call) {
    std::vector<cudaGraphExec_t> graphs;
    group_.launch([&](int r) {
      cudaGraph_t graph = nullptr;
      FERRY_CUDA_CHECK(cudaStreamBeginCapture(group_.stream(r), cudaStreamCaptureModeThreadLocal));
      for (int i = 0; i < kChain; ++i) call(r, i);
      FERRY_CUDA_CHECK(cudaStreamEndCapture(group_.stream(r), &graph));
      FERRY_CUDA_CHECK(cudaGraphInstantiate(&graphs.emplace_back(), graph, 0));
      FERRY_CUDA_CHECK(cudaGraphDestroy(graph));
    });
    const auto replay = [&](int r) {
      FERRY_CUDA_CHECK(cudaGraphLaunch(graphs[at(r)], group_.stream(r)));
    };
    const auto found = divided(time(replay, replay, nothing, 200), kChain);
    for (cudaGraphExec_t graph : graphs) FERRY_CUDA_CHECK(cudaGraphExecDestroy(graph));
    return found;
  }

  /// `bytes`: that a rank moves in a call; 0: no rate.
  double print(const std::string& name, const Chosen& chosen, const std::vector<double>& us,
               double bytes = 0) const {
    const double median = us[us.size() / 2];
    std::printf("{\"bench\": \"%s\", \"ranks\": %d", name.c_str(), group_.ranks());
    for (const auto& [option, value] : chosen) std::printf(", \"%s\": %d", option.c_str(), value);
    if (bytes > 0) std::printf(", \"logical_gbs\": %.1f", bytes / median / 1e3);
    std::printf(", \"us\": %.2f, \"p95_us\": %.2f}\n", median, us[us.size() * 95 / 100]);
    std::fflush(stdout);
    return median;
  }

  static void nothing(int) {}

 private:
  static std::vector<double> divided(std::vector<double> us, int calls) {
    for (double& each : us) each /= calls;
    return us;
  }

  KernelGroup& group_;
  Gate gate_;
  std::vector<cudaEvent_t> events_;
};

double row_bytes_sent(const Exchange& x, std::int64_t row_bytes) {
  double rows = 0;
  for (int r = 0; r < x.shape.ranks; ++r) rows += double(x.sent(r, false)) / x.shape.ranks;
  return rows * double(row_bytes);
}

/// Top-8 of 256 experts. Every sum and every row fits the arena.
ExpertCase expert_case(const Bench& b, const Chosen& chosen, int kind) {
  ExpertCase c;
  c.shape = {b.ranks, 256, 8, std::vector<std::int64_t>(at(b.ranks), chosen.at("tokens")), 0};
  c.row_bytes = kind == 0 ? 2 * b.hidden : b.hidden;
  c.scale_columns = kind == 0 ? 0 : (b.hidden + 127) / 128;
  c.quantize = kind == 2;
  c.alignment = option(b.argc, b.argv, "--alignment", 128);
  return c;
}

GroupOptions options_of(const Bench& b, const ExpertCase& c) {
  const std::int64_t rows = c.shape.tokens[0] * (2 * b.ranks + 12) + 256 * c.alignment;
  return {.ranks = b.ranks, .arena_bytes = at(rows * (2 * b.hidden + 512)) + kSlack};
}

void bench_dispatch(const Bench& b) {
  b.sweep({{"tokens", {4096}}, {"kind", {0, 1, 2}}}, [&](const Chosen& shape) {
    const ExpertCase c = expert_case(b, shape, shape.at("kind"));
    KernelGroup group(options_of(b, c));
    run_barrier(group);
    Clock clock(group);
    Random random(1);
    Following following(group, c, random, false);
    const double bytes = row_bytes_sent(following.exchange(), c.row_bytes);
    const Options options = {
        {"sms", {8, 16, 24}}, {"beside", {0, 48}}, {"parts", {16}}, {"piece", {0}}, {"group", {0}}};
    b.sweep(options, [&](const Chosen& chosen) {
      if (chosen.at("sms") > fair_sms(b.ranks)) return;  // ranks that share a GPU, all resident
      const int beside = chosen.at("beside");
      Chosen told = chosen;
      told.insert(shape.begin(), shape.end());
      clock.print("dispatch", told, clock.calls([&](int r) {
        DispatchParameters d = following.rank(r).dispatch;
        d.num_sms = chosen.at("sms");
        d.parts = beside > 0 ? chosen.at("parts") : 0;
        d.followed = beside > 0;
        FERRY_CUDA_CHECK(launch_dispatch(d, group.stream(r)));
        if (beside == 0) return;
        FanOutParameters f = following.rank(r).fan_out;
        f.num_sms = beside;
        f.may_be_made = true;
        const FanOutTuning tuning{.piece_bytes = chosen.at("piece"),
                                  .group_bytes = chosen.at("group")};
        FERRY_CUDA_CHECK(launch_fan_out_beside(f, group.stream(r), tuning));
      }),
                  bytes);
    });
  });
}

const Options kSums = {{"tokens", {4096}}, {"weights", {0}}, {"sms", {8, 16, 24}}, {"vectors", {0}},
                       {"warps", {0}},     {"stages", {0}},  {"pulls", {0}},       {"spread", {1}}};

SumTuning tuning_of(const Chosen& chosen) {
  return {chosen.at("vectors"), chosen.at("warps"), chosen.at("stages"), chosen.at("spread") != 0,
          chosen.at("pulls")};
}

void bench_combine(const Bench& b) {
  b.sweep(kSums, [&](const Chosen& chosen) {
    if (chosen.at("sms") > fair_sms(b.ranks)) return;
    CombineCase c;
    c.shape = expert_case(b, chosen, 0).shape;
    c.columns = b.hidden;
    c.weights = chosen.at("weights") != 0;
    c.num_sms = chosen.at("sms");
    KernelGroup group(options_of(b, expert_case(b, chosen, 0)));
    Clock clock(group);
    Random random(1);
    const CombineSetup setup = make_combine(group, c, random);
    clock.print("combine", chosen, clock.calls([&](int r) {
      FERRY_CUDA_CHECK(launch_combine(setup.parameters[at(r)], group.stream(r), tuning_of(chosen)));
    }),
                row_bytes_sent(setup.exchange, c.row_bytes()));
  });
}

struct SumsRank {
  SumSlotsParameters sums;
  CombineParameters combine;
};

SumsRank sums_of(KernelGroup& group, const ExpertCase& c, const FollowingRank& mine, int rank,
                 bool weights) {
  const FanOutParameters& f = mine.fan_out;
  const std::int64_t tokens = c.shape.tokens[at(rank)], topk = c.shape.topk;
  const Piece out = group.take(rank, at(f.capacity * c.row_bytes));
  const Piece side = group.take(rank, at(f.capacity * topk) * sizeof(float), 0x3c);
  SumsRank made;
  SumSlotsParameters& s = made.sums;
  s.group = f.group;
  s.plan = f.plan;
  s.slot_rows = f.slot_rows;
  s.rows = f.out;
  s.input_rows = f.out_capacity;
  s.weights = reinterpret_cast<const float*>(side.data);
  s.columns = c.row_bytes / 2;
  s.capacity = f.capacity;
  s.out = out.data;
  CombineParameters& p = made.combine;
  p.group = f.group;
  p.plan = f.plan;
  p.call.kind = CallKind::combine;
  p.segment = out.segment;
  p.offset = out.offset;
  p.rows = f.capacity;
  p.columns = s.columns;
  p.out = group.take(rank, at(tokens * c.row_bytes)).data;
  p.has_weights = weights;
  p.side_segment = side.segment;
  p.side_offset = side.offset;
  p.out_weights = take<float>(group, rank, tokens * topk);
  p.failure = group.failure(rank);
  p.after_sums = true;
  return made;
}

void bench_sums(const Bench& b) {
  Options options = kSums;
  options.push_back({"sum-sms", {80}});
  b.sweep(options, [&](const Chosen& chosen) {
    if (chosen.at("sms") + chosen.at("sum-sms") > fair_sms(b.ranks) + 1) return;
    const ExpertCase c = expert_case(b, chosen, 0);
    KernelGroup group(options_of(b, c));
    run_barrier(group);
    Clock clock(group);
    Random random(1);
    Following following(group, c, random, false);
    std::vector<SumsRank> all;
    for (int r = 0; r < b.ranks; ++r) {
      all.push_back(sums_of(group, c, following.rank(r), r, chosen.at("weights") != 0));
      all.back().combine.num_sms = chosen.at("sms");
      all.back().sums.num_sms = chosen.at("sum-sms");
    }
    group.settle();
    group.launch([&](int r) { following.launch(r); });  // places the slots that the sums read
    group.wait_well();
    clock.print("sums beside combine", chosen, clock.calls([&](int r) {
      FERRY_CUDA_CHECK(launch_sum_slots(all[at(r)].sums, group.stream(r), tuning_of(chosen)));
      FERRY_CUDA_CHECK(launch_combine(all[at(r)].combine, group.stream(r)));
    }),
                row_bytes_sent(following.exchange(), c.row_bytes));
  });
}

/// One latency exchange on all ranks.
struct LatencyBench {
  LatencyCase c;
  KernelGroup group;
  LatencyRun run;
  Clock clock;

  LatencyBench(const LatencyCase& latency_case, std::int64_t tokens)
      : c(latency_case),
        group({c.ranks, latency_arena_bytes(c) + kSlack, 4096, 5'000'000'000}),
        run(group, c),
        clock(group) {
    const std::vector<std::int64_t> each(at(c.ranks), tokens);
    const LatencyWorld world = make_latency_world(c, 1, each);
    for (const int handle : {0, 1}) run.upload(world, handle);
    group.settle();
  }
  void dispatch(int r, int handle, Halves halves, bool masks) {
    LatencyDispatchParameters p = run.dispatch(r, handle);
    if (!masks) p.view.alarm = nullptr;
    p.halves = halves;
    FERRY_CUDA_CHECK(launch_latency_dispatch(p, group.stream(r)));
  }
  void combine(int r, int handle, bool masks) {
    LatencyCombineParameters p = run.combine(r, handle, CombinePath::per_rank);
    if (!masks) p.view.alarm = nullptr;
    FERRY_CUDA_CHECK(launch_latency_combine(p, group.stream(r)));
  }
};

LatencyCase latency_case(const Bench& b, std::int64_t tokens) {
  LatencyCase c;
  c.ranks = b.ranks;
  c.topk = c.call_topk = 8;
  c.experts = 256;
  c.hidden = b.hidden;
  c.capacity = std::max<std::int64_t>(tokens, 16);
  c.format = LatencyFormat::e4m3;
  c.blocks = 2 * 132;
  c.ll = kLLTokens;
  c.ll128 = true;
  return c;
}

void bench_latency(const Bench& b) {
  const Options options = {{"tokens", {1, 8, 16, 64, 128, 256}},
                           {"blocks", {264}},
                           {"kernel-parts", {0}},
                           {"ll", {1}},
                           {"ll128", {1}},
                           {"bf16", {0}},
                           {"early", {1}},
                           {"masks", {1}}};
  b.sweep(options, [&](const Chosen& chosen) {
    LatencyCase c = latency_case(b, chosen.at("tokens"));
    c.blocks = chosen.at("blocks");
    c.parts = chosen.at("kernel-parts");
    c.ll = chosen.at("ll") != 0 ? kLLTokens : 0;
    c.ll128 = chosen.at("ll128") != 0;
    if (chosen.at("bf16") != 0) c.format = LatencyFormat::as_is;
    c.weights_with_dispatch = chosen.at("early") != 0;
    LatencyBench one(c, chosen.at("tokens"));
    const bool masks = chosen.at("masks") != 0;
    one.clock.print("latency dispatch", chosen, one.clock.period([&](int r, int i) {
      one.dispatch(r, i % 2, Halves::both, masks);
    }));
    one.clock.print("latency pair", chosen, one.clock.period([&](int r, int i) {
      one.dispatch(r, i % 2, Halves::both, masks);
      one.combine(r, i % 2, masks);
    }));
  });
}

/// What a hook is for: how much longer work that fills a GPU takes between the halves.
void bench_overlap(const Bench& b) {
  b.sweep({{"tokens", {128}}}, [&](const Chosen& chosen) {
    LatencyBench one(latency_case(b, chosen.at("tokens")), chosen.at("tokens"));
    const std::size_t bytes = kBusyVectors * sizeof(float4);
    std::vector<std::byte*> data;
    for (int r = 0; r < b.ranks; ++r) data.push_back(one.group.take(r, bytes + 16, 0).data);
    one.group.settle();
    const Call work = [&](int r) {
      busy<<<2 * 132, 1024, 0, one.group.stream(r)>>>(
          reinterpret_cast<const float4*>(data[at(r)]), kBusySteps,
          reinterpret_cast<float*>(data[at(r)] + bytes));
      FERRY_CUDA_CHECK(cudaGetLastError());
    };
    const Call rest = [&](int r) {
      spin<<<1, 1, 0, one.group.stream(r)>>>(60'000);
      FERRY_CUDA_CHECK(cudaGetLastError());
    };
    // A kernel's first launch may wait for all others of the GPU: none may wait for a peer then.
    one.group.launch([&](int r) { rest(r), work(r); });
    one.group.wait_well();
    const auto half = [&](Halves halves) {
      return [&one, halves](int r) { one.dispatch(r, 0, halves, true); };
    };
    const auto send = half(Halves::send);
    const auto receive = half(Halves::receive);
    const double alone =
        one.clock.print("work alone", chosen, one.clock.time(rest, work, Clock::nothing, 200));
    const double between =
        one.clock.print("work between halves", chosen,
                        one.clock.time([&](int r) { rest(r), send(r); }, work, receive, 200));
    std::printf("between the halves of a dispatch: %+.2f %%\n", 100 * (between / alone - 1));
  });
}

int run_main(int argc, char** argv) {
  prepare_process();
  if (gpu_count() == 0) return std::printf("NO GPU\n"), 77;
  for (int device = 0; device < gpu_count(); ++device) {
    FERRY_CUDA_CHECK(cudaSetDevice(device));
    FERRY_CUDA_CHECK(load_throughput_kernels());
    FERRY_CUDA_CHECK(load_latency_kernels());
  }
  const std::map<std::string, void (*)(const Bench&)> cases = {{"dispatch", bench_dispatch},
                                                               {"combine", bench_combine},
                                                               {"sums", bench_sums},
                                                               {"latency", bench_latency},
                                                               {"overlap", bench_overlap}};
  const auto found = cases.find(argc > 1 ? argv[1] : "");
  if (found == cases.end()) {
    return std::fprintf(stderr, "expected dispatch, combine, sums, latency or overlap\n"), 2;
  }
  found->second(Bench{argc, argv});
  return 0;
}

}  // namespace
}  // namespace ferry::cuda::test

int main(int argc, char** argv) {
  return ferry::cuda::test::run_main(argc, argv);
}
