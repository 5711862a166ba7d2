// Groups of GPUs in several virtual domains, joined by libfabric, that lose ranks and go on. Skips
// without a GPU or without libfabric.
#include <cstdio>
#include <filesystem>
#include <functional>
#include <stdexcept>
#include <type_traits>

#include "engine/test_network.hpp"
#include "engine_latency.hpp"
#include "platform/process.hpp"
#include "regroup_case.hpp"

namespace ferry::test {
namespace {

constexpr std::uint64_t kDomainsSeed = 20261128;
constexpr int kDomainSize = 2;

/// What each rank is at, for the words of a failure: a rank that hangs is killed and says nothing.
struct Phases {
  char of[LossTimes::kRanks][96];
  std::atomic<int> gone_on;
};
std::shared_ptr<Phases> shared_phases() {
  void* memory =
      mmap(nullptr, sizeof(Phases), PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0);
  need(memory != MAP_FAILED, "mmap");
  return {new (memory) Phases(), [](Phases* phases) { munmap(phases, sizeof(Phases)); }};
}

class DomainRank {
 public:
  DomainRank(Bootstrap& bootstrap, Phases& phases, std::chrono::nanoseconds deadline,
             const std::string& arbiter = "")
      : rank_(bootstrap.rank()),
        phases_(phases),
        shape_(shape_of(bootstrap.size())),
        device_(take_gpu(bootstrap)),
        group_(in_phase(
            "make the group",
            [&] { return Group(borrowed(bootstrap), config_of(shape_, deadline, arbiter)); })),
        own_(device_),
        world_(bootstrap.size(), shape_, kDomainsSeed),
        mine_(world_.sent(rank_), shape_, device_, copier_) {
    bootstrap.all_gather({}, 60s);
  }

  Group& group() { return group_; }
  const OnGpu& mine() const { return mine_; }
  const Copier& copier() const { return copier_; }

  template <class Work>
  std::invoke_result_t<const Work&> in_phase(const std::string& phase, const Work& work) {
    std::snprintf(phases_.of[rank_], sizeof phases_.of[rank_], "%s", phase.c_str());
    try {
      return work();
    } catch (const Error& error) {
      throw std::runtime_error(phase + ": " + std::string(name_of(error.kind())) + ": " +
                               error.what());
    } catch (const std::exception& error) {
      throw std::runtime_error(phase + ": " + error.what());
    }
  }

  /// Each way to cross, each order of rows, with a stream and without one; every bit is checked.
  void step(const std::string& when, std::optional<DiesAt> death = {}) {
    for (const Crossing how : {Crossing::hierarchical, Crossing::direct}) {
      for (const RowOrder order : {RowOrder::rank_major, RowOrder::expert_major}) {
        const std::string what =
            when + ", " + std::string(name_of(how)) +
            (order == RowOrder::rank_major ? ", rank-major" : ", expert-major");
        in_phase(what, [&] { exchange(how, order, death); });
      }
    }
  }

  /// Exchanges until an error says that `victims` have died, one of whom this rank may be; then
  /// goes on without them.
  void lose(const std::vector<int>& victims, DiesAt death, const std::vector<int>& left) {
    const std::string names = "the death of rank " + std::to_string(victims.front());
    in_phase("barrier before " + names, [&] { group_.barrier(); });
    const bool dies = std::find(victims.begin(), victims.end(), rank_) != victims.end();
    const auto error = error_of([&] {
      for (int i = 0; i < 2000; ++i) {
        for (const Crossing how : {Crossing::hierarchical, Crossing::direct}) {
          std::snprintf(phases_.of[rank_], sizeof phases_.of[rank_], "exchange %d until %s", i,
                        names.c_str());
          exchange(how, RowOrder::rank_major, dies && i == 2 ? std::optional(death) : std::nullopt);
        }
      }
    });
    need(error.has_value(), "exchanges went on after " + names);
    const bool known =
        error->kind() == ErrorKind::peer_failed || error->kind() == ErrorKind::deadline;
    const bool named = std::find(victims.begin(), victims.end(), error->peer()) != victims.end();
    need(known && named, "after " + names + ", got " + std::string(name_of(error->kind())) +
                             " of rank " + std::to_string(error->peer()) + ": " + error->what());
    regroup_to(left);
  }

  void regroup_to(const std::vector<int>& left) {
    const std::uint64_t before = group_.view().epoch;
    const ferry::GroupView view =
        in_phase("regroup of epoch " + std::to_string(before), [&] { return group_.regroup(); });
    need(view.ranks == left, "the view has " + std::to_string(view.ranks.size()) +
                                 " ranks, the first of them " +
                                 std::to_string(view.ranks.empty() ? -1 : view.ranks.front()));
    need(view.epoch > before && view == group_.view(), "the view's epoch");
    world_ = world_of(left, group_.size(), shape_, kDomainsSeed + view.epoch);
    mine_.fill(world_.sent(rank_), copier_);
  }

  void exchange(Crossing how, RowOrder order, std::optional<DiesAt> death = {}) {
    const auto at = [&](DiesAt now) {
      if (death == now) raise(SIGKILL);
    };
    Trip trip{.order = order, .alignment = order == RowOrder::expert_major ? 8 : 1};
    if (order == RowOrder::rank_major) trip.stream = &own_.stream;
    at(DiesAt::plan);
    const Plan plan = group_.plan(mine_.routes_view(), {.stream = trip.stream});
    at(DiesAt::dispatch);
    DispatchOptions there = dispatch_options(mine_, trip);
    there.crossing = how;
    const Received got = group_.dispatch(mine_.x_view(), plan, there);
    at(DiesAt::flight);
    got.event.wait(60s);
    check_received(world_, rank_, trip, got, copier_);
    at(DiesAt::combine);
    CombineOptions back = combine_options(got, trip);
    back.crossing = how;
    const Combined sums = group_.combine(got.x, plan, back);
    at(DiesAt::after);
    sums.event.wait(60s);
    check_combined(world_, rank_, trip, sums, copier_,
                   how == Crossing::hierarchical ? kDomainSize : 0);
  }

 private:
  static Shape shape_of(int ranks) {
    return {.tokens = 203, .hidden = 512, .experts = 3 * ranks, .dtype = Dtype::f32};
  }
  static GroupConfig config_of(const Shape& shape, std::chrono::nanoseconds deadline,
                               const std::string& arbiter) {
    GroupConfig config = config_for(shape);
    config.memory_bytes = std::size_t{64} << 20;
    config.domain_size = kDomainSize;
    config.network = FabricKind::ofi;
    config.deadline = deadline;
    config.arbiter = arbiter;
    return config;
  }

  int rank_;
  Phases& phases_;
  Shape shape_;
  int device_;
  Copier copier_{};
  Group group_;
  OwnStream own_;
  World world_;
  OnGpu mine_;
};

class EngineRegroupDomains : public ::testing::TestWithParam<DiesAt> {
 protected:
  void SetUp() override {
    if (gpu_count() == 0) GTEST_SKIP() << "NO GPU";
    const auto problems =  // in a process of its own: this one must not call CUDA
        run_ranks(1, 1, [](Bootstrap&) { need(engine::test::has_network(), "no libfabric"); });
    if (!problems.empty()) GTEST_SKIP() << problems.front();
  }
  void lose(int ranks, const std::vector<int>& victims,
            const std::function<void(Bootstrap&, Phases&)>& body) {
    const auto phases = shared_phases();
    const auto problems =
        run_losses(ranks, victims, [&](Bootstrap& bootstrap) { body(bootstrap, *phases); }, 150);
    for (const std::string& problem : problems) ADD_FAILURE() << problem;
    if (problems.empty()) return;
    for (int r = 0; r < ranks; ++r) {
      std::printf("rank %d was last at: %s\n", r, phases->of[r]);
    }
  }
};

/// A rail has a hole, then each domain has one rank left.
TEST_P(EngineRegroupDomains, TheOthersGoOnWithoutARankThatDies) {
  lose(4, {3, 1}, [&](Bootstrap& bootstrap, Phases& phases) {
    DomainRank rank(bootstrap, phases, 20s);
    rank.step("before");
    rank.lose({3}, GetParam(), {0, 1, 2});
    rank.step("without rank 3");
    rank.in_phase("commit", [&] { need(!rank.group().commit(7), "a process waits"); });
    need(rank.group().view().step == 7, "the step is not committed");
    need_error(ErrorKind::invalid_argument, "an old step was committed",
               [&] { (void)rank.group().commit(7); });
    rank.lose({1}, GetParam(), {0, 2});
    need(rank.group().view().step == 7, "the step is lost");
    rank.step("without ranks 1 and 3");
    rank.in_phase("barrier at the end", [&] { rank.group().barrier(); });
  });
}

INSTANTIATE_TEST_SUITE_P(Stages, EngineRegroupDomains,
                         ::testing::Values(DiesAt::dispatch, DiesAt::flight, DiesAt::combine),
                         [](const auto& at) { return std::string(name_of(at.param)); });

class EngineRegroupWholeDomains : public EngineRegroupDomains {};

TEST_F(EngineRegroupWholeDomains, TheOthersGoOnWithoutADomain) {
  lose(6, {2, 3}, [&](Bootstrap& bootstrap, Phases& phases) {
    DomainRank rank(bootstrap, phases, 10s);
    rank.step("before");
    rank.lose({2, 3}, DiesAt::dispatch, {0, 1, 4, 5});
    rank.step("without domain 1");
    rank.in_phase("barrier at the end", [&] { rank.group().barrier(); });
  });
}

TEST_F(EngineRegroupWholeDomains, OneOfTwoGoesOnByTheArbiter) {
  const std::string shared =
      testing::TempDir() + "ferry_gpu_arbiter_" + std::to_string(process_id());
  std::filesystem::create_directory(shared);
  lose(4, {0, 1}, [&](Bootstrap& bootstrap, Phases& phases) {
    DomainRank rank(bootstrap, phases, 10s, shared);
    rank.step("before");
    rank.lose({0, 1}, DiesAt::dispatch, {2, 3});
    rank.step("without domain 0");
    rank.in_phase("barrier at the end", [&] { rank.group().barrier(); });
  });
  EXPECT_TRUE(std::filesystem::is_empty(shared)) << "the last rank that leaves removes the file";
  std::filesystem::remove_all(shared);
}

/// Its writes may still be under way: nothing of them is found in the next epoch.
TEST_F(EngineRegroupWholeDomains, ARankThatIsLateIsEvicted) {
  lose(4, {}, [&](Bootstrap& bootstrap, Phases& phases) {
    DomainRank rank(bootstrap, phases, 3s);
    Group& group = rank.group();
    rank.step("before");
    rank.in_phase("barrier before rank 3 is late", [&] { group.barrier(); });
    const auto wait_for = [&](int count) {
      while (phases.gone_on.load() < count) std::this_thread::sleep_for(1ms);
    };
    if (group.rank() == 3) {
      rank.in_phase("rank 3 waits for the others", [&] { wait_for(3); });
      const auto error = error_of([&] {
        for (;;) rank.exchange(Crossing::direct, RowOrder::rank_major);
      });
      need(error->kind() == ErrorKind::evicted, "rank 3 learns: " + std::string(error->what()));
      need_error(ErrorKind::evicted, "rank 3 has regrouped", [&] { (void)group.regroup(); });
      ++phases.gone_on;
      return;
    }
    const auto error = error_of([&] {
      for (;;) rank.exchange(Crossing::direct, RowOrder::rank_major);
    });
    need(error->peer() == 3, "of rank 3, which is late: " + std::string(error->what()));
    rank.regroup_to({0, 1, 2});
    ++phases.gone_on;
    for (int i = 0; i < 5; ++i) rank.step("without rank 3, which runs");
    rank.in_phase("the end of rank 3", [&] { wait_for(4); });
    rank.in_phase("barrier at the end", [&] { group.barrier(); });
  });
}

class EngineRegroupDomainsRefusals : public EngineRegroupDomains {};

TEST_F(EngineRegroupDomainsRefusals, PlansAndRoutesOfLostRanksAreRefused) {
  lose(4, {2}, [&](Bootstrap& bootstrap, Phases& phases) {
    DomainRank rank(bootstrap, phases, 20s);
    Group& group = rank.group();
    rank.step("before");
    const Plan old = group.plan(rank.mine().routes_view());
    rank.lose({2}, DiesAt::flight, {0, 1, 3});
    need_error(ErrorKind::invalid_argument, "an old plan was taken",
               [&] { (void)group.dispatch(rank.mine().x_view(), old, {}); });
    const bool mine = group.rank() == 0;
    if (mine) {
      const auto slots = static_cast<std::size_t>(rank.mine().tokens * rank.mine().shape.topk);
      std::vector<std::int64_t> ids(slots, -1);
      ids.back() = 2 * group.local_experts();
      rank.copier().put(rank.mine().routes.data(), ids);
    }
    const Error error = need_error(
        mine ? ErrorKind::invalid_argument : ErrorKind::peer_failed,
        "a route to a lost rank was taken", [&] { (void)group.plan(rank.mine().routes_view()); },
        mine ? -1 : 0);
    const char* why = mine ? "of rank 2, which is not in epoch 2" : "of a rank that is lost";
    need(std::string(error.what()).find(why) != std::string::npos, error.what());
    rank.in_phase("barrier at the end", [&] { group.barrier(); });
  });
}

/// Nobody has died: all come along.
TEST_F(EngineRegroupDomainsRefusals, AGroupOfWhichNobodyIsLostGoesOn) {
  lose(4, {}, [&](Bootstrap& bootstrap, Phases& phases) {
    DomainRank rank(bootstrap, phases, 20s);
    rank.step("before");
    bootstrap.all_gather({}, 60s);  // nobody is in a call
    for (int i = 0; i < 3; ++i) {
      rank.regroup_to({0, 1, 2, 3});
      rank.step("after a regroup of all");
    }
    rank.in_phase("barrier at the end", [&] { rank.group().barrier(); });
  });
}

TEST_F(EngineRegroupDomainsRefusals, AGroupWithALatencyExchangeIsRefused) {
  lose(4, {}, [&](Bootstrap& bootstrap, Phases& phases) {
    DomainRank rank(bootstrap, phases, 20s);
    const LatencyExchange latency(rank.group(), latency_config(rank.mine().shape));
    need_error(ErrorKind::unsupported, "a group with a latency exchange has regrouped",
               [&] { (void)rank.group().regroup(); });
    rank.in_phase("barrier at the end", [&] { rank.group().barrier(); });
    rank.step("after a regroup was refused");
  });
}

}  // namespace
}  // namespace ferry::test
