// Where the planner of copies spends its time on a GPU, stage by stage, by the clock of its SM.
// Every plan is compared with that of a CPU.
//   balance_stages [batches]
// A line for each shape and way: `loops` is the kernel for shapes of any size, `short` that for
// small ones; drafters: how many drafts are made at the same time. µs of a launch by events, an
// empty launch taken off; then, of two plans in one launch, cycles of each stage: in the first one
// the code is not in the caches of the SM. All are medians.
#include <algorithm>
#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <random>
#include <string>
#include <vector>

#include "core/experts/batch_planner.hpp"
#include "cuda/kernels/collectives/balance_plan.cuh"

namespace ferry::cuda {
namespace {

constexpr int kStages = static_cast<int>(PlanStage::count), kPasses = 2;
constexpr const char* kNames[kStages] = {"begin",  "held",   "hash", "found", "sums",
                                         "bound",  "drafts", "best", "level", "places",
                                         "quotas", "kept",   "used"};

struct Stamps {
  long long stage[kStages];
  long long draft[device::kTeamWarps];  ///< cycles of each
  long long ns;
};

template <bool kShort>
class StampedTeam : public device::BlockTeam<kShort> {
 public:
  __device__ StampedTeam(device::BlockWords& words, int drafters, Stamps& stamps, long long& last)
      : device::BlockTeam<kShort>(words, drafters), stamps_(stamps), last_(last) {}
  __device__ void mark(PlanStage stage) const {
    if (threadIdx.x != 0) return;
    const long long now = clock64();
    stamps_.stage[static_cast<int>(stage)] += now - last_;
    last_ = now;
  }
  template <class Fn>
  __device__ __forceinline__ void drafts(int n, const Fn& fn) const {
    device::BlockTeam<kShort>::drafts(n, [&](int i, const auto& lanes) {
      const long long start = clock64();
      fn(i, lanes);
      if (threadIdx.x % 32 == 0) stamps_.draft[i] = clock64() - start;
    });
  }

 private:
  Stamps& stamps_;
  long long& last_;
};

__device__ long long nanoseconds() {
  long long now;
  asm volatile("mov.u64 %0, %globaltimer;" : "=l"(now));
  return now;
}

/// `passes` plans of the same batch, each with a state of its own.
template <bool kShort>
__global__ void __launch_bounds__(device::kTeamThreads, 1)
    stages_kernel(BalanceParameters p, Stamps* out, int passes) {
  extern __shared__ __align__(16) std::byte shared[];
  __shared__ device::BlockWords words;
  __shared__ Stamps stamps;
  __shared__ long long last;
#pragma unroll 1
  for (int pass = 0; pass < passes; ++pass) {
    __syncthreads();
    if (threadIdx.x == 0) {
      stamps = {};
      stamps.ns = -nanoseconds();
      last = clock64();
    }
    __syncthreads();
    plan_batch(p, StampedTeam<kShort>(words, p.shared.drafters, stamps, last), shared);
    __syncthreads();
    if (threadIdx.x == 0) {
      stamps.ns += nanoseconds();
      out[pass] = stamps;
    }
    p.job.state += p.at.bytes;
  }
}

template <bool kShort>
__global__ void __launch_bounds__(device::kTeamThreads, 1)
    bare_kernel(const __grid_constant__ BalanceParameters p) {
  extern __shared__ __align__(16) std::byte shared[];
  __shared__ device::BlockWords words;
  plan_batch(p, device::BlockTeam<kShort>(words, p.shared.drafters), shared);
}

__global__ void empty_kernel() {}
__global__ void wait_kernel(long long cycles) {
  for (const long long start = clock64(); clock64() - start < cycles;) {
  }
}

void need(cudaError_t error, const char* call) {
  if (error == cudaSuccess) return;
  std::fprintf(stderr, "%s: %s\n", call, cudaGetErrorString(error));
  std::exit(1);
}

template <class T>
T median(std::vector<T> values) {
  std::ranges::sort(values);
  return values[values.size() / 2];
}

/// 32768 slots a rank, by Zipf's law with 1.2.
std::vector<std::int32_t> skewed(int ranks, int experts, unsigned seed) {
  std::mt19937 random(seed);
  std::vector<double> weights(static_cast<std::size_t>(experts));
  for (std::size_t i = 0; i < weights.size(); ++i) weights[i] = std::pow(i + 1.0, -1.2);
  std::ranges::shuffle(weights, random);
  std::discrete_distribution<int> draw(weights.begin(), weights.end());
  std::vector<std::int32_t> counts(static_cast<std::size_t>(ranks) * weights.size());
  for (int source = 0; source < ranks; ++source) {
    for (int i = 0; i < 32768; ++i)
      ++counts[static_cast<std::size_t>(source * experts + draw(random))];
  }
  return counts;
}

/// A shape, its memory, and how it is planned.
class Bench {
 public:
  Bench(const BatchPlanShape& shape, int batches) : shape_(shape), planner_(shape) {
    need(parameters_for(shape, p_), "parameters_for");
    most_drafters_ = p_.shared.drafters;
    for (int i = 0; i < batches; ++i) {
      batches_.push_back(skewed(shape.ranks, shape.experts, static_cast<unsigned>(i)));
    }
    need(cudaMalloc(&counts_, batches_[0].size() * 4), "cudaMalloc");
    need(cudaMalloc(&state_, kPasses * p_.at.bytes), "cudaMalloc");
    need(cudaMalloc(&stamps_, kPasses * sizeof(Stamps)), "cudaMalloc");
    need(cudaEventCreate(&begin_), "cudaEventCreate");
    need(cudaEventCreate(&end_), "cudaEventCreate");
    p_.job.plan.counts = counts_;
    p_.job.plan.stride = shape.experts;
    p_.job.state = state_;
  }
  int most_drafters() const { return most_drafters_; }

  template <bool kShort>
  void measure(int drafters, bool again) {
    p_.shared.drafters = drafters;
    const int bytes = static_cast<int>(p_.shared.bytes);
    for (const void* kernel : {reinterpret_cast<const void*>(&stages_kernel<kShort>),
                               reinterpret_cast<const void*>(&bare_kernel<kShort>)}) {
      need(cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, bytes),
           "cudaFuncSetAttribute");
    }
    std::vector<double> launches, empty;
    std::vector<Stamps> stamps[kPasses];
    std::vector<std::int32_t> held(static_cast<std::size_t>(shape_.places()), -1);
    for (const auto& batch : batches_) {
      planner_.plan(batch, held);
      reset(batch, held);
      empty.push_back(timed([&] { empty_kernel<<<1, device::kTeamThreads>>>(); }));
      launches.push_back(
          timed([&] { bare_kernel<kShort><<<1, device::kTeamThreads, bytes>>>(p_); }));
      check();
      reset(batch, held);
      timed(
          [&] { stages_kernel<kShort><<<1, device::kTeamThreads, bytes>>>(p_, stamps_, kPasses); });
      check();
      Stamps got[kPasses];
      need(cudaMemcpy(got, stamps_, sizeof got, cudaMemcpyDeviceToHost), "cudaMemcpy");
      for (int pass = 0; pass < kPasses; ++pass) stamps[pass].push_back(got[pass]);
      if (again) held.assign(planner_.table().begin(), planner_.table().end());
    }
    std::printf("%2d ranks %3d experts, %-5s %-5s %2d drafters: %6.1f us", shape_.ranks,
                shape_.experts, again ? "again" : "anew", kShort ? "short" : "loops", drafters,
                median(launches) - median(empty));
    for (int pass = 0; pass < kPasses; ++pass) show(stamps[pass], pass);
    std::printf("\n");
  }

 private:
  void reset(const std::vector<std::int32_t>& batch, const std::vector<std::int32_t>& held) {
    need(cudaMemcpy(counts_, batch.data(), batch.size() * 4, cudaMemcpyHostToDevice), "cudaMemcpy");
    for (int pass = 0; pass < kPasses; ++pass) {
      std::byte* state = state_ + static_cast<std::size_t>(pass) * p_.at.bytes;
      need(cudaMemset(state, 0, p_.at.bytes), "cudaMemset");
      need(cudaMemcpy(state + p_.at.held, held.data(), held.size() * 4, cudaMemcpyHostToDevice),
           "cudaMemcpy");
    }
    need(cudaDeviceSynchronize(), "cudaDeviceSynchronize");
  }
  template <class Fn>
  double timed(const Fn& launch) {
    wait_kernel<<<1, 1>>>(200000);  // the CPU is ahead
    need(cudaEventRecord(begin_), "cudaEventRecord");
    launch();
    need(cudaGetLastError(), "launch");
    need(cudaEventRecord(end_), "cudaEventRecord");
    need(cudaEventSynchronize(end_), "cudaEventSynchronize");
    float ms = 0;
    need(cudaEventElapsedTime(&ms, begin_, end_), "cudaEventElapsedTime");
    return ms * 1e3;
  }
  void check() {
    std::vector<std::int32_t> table(static_cast<std::size_t>(shape_.places()));
    std::vector<Rows> load(static_cast<std::size_t>(shape_.ranks));
    need(cudaMemcpy(table.data(), state_ + p_.at.table, table.size() * 4, cudaMemcpyDeviceToHost),
         "cudaMemcpy");
    need(cudaMemcpy(load.data(), state_ + p_.at.load, load.size() * 4, cudaMemcpyDeviceToHost),
         "cudaMemcpy");
    if (std::ranges::equal(table, planner_.table()) && std::ranges::equal(load, planner_.load())) {
      return;
    }
    std::fprintf(stderr, "another plan than the CPU's\n");
    std::exit(1);
  }
  static void show(const std::vector<Stamps>& all, int pass) {
    const auto of = [&](auto get) {
      std::vector<long long> values;
      for (const Stamps& each : all) values.push_back(get(each));
      return median(values);
    };
    std::printf("\n    plan %d: %lld ns;", pass, of([](const Stamps& s) { return s.ns; }));
    for (int stage = 0; stage < kStages; ++stage) {
      std::printf(" %s %lld", kNames[stage], of([&](const Stamps& s) { return s.stage[stage]; }));
    }
    std::printf("; draft 0 %lld, longest %lld", of([](const Stamps& s) { return s.draft[0]; }),
                of([](const Stamps& s) { return *std::ranges::max_element(s.draft); }));
  }

  BatchPlanShape shape_;
  BatchPlanner planner_;
  BalanceParameters p_{};
  int most_drafters_ = 0;
  std::vector<std::vector<std::int32_t>> batches_{};
  std::int32_t* counts_ = nullptr;
  std::byte* state_ = nullptr;
  Stamps* stamps_ = nullptr;
  cudaEvent_t begin_ = nullptr, end_ = nullptr;
};

void run(int batches) {
  for (const auto& [ranks, experts] :
       {std::pair{4, 128}, {8, 256}, {16, 256}, {32, 256}, {64, 384}}) {
    const BatchPlanShape shape = batch_plan_shape({experts, ranks}, 2, 0, 0, 0);
    Bench bench(shape, batches);
    for (const bool again : {false, true}) {
      for (const int drafters : {32, 8, 4, 1}) {
        const int now = std::min(drafters, bench.most_drafters());
        if (drafters < 32 && now < drafters) continue;
        bench.measure<false>(now, again);
        if (has_short_loops(shape)) bench.measure<true>(now, again);
      }
    }
  }
}

}  // namespace
}  // namespace ferry::cuda

int main(int argc, char** argv) {
  int gpus = 0;
  if (cudaGetDeviceCount(&gpus) != cudaSuccess || gpus == 0) {
    std::puts("NO GPU");
    return 77;
  }
  ferry::cuda::run(argc > 1 ? std::atoi(argv[1]) : 11);
}
