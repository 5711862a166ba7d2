// Collectives on GPUs with ranks that stay away or die, and where they cannot be. Skips without a
// GPU.
#include <gtest/gtest.h>
#include <signal.h>
#include <unistd.h>

#include <chrono>
#include <thread>

#include "crew.hpp"
#include "engine_seat.hpp"

namespace ferry::test {
namespace {

std::size_t bytes_of(std::int64_t floats) {
  return static_cast<std::size_t>(floats) * 4;
}

/// Ranks in domains of this size; 0: in one.
void rank_stays_away(int ranks, int domain_size) {
  if (gpu_count() == 0) GTEST_SKIP() << "NO GPU";
  const RankBody rank = [&](Bootstrap& bootstrap) {
    take_gpu(bootstrap);
    GroupConfig config;
    config.backend = Backend::cuda;
    config.deadline = 4s;
    config.domain_size = domain_size;
    for (const std::int64_t count : {100, 1'000'000}) {
      const Buffer x(bytes_of(count));
      Collectives all(borrowed(bootstrap), config);
      bootstrap.all_gather({}, 60s);
      if (all.rank() != 1) {
        int device = 0;
        need(cudaGetDevice(&device), "cudaGetDevice");
        const TensorView view(x.data(), Dtype::f32, {count}, {DeviceKind::cuda, device});
        need_error(ErrorKind::deadline, "rank 1 was not missed", [&] { all.all_reduce(view); }, 1);
      }
      bootstrap.all_gather({}, 60s);
    }
  };
  for (const std::string& problem : run_on_crew(ranks, 1, rank, 60)) ADD_FAILURE() << problem;
}

TEST(CollectivesFailures, ARankThatStaysAwayIsNamed) {
  rank_stays_away(3, 0);
}
TEST(CollectivesFailures, ARankThatStaysAwayIsNamedInDomains) {
  rank_stays_away(4, 2);
}

/// A rank is killed while all make calls one after another, each of them of this size.
struct Killed {
  const char* name;
  std::int64_t count;
  bool registered;
  bool rows = false;  ///< copy_rows, by a table in GPU memory
  int ranks = 3;
  int domain_size = 0;     ///< 0: one domain
  bool transfers = false;  ///< send and recv, from rank to rank
};
class CollectivesKillTest : public ::testing::TestWithParam<Killed> {};
INSTANTIATE_TEST_SUITE_P(Calls, CollectivesKillTest,
                         ::testing::Values(Killed{"OneShot", 1000, false},
                                           Killed{"Staged", 4'000'000, false},
                                           Killed{"Direct", 4'000'000, true},
                                           Killed{"Rows", 4'000'000, true, true},
                                           Killed{"Transfers", 4'000'000, false, false, 3, 0, true},
                                           Killed{"SmallInDomains", 1000, false, false, 4, 2},
                                           Killed{"InDomains", 4'000'000, true, false, 4, 2},
                                           Killed{"InDomainsOfOne", 4'000'000, true, false, 3, 1}),
                         [](const auto& one) { return one.param.name; });

TEST_P(CollectivesKillTest, SurvivorsNameTheDead) {
  if (gpu_count() == 0) GTEST_SKIP() << "NO GPU";
  constexpr int kVictim = 1;
  const std::int64_t count = GetParam().count;
  const RankBody rank = [&](Bootstrap& bootstrap) {
    const int device = take_gpu(bootstrap);
    GroupConfig config;
    config.backend = Backend::cuda;
    config.deadline = 30s;  // a rank that is waited for until then is late, not dead
    config.memory_bytes = bytes_of(count);
    config.domain_size = GetParam().domain_size;
    Collectives all(borrowed(bootstrap), config);
    const Buffer ordinary(bytes_of(count));
    const Tensor own = all.empty({count}, Dtype::f32);
    void* data = GetParam().registered ? own.data() : ordinary.data();
    const TensorView x(data, Dtype::f32, {count}, {DeviceKind::cuda, device});
    const Buffer table(4 * 3 * 2);  // [3 ranks, 2 slots], all of row 0 of rank 0
    need(cudaMemset(table.data(), 0, 4 * 3 * 2), "cudaMemset");
    const Device gpu{DeviceKind::cuda, device};
    const auto pass_on = [&] {
      const int after = (all.rank() + 1) % all.size();
      if (all.rank() != 0) (void)all.recv(x, (all.rank() + all.size() - 1) % all.size());
      (void)all.send(x, after);
      return all.rank() == 0 ? all.recv(x, all.size() - 1) : Event();
    };
    const auto run = [&] {
      if (GetParam().transfers) return pass_on();
      if (!GetParam().rows) return all.all_reduce(x, {.op = ReduceOp::max});
      return all.copy_rows(ConstTensorView(ordinary.data(), Dtype::f32, {2, count / 2}, gpu),
                           TensorView(data, Dtype::f32, {2, count / 2}, gpu),
                           ConstTensorView(table.data(), Dtype::i32, {3, 2}, gpu));
    };
    (void)run();
    bootstrap.all_gather({}, 60s);
    if (all.rank() == kVictim) {
      std::thread([] {
        std::this_thread::sleep_for(50ms);
        kill(getpid(), SIGKILL);
      }).detach();
    }
    const auto calls = [&] {
      for (;;) (void)run();
    };
    need_error(ErrorKind::peer_failed, "calls went on without rank 1", calls, kVictim);
    need_error(ErrorKind::peer_failed, "a later call was made", calls, kVictim);
    const Buffer after(1 << 20);  // the GPU is usable
    need(cudaMemset(after.data(), 0, 1 << 20), "cudaMemset");
    need(cudaDeviceSynchronize(), "cudaDeviceSynchronize");
  };
  const auto problems = run_ranks(GetParam().ranks, 1, rank, 90);
  ASSERT_EQ(problems.size(), 1u) << (problems.empty() ? "" : problems.back());
  EXPECT_NE(problems[0].find("rank 1: its process ended"), std::string::npos) << problems[0];
}

}  // namespace
}  // namespace ferry::test
