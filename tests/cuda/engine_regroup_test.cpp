// Ranks of the CUDA engine that are killed, and the others, which go on in the same group. Skips
// without a GPU.
#include <gtest/gtest.h>

#include "regroup_case.hpp"
#include "reliability/processes.hpp"

namespace ferry::test {
namespace {

constexpr std::uint64_t kRegroupSeed = 20261127;
constexpr int kRegroupRanks = 4;

class EngineRegroup : public ::testing::TestWithParam<std::pair<DiesAt, DiesAt>> {
 protected:
  void SetUp() override {
    if (gpu_count() == 0) GTEST_SKIP() << "NO GPU";
  }
};

class EngineRegroupJoins : public EngineRegroup {
 protected:
  /// In which processes begin and join; each says who it is.
  static TcpOptions a_job() {
    TcpOptions options;
    options.size = kRegroupRanks;
    options.port = free_port();
    options.secret = "secret of " + std::to_string(options.port);
    return options;
  }
};

/// The routes of `loser`, which must have tokens, name an expert of rank `lost`.
void route_to_lost(RegroupingRank& rank, int loser, int lost) {
  Group& group = rank.group();
  const bool mine = group.rank() == loser;
  if (mine) {
    std::vector<std::int64_t> ids(
        static_cast<std::size_t>(rank.mine().tokens * rank.mine().shape.topk), -1);
    ids.at(ids.size() - 1) = lost * group.local_experts();
    rank.copier().put(rank.mine().routes.data(), ids);
  }
  const Error error = need_error(
      mine ? ErrorKind::invalid_argument : ErrorKind::peer_failed,
      "a route to a lost rank was taken", [&] { (void)group.plan(rank.mine().routes_view()); },
      loser);
  // Not that the loser has died, which is of the same kind.
  const std::string why = "experts of rank " + std::to_string(lost) + ", which is not in epoch ";
  need(std::string(error.what()).find(why) != std::string::npos, error.what());
}

/// A plan of the epoch before, in calls and in a graph.
class OldPlan {
 public:
  OldPlan(RegroupingRank& rank, cudaStream_t raw, Stream& stream) : rank_(rank), stream_(stream) {
    plan_ = rank.group().plan(rank.mine().routes_view());
    (void)rank.group().dispatch(rank.mine().x_view(), plan_, {});
    graph_.emplace(raw, [this] { got_ = dispatch(); });
  }
  void check_refused() {
    need_error(ErrorKind::invalid_argument, "an old plan was taken", [&] { (void)dispatch(); });
    graph_->run();
    need_error(ErrorKind::invalid_argument, "an old plan was taken in a graph",
               [&] { rank_.group().barrier(); });
    rank_.group().barrier();
  }

 private:
  Received dispatch() {
    DispatchOptions options;
    options.stream = &stream_;
    return rank_.group().dispatch(rank_.mine().x_view(), plan_, options);
  }
  RegroupingRank& rank_;
  Stream& stream_;
  Plan plan_{};
  Received got_{};
  std::optional<Graph> graph_{};
};

/// One after the other, at these stages.
TEST_P(EngineRegroup, TheOthersGoOnWithoutRanksThatDie) {
  const auto times = shared_times(2);
  const auto problems = run_losses(
      kRegroupRanks, {1, 0},
      [&](Bootstrap& bootstrap) {
        RegroupingRank rank(bootstrap, kRegroupSeed);
        const ferry::GroupView first = rank.lose(1, GetParam().first, *times[0]);
        need(first.epoch == 2 && first.ranks == std::vector<int>{0, 2, 3} &&
                 first.lost == std::vector<int>{1} && first.step == 0,
             "another view");
        rank.replay_after(*times[0]);
        need(!rank.group().commit(7), "a process waits");
        need(rank.group().view().step == 7, "the step is not committed");
        need_error(ErrorKind::invalid_argument, "an old step was committed",
                   [&] { (void)rank.group().commit(7); });
        const ferry::GroupView second = rank.lose(0, GetParam().second, *times[1]);
        need(second.epoch == 3 && second.ranks == std::vector<int>{2, 3} && second.step == 7,
             "another view");
        rank.replay_after(*times[1]);
      },
      100);
  for (const std::string& problem : problems) ADD_FAILURE() << problem;
}

INSTANTIATE_TEST_SUITE_P(Stages, EngineRegroup,
                         ::testing::Values(std::pair(DiesAt::plan, DiesAt::flight),
                                           std::pair(DiesAt::replay, DiesAt::dispatch),
                                           std::pair(DiesAt::combine, DiesAt::after)),
                         [](const auto& at) {
                           return std::string(name_of(at.param.first)) + "_" +
                                  name_of(at.param.second);
                         });

/// A rank is killed, a process takes its place and is killed, and another takes it: graphs of the
/// others are never captured anew.
TEST_F(EngineRegroupJoins, ProcessesTakeThePlaceOfARankThatDies) {
  constexpr int kLost = 1;
  constexpr std::array kDies = {DiesAt::flight, DiesAt::replay};
  const auto times = shared_times(kDies.size());
  const auto memory = shared_block(sizeof(std::atomic<std::size_t>));
  auto& joined = *new (memory.get()) std::atomic<std::size_t>(0);
  Ranks ranks(kRegroupRanks,
              [&](int, std::shared_ptr<Bootstrap> bootstrap, const Reporter& reporter) {
                RegroupingRank rank(*bootstrap, kRegroupSeed + 3, "joins");
                std::size_t round = 0;
                if (bootstrap->joins()) {
                  round = ++joined;
                  rank.take_part();
                }
                for (; round < kDies.size(); ++round) {
                  rank.lose(kLost, kDies[round], *times[round]);
                  rank.replay_after(*times[round]);
                  rank.take_in(kLost);
                }
                rank.group().barrier();
                reporter.line("done");
              });
  for (std::size_t i = 0; i < kDies.size(); ++i) ranks.restart(kLost);
  for (int rank = 0; rank < kRegroupRanks; ++rank) {
    EXPECT_EQ(ranks.line(rank, 100), "done") << "rank " << rank;
  }
}

/// Of some that come at the same time one is there first. It has mapped the memory of the others by
/// then, whose seats are holes of the epoch in which it begins.
TEST_F(EngineRegroupJoins, ProcessesComeAtTheSameTimeToOneThatBegan) {
  constexpr int kRounds = 3;
  const TcpOptions options = a_job();
  const auto body = [&](Bootstrap& board) {
    TcpOptions mine = options;
    mine.rank = board.rank();
    mine.begin = board.rank() == 0;
    mine.join = !mine.begin;
    (void)take_gpu(board);
    need(cudaFree(nullptr), "cudaFree");  // the driver lets processes in one after another
    for (int round = 0; round < kRounds; ++round) {
      board.all_gather({}, 60s);
      const auto bootstrap = tcp_bootstrap(mine);
      RegroupingRank rank(*bootstrap, kRegroupSeed + 5, "round " + std::to_string(round));
      rank.take_in_all();
      rank.group().barrier();
    }
  };
  for (const std::string& problem : run_ranks(kRegroupRanks, 1, body, 100)) {
    ADD_FAILURE() << problem;
  }
}

/// A rank leaves, and its process runs on: graphs of the others go on, without it and with the
/// process that takes its place.
TEST_F(EngineRegroupJoins, TheProcessOfARankThatLeavesRunsOn) {
  constexpr int kLeaver = 1, kSpare = kRegroupRanks;  // processes
  const TcpOptions options = a_job();
  const auto body = [&](Bootstrap& board) {
    TcpOptions mine = options;
    mine.join = board.rank() == kSpare;
    mine.rank = mine.join ? kLeaver : board.rank();
    if (mine.join) board.all_gather({}, 60s);  // all go on without the rank that left
    const auto bootstrap = tcp_bootstrap(mine);
    std::optional<RegroupingRank> rank(std::in_place, *bootstrap, kRegroupSeed + 6, "runs on");
    if (board.rank() == kLeaver) {
      rank.reset();
      board.all_gather({}, 60s);
    } else {
      if (!mine.join) {
        rank->miss(kLeaver);
        board.all_gather({}, 60s);
        rank->take_in(kLeaver);
      } else {
        rank->take_part();
      }
      rank->group().barrier();
    }
    board.all_gather({}, 60s);
  };
  for (const std::string& problem : run_ranks(kRegroupRanks + 1, 1, body, 100)) {
    ADD_FAILURE() << problem;
  }
}

class EngineRegroupRefusals : public EngineRegroup {};

TEST_F(EngineRegroupRefusals, PlansAndRoutesOfLostRanksAreRefused) {
  const auto times = shared_times(1);
  const auto problems = run_losses(
      3, {1},
      [&](Bootstrap& bootstrap) {
        RegroupingRank rank(bootstrap, kRegroupSeed + 1);
        OwnStream own(rank.mine().device.index);
        OldPlan old(rank, own.raw, own.stream);
        rank.lose(1, DiesAt::flight, *times[0]);
        old.check_refused();
        route_to_lost(rank, 0, 1);  // the last rank has no tokens
        rank.group().barrier();
      },
      100);
  for (const std::string& problem : problems) ADD_FAILURE() << problem;
}

/// Some told bytes are nothing, some are longer than those of others.
void gather_among(Bootstrap& bootstrap, const std::vector<int>& ranks, int here) {
  const auto told_by = [](int rank, int round) {
    const auto size = static_cast<std::size_t>((rank + round) % 3 * 3001);
    return std::vector<std::byte>(size, std::byte(16 * rank + round));
  };
  for (int round = 0; round < 3; ++round) {
    const auto all = bootstrap.all_gather(told_by(here, round), 60s);
    need(all.size() == ranks.size(), "another number of ranks");
    for (std::size_t i = 0; i < ranks.size(); ++i) {
      need(all[i] == told_by(ranks[i], round), "other bytes of rank " + std::to_string(ranks[i]));
    }
  }
}

TEST_F(EngineRegroupRefusals, TheRanksThatAreLeftMeetByTheGroup) {
  const auto times = shared_times(1);
  const auto problems = run_losses(
      4, {0},
      [&](Bootstrap& bootstrap) {
        RegroupingRank rank(bootstrap, kRegroupSeed + 3);
        gather_among(*group_bootstrap(rank.group()), {0, 1, 2, 3}, rank.group().rank());
        rank.lose(0, DiesAt::dispatch, *times[0]);
        gather_among(*group_bootstrap(rank.group()), {1, 2, 3}, rank.group().rank());
        GroupConfig config = config_for({});
        config.experts = 0;
        Collectives collectives(group_bootstrap(rank.group()), config);
        const Tensor x = collectives.empty({64}, Dtype::f32);
        rank.copier().put(x.data(), std::vector<float>(64, float(rank.group().rank())));
        collectives.all_reduce(x).wait(60s);
        need(rank.copier().first<float>(x, 64) == std::vector<float>(64, 6), "another sum");
        collectives.barrier();
        rank.step();
      },
      100);
  for (const std::string& problem : problems) ADD_FAILURE() << problem;
}

TEST_F(EngineRegroupRefusals, RanksOfSeveralDomainsMeetByTheGroup) {
  GroupConfig config = config_for({});
  config.domain_size = 2;
  on_ranks(4, false, config, [&](Seat& seat) {
    gather_among(*group_bootstrap(seat.group), {0, 1, 2, 3}, seat.rank());
    seat.group.barrier();
    seat.meet();
  });
}

/// Nobody has died: all come along.
TEST_F(EngineRegroupRefusals, AGroupOfWhichNobodyIsLostGoesOn) {
  const auto problems = run_ranks(
      3, 1,
      [&](Bootstrap& bootstrap) {
        RegroupingRank rank(bootstrap, kRegroupSeed + 2);
        bootstrap.all_gather({}, 60s);  // nobody is in a call
        const ferry::GroupView view = rank.group().regroup();
        need(view.epoch == 2 && view.ranks.size() == 3 && view.lost.empty(), "another view");
        rank.step();
        rank.replay();
      },
      100);
  for (const std::string& problem : problems) ADD_FAILURE() << problem;
}

}  // namespace
}  // namespace ferry::test
