// Latency exchanges in groups that regroup, on GPUs: ranks that are killed or late in decode
// rounds, processes that join, graphs that were captured before. Skips without a GPU.
#include <gtest/gtest.h>

#include "engine_latency.hpp"
#include "regroup_case.hpp"
#include "reliability/processes.hpp"

namespace ferry::test {
namespace {

constexpr std::uint64_t kDecodeSeed = 20261128;
constexpr int kDecodeRanks = 4;
constexpr LatencyTrip kDecode{CombinePath::per_rank, true, false, nullptr, {}};
constexpr auto kLatencyDeadline = 5s;
using Lost = std::set<int>;

/// Where ranks meet that a group has lost others of; shared by the processes.
struct MeetingPlace {
  std::atomic<int> came{0};
  std::atomic<int> joined{0};

  static std::shared_ptr<MeetingPlace> make() {
    const auto block = shared_block(sizeof(MeetingPlace));
    return {block, new (block.get()) MeetingPlace()};
  }
  /// Until so many have come, all meetings counted; no rank waits for ever for one that has failed.
  void meet(int all) {
    came.fetch_add(1);
    const auto until = std::chrono::steady_clock::now() + 60s;
    while (came.load() < all) {
      need(std::chrono::steady_clock::now() < until,
           "meeting: " + std::to_string(came.load()) + " of " + std::to_string(all) + " came");
      std::this_thread::sleep_for(1ms);
    }
  }
};

std::string spell(const std::vector<int>& ranks) {
  std::string text;
  for (const int rank : ranks) text += (text.empty() ? "" : ",") + std::to_string(rank);
  return "{" + text + "}";
}

void need_view(const ferry::GroupView& view, std::uint64_t epoch, const std::vector<int>& ranks,
               const std::vector<int>& lost) {
  need(view.epoch == epoch && view.ranks == ranks && view.lost == lost,
       "epoch " + std::to_string(view.epoch) + " of " + spell(view.ranks) + ", lost " +
           spell(view.lost) + "; expected epoch " + std::to_string(epoch) + " of " + spell(ranks) +
           ", lost " + spell(lost));
}

/// A rank that decodes: one exchange with masks, plainly and by a graph.
class DecodingRank {
 public:
  DecodingRank(Bootstrap& bootstrap, const Shape& shape, std::uint64_t seed,
               const std::string& elastic = "")
      : device_(take_gpu(bootstrap)),
        group_(borrowed(bootstrap), config(shape, elastic)),
        own_(device_),
        world_(bootstrap.size(), shape, seed),
        mine_(world_.sent(group_.rank()), shape, device_, copier_) {
    captured_.stream = &own_.stream;
    make(true);
  }

  Group& group() { return group_; }
  LatencyExchange& latency() { return *latency_; }
  int rank() const { return group_.rank(); }

  /// Collective: an exchange in this epoch, and its graph. The one before goes.
  void make(bool masks) {
    graph_.reset();
    in_graph_ = {};
    latency_.reset();
    latency_.emplace(group_, latency_config(world_.shape, masks));
    graph_.emplace(own_.raw, [this] {
      in_graph_ = latency_combine(*latency_, mine_, latency_dispatch(*latency_, mine_, captured_),
                                  captured_);
    });
  }
  /// Collective of those that are left: three rounds and three replays, each exact.
  void decode(const std::string& when, const Lost& lost = {}) {
    const auto each = [&](const char* what, const auto& round) {
      for (int i = 0; i < 3; ++i) {
        try {
          round();
        } catch (const std::exception& error) {
          throw std::runtime_error(when + ", " + what + " " + std::to_string(i) + ": " +
                                   error.what());
        }
      }
    };
    each("round", [&] { latency_trip(*latency_, world_, rank(), mine_, kDecode, copier_, lost); });
    each("replay", [&] {
      graph_->run();
      check_latency_sums(world_, rank(), kDecode.path, in_graph_.x, copier_, lost);
    });
  }
  void decode_masked(const std::string& when, const Lost& lost) {
    need_masked(*latency_, lost, when);
    decode(when, lost);
    need_masked(*latency_, lost, when + ", after rounds");
  }
  /// The victim is killed when its dispatch is on its way; the others go on without it, by masks.
  void lose_in_round(int victim) {
    for (int i = 0; i < 3; ++i) {  // in the first some may have what the victim sent
      const bool dies = rank() == victim;
      LatencyTrip trip = kDecode;
      if (dies) trip.stream = &own_.stream;
      const LatencyReceived received = latency_dispatch(*latency_, mine_, trip);
      if (dies) raise(SIGKILL);
      received.event.wait(60s);
      latency_combine(*latency_, mine_, received, trip).event.wait(60s);
    }
    need(latency_->masked()[static_cast<std::size_t>(victim)], "the victim is not masked");
  }
  LatencyReceived dispatch() { return latency_dispatch(*latency_, mine_, kDecode); }
  void combine(const LatencyReceived& received) {
    (void)latency_combine(*latency_, mine_, received, kDecode);
  }
  void check_old(const LatencyReceived& old) {
    need_error(ErrorKind::evicted, "a result of an earlier epoch was combined",
               [&] { combine(old); });
  }
  /// What a program can say of masks does not bring lost ranks back.
  void check_lost_stay(const Lost& lost) {
    for (const int rank : lost) {
      need_error(ErrorKind::invalid_argument, "the mask of a lost rank was taken back",
                 [&] { latency_->set_mask(rank, false); });
    }
    latency_->clear_masks();
    need_masked(*latency_, lost, "clear_masks");
  }
  /// Commits until a process waits for the place of `lost`, and goes on with it.
  void take_in(int lost) {
    const ferry::GroupView view = regroup_when_one_waits(group_).first;
    need(view.joined == std::vector<int>{lost}, "joined " + spell(view.joined));
  }

 private:
  static GroupConfig config(const Shape& shape, const std::string& elastic) {
    GroupConfig config = config_for(shape);
    config.elastic = elastic;
    return config;
  }

  int device_;
  Copier copier_{};
  Group group_;
  OwnStream own_;
  World world_;
  OnGpu mine_;
  LatencyTrip captured_ = kDecode;
  std::optional<LatencyExchange> latency_{};
  LatencyCombined in_graph_{};
  std::optional<Graph> graph_{};
};

/// Rows as Simple, as LL, and as LL128 where the links allow it.
struct DecodeCase {
  const char* name;
  Shape shape;
};
const DecodeCase kDecodeCases[] = {
    {"simple", {.tokens = 37, .hidden = 256, .experts = 12}},
    {"ll", {.tokens = 4, .hidden = 1040, .experts = 12, .dtype = Dtype::bf16}},
    {"ll128", {.tokens = 20, .hidden = 1040, .experts = 12, .dtype = Dtype::bf16}}};
const Shape& kDecodeShape = kDecodeCases[2].shape;

class EngineRegroupLatency : public ::testing::TestWithParam<DecodeCase> {
 protected:
  void SetUp() override {
    if (gpu_count() == 0) GTEST_SKIP() << "NO GPU";
  }
  static void expect_none(const std::vector<std::string>& problems) {
    for (const std::string& problem : problems) ADD_FAILURE() << problem;
  }
};
class EngineRegroupLatencyOnce : public EngineRegroupLatency {};

/// Masked by its death, then lost; the masks stay those of the view whatever the program says.
TEST_P(EngineRegroupLatency, ARankThatIsKilledInARoundIsLeftOut) {
  const auto place = MeetingPlace::make();
  expect_none(run_losses(
      kDecodeRanks, {1},
      [&](Bootstrap& bootstrap) {
        DecodingRank rank(bootstrap, GetParam().shape, kDecodeSeed);
        rank.decode("epoch 1");
        bootstrap.all_gather({}, 60s);
        rank.lose_in_round(1);
        place->meet(3);
        rank.decode_masked("masked", {1});
        std::optional<LatencyReceived> old = rank.dispatch();
        place->meet(6);  // who calls regroup ends the calls of all
        need_view(rank.group().regroup(), 2, {0, 2, 3}, {1});
        rank.check_old(*old);
        old.reset();  // its buffer is needed
        rank.decode_masked("epoch 2", {1});
        rank.check_lost_stay({1});
        place->meet(9);
        rank.latency().rejoin();
        rank.decode_masked("rejoined", {1});
        rank.group().barrier();
      },
      100));
}

/// One that was masked because it was late is in the view, so it is back; a plain exchange goes on.
TEST_P(EngineRegroupLatency, ALateRankIsBack) {
  constexpr int kRanks = 3, kLate = 1;
  const auto place = MeetingPlace::make();
  expect_none(run_ranks(
      kRanks, 1,
      [&](Bootstrap& bootstrap) {
        const int device = take_gpu(bootstrap);
        bootstrap.all_gather({}, 60s);  // contexts take longer than the deadline below
        GroupConfig config = config_for(GetParam().shape);
        config.deadline = kLatencyDeadline;
        Group group(borrowed(bootstrap), config);
        Seat seat{group, bootstrap, device};
        const World world(kRanks, GetParam().shape, kDecodeSeed + 1);
        const OnGpu mine = seat.on_gpu(world);
        LatencyExchange latency(group, latency_config(world.shape, true));
        LatencyExchange plain(group, latency_config(world.shape));
        OwnStream own(device);
        LatencyTrip captured = kDecode;
        captured.stream = &own.stream;
        LatencyCombined sums;
        const Graph graph(own.raw, [&] {
          sums =
              latency_combine(latency, mine, latency_dispatch(latency, mine, captured), captured);
        });
        const auto exchange = [&](LatencyExchange& with, const Lost& lost) {
          latency_trip(with, world, seat.rank(), mine, kDecode, seat.copier, lost);
        };
        seat.meet();
        exchange(latency, {});
        exchange(plain, {});
        seat.meet();
        if (seat.rank() != kLate) {
          exchange(latency, {kLate});
          need_masked(latency, {kLate}, "after the deadline");
        }
        place->meet(kRanks);
        need_view(group.regroup(), 2, {0, 1, 2}, {});
        need_masked(latency, {}, "epoch 2");
        for (int i = 0; i < 3; ++i) {
          exchange(latency, {});
          exchange(plain, {});
          graph.run();
          check_latency_sums(world, seat.rank(), kDecode.path, sums.x, seat.copier);
        }
        need_masked(latency, {}, "epoch 2, after rounds");
        seat.meet();
      },
      100));
}

INSTANTIATE_TEST_SUITE_P(Rows, EngineRegroupLatency, ::testing::ValuesIn(kDecodeCases),
                         [](const auto& at) { return std::string(at.param.name); });

/// A process takes the place of the rank: to the exchange of before it is masked, and in one that
/// all make anew it takes part.
TEST_F(EngineRegroupLatencyOnce, AProcessThatJoinsIsInAnExchangeThatIsMadeAnew) {
  constexpr int kLost = 1;
  const auto place = MeetingPlace::make();
  Ranks ranks(kDecodeRanks,
              [&](int, std::shared_ptr<Bootstrap> bootstrap, const Reporter& reporter) {
                try {
                  DecodingRank rank(*bootstrap, kDecodeShape, kDecodeSeed + 2, "decodes");
                  if (!bootstrap->joins()) {
                    rank.decode("epoch 1");
                    bootstrap->all_gather({}, 60s);
                    rank.lose_in_round(kLost);
                    place->meet(3);
                    need_view(rank.group().regroup(), 2, {0, 2, 3}, {kLost});
                    rank.decode_masked("epoch 2", {kLost});
                    rank.take_in(kLost);
                    rank.decode_masked("epoch 3, the exchange of before", {kLost});
                    rank.check_lost_stay({kLost});
                    rank.make(true);
                  }
                  rank.decode_masked("epoch 3", {});
                  rank.group().barrier();
                  reporter.line("done");
                } catch (const std::exception& error) {
                  reporter.line(error.what());
                }
              });
  ranks.restart(kLost);
  for (int rank = 0; rank < kDecodeRanks; ++rank) {
    EXPECT_EQ(ranks.line(rank, 100), "done") << "rank " << rank;
  }
}

/// Without masks an exchange is of no more use when a rank of it is lost; one with masks can be
/// made in any epoch, and loses more.
TEST_F(EngineRegroupLatencyOnce, AnExchangeIsMadeAmongTheRanksThatAreLeft) {
  const auto place = MeetingPlace::make();
  expect_none(run_losses(
      kDecodeRanks, {1, 0},
      [&](Bootstrap& bootstrap) {
        DecodingRank rank(bootstrap, kDecodeShape, kDecodeSeed + 3);
        rank.make(false);
        rank.decode("epoch 1, without masks");
        bootstrap.all_gather({}, 60s);
        if (rank.rank() == 1) raise(SIGKILL);
        need_error(
            ErrorKind::peer_failed, "a barrier without rank 1", [&] { rank.group().barrier(); }, 1);
        need_view(rank.group().regroup(), 2, {0, 2, 3}, {1});
        const Error useless = need_error(ErrorKind::invalid_argument, "a dispatch without rank 1",
                                         [&] { (void)rank.dispatch(); });
        need(std::string(useless.what()).find("has lost rank 1") != std::string::npos,
             useless.what());
        need_error(ErrorKind::invalid_argument, "an exchange without masks, of holes",
                   [&] { LatencyExchange(rank.group(), latency_config(kDecodeShape)); });
        rank.make(true);
        need(*rank.latency().mask_count() == 0, "a mask is counted");
        rank.decode_masked("made in epoch 2", {1});
        place->meet(3);
        rank.lose_in_round(0);
        place->meet(5);
        need_view(rank.group().regroup(), 3, {2, 3}, {0, 1});
        rank.decode_masked("epoch 3", {0, 1});
      },
      100));
}

/// Calls that wait for a rank that has called regroup end by it, in their midst: nobody is masked,
/// and kernels that were stopped, of a rejoin, too, leave nothing behind.
TEST_F(EngineRegroupLatencyOnce, CallsThatWaitEndWhenAPeerRegroups) {
  constexpr int kRanks = 3;
  expect_none(run_ranks(
      kRanks, 1,
      [&](Bootstrap& bootstrap) {
        DecodingRank rank(bootstrap, kDecodeShape, kDecodeSeed + 4);
        rank.decode("epoch 1");
        const auto regroup_while = [&](std::uint64_t epoch, const std::function<void()>& call) {
          const std::string when = "epoch " + std::to_string(epoch);
          bootstrap.all_gather({}, 60s);
          const auto start = std::chrono::steady_clock::now();
          if (rank.rank() == 2) {
            std::this_thread::sleep_for(200ms);
          } else {
            const auto error = error_of(call);
            need(error.has_value(), when + ": a call has ended without rank 2");
            need(error->kind() == ErrorKind::peer_failed || error->kind() == ErrorKind::interrupted,
                 when + ": " + error->what());
            need(std::chrono::steady_clock::now() - start < 10s, when + ": it was waited for");
          }
          need_view(rank.group().regroup(), epoch, {0, 1, 2}, {});
          need(*rank.latency().mask_count() == 0, when + ": a mask");
          rank.decode_masked(when, {});
        };
        regroup_while(2, [&] { rank.combine(rank.dispatch()); });
        regroup_while(3, [&] { rank.latency().rejoin(); });
        regroup_while(4, [&] {
          if (rank.rank() == 0) rank.latency().rejoin();  // the other counts no such round
          rank.group().barrier();
        });
        rank.latency().rejoin();
        rank.decode_masked("rejoined", {});
        bootstrap.all_gather({}, 60s);
      },
      100));
}

}  // namespace
}  // namespace ferry::test
