// State on GPUs that outlives its process: a rank is killed, the others have what it put, and so
// has the process that takes its place. Skips without a GPU; in several domains without libfabric.
#include <gtest/gtest.h>
#include <signal.h>

#include <ferry/vault.hpp>
#include <thread>

#include "engine/test_network.hpp"
#include "engine_seat.hpp"
#include "regroup_case.hpp"
#include "reliability/processes.hpp"

namespace ferry::test {
namespace {

constexpr int kVaultRanks = 4;
constexpr int kKilled = 1;
/// More than the buffers of a copy take at once, and no multiple of anything.
constexpr std::int64_t kWords = (std::int64_t{17} << 18) + 251;

/// A rank's weights on its GPU and its counter in CPU memory.
class Weights {
 public:
  explicit Weights(int device) : device_{DeviceKind::cuda, device}, own_(device) {}

  static std::vector<std::int32_t> of(int rank, std::uint64_t step) {
    std::vector<std::int32_t> values(kWords);
    for (std::size_t i = 0; i < values.size(); ++i) {
      values[i] = static_cast<std::int32_t>(i * 31 + step * 1009) + rank;
    }
    return values;
  }
  /// They are these when what is on the stream has ended, which takes a while.
  void become(int rank, std::uint64_t step) {
    counter_ = {rank, static_cast<std::int64_t>(step)};
    const std::vector<std::int32_t> values = of(rank, step);
    const auto copy = [&](void* to, const void* from) {
      need(cudaMemcpyAsync(to, from, kWords * 4, cudaMemcpyDefault, own_.raw), "cudaMemcpyAsync");
    };
    copy(next_.data(), values.data());
    for (int i = 0; i < 400; ++i) {
      need(cudaMemsetAsync(buffer_.data(), i, kWords * 4, own_.raw), "cudaMemsetAsync");
    }
    copy(buffer_.data(), next_.data());
  }
  std::vector<VaultPart> parts(int rank) const {
    const ConstTensorView on_gpu(buffer_.data(), Dtype::i32, {kWords}, device_);
    return {{rank, on_gpu}, {rank, {counter_.data(), Dtype::i64, {2}}}};
  }
  std::vector<VaultTarget> targets() {
    return {{{buffer_.data(), Dtype::i32, {kWords}, device_}},
            {{counter_.data(), Dtype::i64, {2}}}};
  }
  void need_be(int rank, std::uint64_t step) const {
    const std::string what =
        "the state of rank " + std::to_string(rank) + " after step " + std::to_string(step) + ": ";
    need(counter_ == std::vector<std::int64_t>{rank, static_cast<std::int64_t>(step)},
         what + "on the CPU rank " + std::to_string(counter_[0]) + ", step " +
             std::to_string(counter_[1]));
    std::vector<std::int32_t> there(kWords);
    need(cudaMemcpyAsync(there.data(), buffer_.data(), kWords * 4, cudaMemcpyDefault, own_.raw),
         "cudaMemcpyAsync");
    need(cudaStreamSynchronize(own_.raw), "cudaStreamSynchronize");
    const std::vector<std::int32_t> wanted = of(rank, step);
    for (std::size_t i = 0; i < there.size(); ++i) {
      need(there[i] == wanted[i], what + "word " + std::to_string(i) + " on the GPU is " +
                                      std::to_string(there[i]) + ", expected " +
                                      std::to_string(wanted[i]));
    }
  }
  Stream& stream() { return own_.stream; }

 private:
  Device device_;
  OwnStream own_;
  Buffer buffer_{kWords * 4}, next_{kWords * 4};
  std::vector<std::int64_t> counter_ = {-1, -1};
};

class VaultRank {
 public:
  /// `domain_size`: 0: one domain, which processes may join.
  explicit VaultRank(Bootstrap& bootstrap, int domain_size = 0)
      : device_(take_gpu(bootstrap)),
        group_(borrowed(bootstrap), config(domain_size)),
        weights_(device_),
        vault_(group_, Vault::bytes_of(weights_.parts(0))) {}

  Group& group() { return group_; }
  /// The step that all have, and all of its state, whichever of `keys` there are.
  std::uint64_t recover(const std::vector<std::int64_t>& keys) {
    const auto step = vault_.recover(keys);
    need(step.has_value(), "no version is there");
    need(vault_.keys() == keys, "other keys than " + std::to_string(keys.size()) + ": " +
                                    std::to_string(vault_.keys().size()));
    for (const std::int64_t key : keys) {
      vault_.get(key, weights_.targets(), &weights_.stream());
      weights_.need_be(static_cast<int>(key), *step);
    }
    return *step;
  }
  void begin() {
    need(!vault_.recover().has_value(), "a version is there");
    put(0);
  }
  /// Whether a process waits.
  bool step_to(std::uint64_t step) {
    const bool waits = group_.commit(step);
    put(step);
    return waits;
  }
  void step_until_one_waits(std::uint64_t step) {
    try {
      while (!step_to(++step)) std::this_thread::sleep_for(1ms);
    } catch (const Error& error) {  // another rank had its answer before, and regroups
      need(error.kind() == ErrorKind::peer_failed, error.what());
    }
  }
  /// Until rank `victim` has died.
  void lose(int victim) {
    const Error error = need_error(ErrorKind::peer_failed, "nobody has died", [&] {
      for (;;) group_.barrier();
    });
    need(error.peer() == victim, error.what());
    (void)group_.regroup();
  }

 private:
  static GroupConfig config(int domain_size) {
    GroupConfig config = config_for({.experts = 2 * kVaultRanks});
    if (domain_size == 0) {
      config.elastic = "vault";
    } else {
      config.domain_size = domain_size;
      config.network = FabricKind::ofi;
    }
    return config;
  }
  void put(std::uint64_t step) {
    weights_.become(group_.rank(), step);
    vault_.put(step, weights_.parts(group_.rank()), &weights_.stream());
    weights_.become(99, 99);  // what comes on the stream later is not put
  }

  int device_;
  Group group_;
  Weights weights_;
  Vault vault_;
};

void live(Bootstrap& bootstrap) {
  VaultRank rank(bootstrap);
  Group& group = rank.group();
  std::uint64_t step = 3;
  if (bootstrap.joins()) {
    step = rank.recover({0, 2, 3});
  } else {
    rank.begin();
    for (std::uint64_t each = 1; each <= step; ++each) (void)rank.step_to(each);
    group.barrier();
    if (group.rank() == kKilled) raise(SIGKILL);
    rank.lose(kKilled);
    need(rank.recover({0, 1, 2, 3}) == 3, "another step after the loss");
    rank.step_until_one_waits(step);
    const ferry::GroupView view = group.regroup();
    need(view.joined == std::vector<int>{kKilled},
         "another view than that of a process that has joined");
    step = rank.recover({0, 2, 3});
    need(step + 1 >= view.step, "more than one step was lost by the join");
  }
  (void)rank.step_to(step + 1);
  (void)rank.step_to(step + 2);
  need(rank.recover({0, 1, 2, 3}) == step + 2, "another step of all ranks");
  group.barrier();
}

class EngineRegroupVault : public ::testing::Test {
 protected:
  void SetUp() override {
    if (gpu_count() == 0) GTEST_SKIP() << "NO GPU";
  }
};

TEST_F(EngineRegroupVault, StateOfAKilledRankIsThereForTheOthersAndForItsSuccessor) {
  Ranks ranks(kVaultRanks, [](int, std::shared_ptr<Bootstrap> bootstrap, const Reporter& reporter) {
    try {
      live(*bootstrap);
      reporter.line("done");
    } catch (const std::exception& error) {
      reporter.line(error.what());
    }
  });
  ranks.restart(kKilled);
  for (int rank = 0; rank < kVaultRanks; ++rank) {
    EXPECT_EQ(ranks.line(rank, 100), "done") << "rank " << rank;
  }
}

/// Its keeper is in another domain, and so are some who want what it had.
TEST_F(EngineRegroupVault, StateOfAKilledRankIsThereForTheOthersOfSeveralDomains) {
  const auto network =  // in a process of its own: this one must not call CUDA
      run_ranks(1, 1, [](Bootstrap&) { need(engine::test::has_network(), "no libfabric"); });
  if (!network.empty()) GTEST_SKIP() << network.front();
  const auto problems = run_losses(
      kVaultRanks, {kKilled},
      [](Bootstrap& bootstrap) {
        VaultRank rank(bootstrap, 2);
        rank.begin();
        for (std::uint64_t step = 1; step <= 3; ++step) (void)rank.step_to(step);
        rank.group().barrier();
        if (bootstrap.rank() == kKilled) raise(SIGKILL);
        rank.lose(kKilled);
        need(rank.recover({0, 1, 2, 3}) == 3, "another step after the loss");
        for (std::uint64_t step = 4; step <= 5; ++step) (void)rank.step_to(step);
        need(rank.recover({0, 2, 3}) == 5, "another step of those that are left");
        rank.group().barrier();
      },
      150);
  for (const std::string& problem : problems) ADD_FAILURE() << problem;
}

TEST_F(EngineRegroupVault, WhatCannotBeIsRefused) {
  on_ranks(2, false, config_for({}), [](Seat& seat) {
    Weights weights(seat.device);
    Vault vault(seat.group, Vault::bytes_of(weights.parts(0)));
    need(!vault.recover().has_value(), "a version is there");
    std::vector<VaultPart> parts = weights.parts(seat.rank());
    parts[0].tensor.device.index = 77;
    need_error(ErrorKind::invalid_argument, "a tensor of another GPU was put",
               [&] { vault.put(0, parts); });
    OwnStream own(seat.device);
    need(cudaStreamBeginCapture(own.raw, cudaStreamCaptureModeRelaxed), "cudaStreamBeginCapture");
    need_error(ErrorKind::unsupported, "a put was captured",
               [&] { vault.put(0, weights.parts(seat.rank()), &own.stream); });
    cudaGraph_t graph = nullptr;
    need(cudaStreamEndCapture(own.raw, &graph), "cudaStreamEndCapture");
    need(cudaGraphDestroy(graph), "cudaGraphDestroy");
    weights.become(seat.rank(), 0);
    vault.put(0, weights.parts(seat.rank()), &weights.stream());
    need(vault.recover() == std::optional<std::uint64_t>(0), "another step");
    const int other = 1 - seat.rank();
    vault.get(other, weights.targets(), &weights.stream());
    weights.need_be(other, 0);
    seat.meet();
  });
}

}  // namespace
}  // namespace ferry::test
