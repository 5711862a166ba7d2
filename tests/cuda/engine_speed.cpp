// What calls of the CUDA engine cost that a benchmark of the command line does not show. Disabled:
//   engine_test --gtest_also_run_disabled_tests --gtest_filter='EngineSpeedTest.*'
#include <gtest/gtest.h>

#include <algorithm>
#include <chrono>
#include <cstdio>

#include "cuda/throughput/engine.hpp"
#include "engine_seat.hpp"
#include "touch.hpp"

namespace ferry::test {
namespace {

constexpr std::uint64_t kSeed = 20261125;

/// What waiting for the counts costs: microseconds of plan and dispatch, from the stream's view.
TEST(EngineSpeedTest, DISABLED_PlanAndDispatch) {
  GroupConfig config = config_for({});
  config.experts = 256;
  config.memory_bytes = std::size_t{3} << 30;
  on_ranks(gpu_count(), false, config, [](Seat& seat) {
    OwnStream own(seat.device);
    read_later(own.raw, 0ms);
    need(cudaStreamSynchronize(own.raw), "read_later");
    seat.meet();
    cudaEvent_t begin = nullptr, end = nullptr;
    need(cudaEventCreate(&begin), "cudaEventCreate");
    need(cudaEventCreate(&end), "cudaEventCreate");
    const Device device{DeviceKind::cuda, seat.device};
    for (const std::int64_t tokens : {4096, 128}) {
      constexpr std::int64_t kHidden = 7168, kTopk = 8;
      std::vector<std::int64_t> routes(static_cast<std::size_t>(tokens * kTopk));
      std::uint64_t state = kSeed + static_cast<std::uint64_t>(seat.rank());
      for (std::int64_t& route : routes) {
        route = static_cast<std::int64_t>((state = mix(state)) % 256);
      }
      const Buffer x(static_cast<std::size_t>(tokens * kHidden * 2)), ids(routes.size() * 8);
      seat.copier.put(ids.data(), routes);
      for (const char* way : {"worst case", "exact, guessed", "exact, known"}) {
        std::vector<float> times, planned, dispatched;
        const auto us_since = [](std::chrono::steady_clock::time_point from) {
          return std::chrono::duration<float, std::micro>(std::chrono::steady_clock::now() - from)
              .count();
        };
        for (int i = 0; i < 25; ++i) {
          seat.meet();
          read_later(own.raw, 1ms);  // the launches lie behind it
          PlanOptions planning;
          planning.stream = &own.stream;
          const Plan align = seat.group.plan(  // all GPUs begin at the same time
              ConstTensorView(ids.data(), Dtype::i64, {1, kTopk}, device), planning);
          need(cudaEventRecord(begin, own.raw), "cudaEventRecord");
          auto start = std::chrono::steady_clock::now();
          const Plan plan = seat.group.plan(
              ConstTensorView(ids.data(), Dtype::i64, {tokens, kTopk}, device), planning);
          planned.push_back(us_since(start));
          DispatchOptions options;
          options.stream = &own.stream;
          options.sms = 16;
          if (way[0] == 'w') options.worst_case_rows = tokens * seat.size();
          if (way[7] == 'k') (void)plan.recv_rows();
          start = std::chrono::steady_clock::now();
          const Received received = seat.group.dispatch(
              ConstTensorView(x.data(), Dtype::bf16, {tokens, kHidden}, device), plan, options);
          dispatched.push_back(us_since(start));
          need(cudaEventRecord(end, own.raw), "cudaEventRecord");
          received.event.wait(60s);
          float ms = 0;
          need(cudaEventSynchronize(end), "cudaEventSynchronize");
          need(cudaEventElapsedTime(&ms, begin, end), "cudaEventElapsedTime");
          times.push_back(ms * 1000);
        }
        for (auto* sorted : {&times, &planned, &dispatched}) {
          std::sort(sorted->begin(), sorted->end());
        }
        if (seat.rank() == 0) {
          std::printf(
              "SPEED %lld tokens, plan + dispatch, %s: median %.1f us, least %.1f us; on the CPU "
              "plan %.1f, dispatch %.1f (least %.1f)\n",
              static_cast<long long>(tokens), way, times[times.size() / 2], times[0],
              planned[planned.size() / 2], dispatched[dispatched.size() / 2], dispatched[0]);
          std::fflush(stdout);
        }
      }
    }
    const auto engine = std::static_pointer_cast<cuda::CudaEngine>(seat.group.engine());
    if (seat.rank() == 0) {
      std::printf("SPEED %llu guesses, %llu too low\n",
                  static_cast<unsigned long long>(engine->guesses().made.load()),
                  static_cast<unsigned long long>(engine->guesses().too_low.load()));
      std::fflush(stdout);
    }
    seat.meet();
  });
}

}  // namespace
}  // namespace ferry::test
