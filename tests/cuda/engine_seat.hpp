// One rank of an engine's test, as a thread or a process; the tests of all numbers of ranks.
#pragma once
#include <gtest/gtest.h>

#include <chrono>
#include <cstdlib>
#include <functional>
#include <optional>
#include <string>

#include "core/test_errors.hpp"
#include "crew.hpp"
#include "engine_case.hpp"

namespace ferry::test {

using namespace std::chrono_literals;

/// Ranks that are threads of one process wait for each other on one GPU: their streams must not
/// share its queues, of which there are 8 unless it is told otherwise.
inline const bool kQueues = setenv("CUDA_DEVICE_MAX_CONNECTIONS", "32", 0) == 0;

/// What a rank's body is given.
struct Seat {
  Group& group;
  Bootstrap& bootstrap;
  int device;
  Copier copier{};
  int rank() const { return group.rank(); }
  int size() const { return group.size(); }
  void meet() const { bootstrap.all_gather({}, 60s); }
  /// Other tokens in the memory of `mine`, on all ranks.
  World refill(const OnGpu& mine, std::uint64_t seed) const {
    World world(size(), mine.shape, seed);
    mine.fill(world.sent(rank()), copier);
    meet();
    return world;
  }
  /// What this rank sends in that world, on its GPU.
  OnGpu on_gpu(const World& world) const {
    return {world.inputs[static_cast<std::size_t>(rank())], world.shape, device, copier};
  }
};

/// Makes this rank's GPU the current one; ranks take the GPUs in turn.
inline int take_gpu(const Bootstrap& bootstrap) {
  int gpus = 0;
  need(cudaGetDeviceCount(&gpus), "cudaGetDeviceCount");
  const int device = bootstrap.rank() % gpus;
  need(cudaSetDevice(device), "cudaSetDevice");
  return device;
}

/// For a group of a test that keeps the bootstrap and outlives the group.
inline std::shared_ptr<Bootstrap> borrowed(Bootstrap& bootstrap) {
  return {&bootstrap, [](Bootstrap*) {}};
}

/// For run_ranks and run_on_crew: gives a rank its GPU and its group, then runs the body.
inline RankBody seated(const GroupConfig& config, const std::function<void(Seat&)>& body) {
  return [config, body](Bootstrap& bootstrap) {
    const int device = take_gpu(bootstrap);
    Group group(borrowed(bootstrap), config);
    Seat seat{group, bootstrap, device};
    body(seat);
  };
}

inline GroupConfig config_for(const Shape& shape) {
  GroupConfig config;
  config.experts = shape.experts;
  config.backend = Backend::cuda;
  config.deadline = 20s;
  config.memory_bytes = std::size_t{8} << 20;
  return config;
}

/// Runs the body on ranks that are threads of one process, or processes of their own.
inline void on_ranks(int ranks, bool threads, GroupConfig config,
                     const std::function<void(Seat&)>& body) {
  if (gpu_count() == 0) GTEST_SKIP() << "NO GPU";
  ASSERT_TRUE(kQueues);
  const RankBody rank = seated(config, [&](Seat& seat) {
    body(seat);
    seat.group.destroy();
  });
  const auto problems = run_on_crew(ranks, threads ? ranks : 1, rank, 120);
  for (const std::string& problem : problems) ADD_FAILURE() << problem;
}

/// A stream of the caller's.
struct OwnStream {
  cudaStream_t raw = nullptr;
  Stream stream;
  explicit OwnStream(int device) : stream(make(device, raw)) {}
  ~OwnStream() { cudaStreamDestroy(raw); }
  static Stream make(int device, cudaStream_t& raw) {
    need(cudaStreamCreateWithFlags(&raw, cudaStreamNonBlocking), "cudaStreamCreateWithFlags");
    return Stream::of_cuda(raw, device);
  }
};

inline std::optional<ErrorKind> kind_of(const std::function<void()>& call) {
  const auto error = error_of(call);
  return error ? std::optional(error->kind()) : std::nullopt;
}
/// Needs an error of that kind, which names that peer unless it is −1; `otherwise`: what it means
/// that there is none.
inline Error need_error(ErrorKind kind, const std::string& otherwise,
                        const std::function<void()>& call, int peer = -1) {
  const auto error = error_of(call);
  need(error.has_value(), otherwise);
  need(error->kind() == kind && (peer < 0 || error->peer() == peer), error->what());
  return *error;
}

struct RankCount {
  int ranks;
  bool threads;
};

class EngineTest : public ::testing::TestWithParam<RankCount> {
 protected:
  void each(const Shape& shape, const std::function<void(Seat&)>& body) {
    on_ranks(GetParam().ranks, GetParam().threads, config_for(shape), body);
  }
  /// The same with the tokens of a seed, each rank's own on its GPU.
  using SeededBody = std::function<void(Seat&, const World&, const OnGpu&)>;
  void each(const Shape& shape, std::uint64_t seed, const SeededBody& body) {
    each_within(config_for(shape).deadline, shape, seed, body);
  }
  void each_within(std::chrono::nanoseconds deadline, const Shape& shape, std::uint64_t seed,
                   const SeededBody& body) {
    GroupConfig config = config_for(shape);
    config.deadline = deadline;
    on_ranks(GetParam().ranks, GetParam().threads, config, [&](Seat& seat) {
      const World world(seat.size(), shape, seed);
      body(seat, world, seat.on_gpu(world));
    });
  }
};

/// One pair in one process, which may share a GPU's queues; and processes, with and without a rank
/// that is neither the first nor the last.
inline const auto kAllRanks =
    ::testing::Values(RankCount{2, true}, RankCount{2, false}, RankCount{3, false});

inline std::string ranks_name(const ::testing::TestParamInfo<RankCount>& at) {
  return (at.param.threads ? "threads" : "processes") + std::to_string(at.param.ranks);
}

}  // namespace ferry::test
