// Ranks of several domains that are masked, fail to rejoin and come back, while a seeded chooser
// decides who does what next: whose kernel polls, whose proxy, and what lands.
#include <set>

#include "cuda/latency/proxy/test_held_network.hpp"
#include "cuda/latency/proxy/test_rejoin.hpp"

namespace ferry::cuda::test {
namespace {

/// What ranks have decided among themselves, out of Ferry.
struct Plan {
  int calls = 0;         ///< of rejoin that every rank is to make
  bool late = false;     ///< ranks may be late for each other
  bool give_up = false;  ///< attempts to rejoin may fail
};

/// The kernels of a rank, one after the other, each a poll at a time.
class Player {
 public:
  Player(int rank, int ranks, const FakeConfig& config, HeldNetwork& network, Plan& plan,
         std::mt19937& random)
      : rank_(rank, ranks, config, network.make(rank)),
        kernel_(rank_),
        plan_(plan),
        random_(random) {}

  FakeRank& rank() { return rank_; }
  int calls() const { return calls_; }
  bool rejoining() const { return step_ == Step::rejoin; }
  Generation generation() const { return g_; }

  void poll() {
    if (step_ == Step::rejoin) return look_for_others();
    if (calls_ < plan_.calls && one_in(20)) return begin_rejoin();
    // Far ahead alone, it would only repeat itself.
    if (step_ == Step::dispatch && may_mask() && g_ >= base_ + 12) return;
    try {
      run();
      step_ = static_cast<Step>((static_cast<int>(step_) + 1) % static_cast<int>(Step::rejoin));
    } catch (const NotYet& wait) {
      const bool told = rank_.sees_gone(wait.peer, Gone::without_us);
      EXPECT_TRUE(may_mask() || !told)
          << "rank " << rank_.rank() << " hears of a mask of before its rejoin";
      if (!may_mask()) return;
      if (told || one_in(30)) mask(wait.peer);
    }
  }

 private:
  enum class Step : std::uint8_t { dispatch, receive, push, weights, send, sums, release, rejoin };

  /// Else it waits as long as it takes: whoever masks a rank must come to a rejoin after.
  bool may_mask() const { return plan_.late || calls_ < plan_.calls; }
  bool one_in(unsigned n) { return random_() % n == 0; }

  void run() {
    const auto kind = static_cast<std::uint32_t>(g_ % 3);
    switch (step_) {
      case Step::dispatch:
        rank_.send_dispatch(g_ + 1);
        ++g_;
        break;
      case Step::receive: rank_.receive_dispatch(g_); break;
      case Step::push:
        if (rank_.pushes_weights(g_, kind)) rank_.push_weights(g_);
        break;
      case Step::weights:
        if (rank_.pushes_weights(g_, kind)) rank_.receive_weights(g_);
        break;
      case Step::send: rank_.send_sums(g_, kind, may_mask() && one_in(4)); break;
      case Step::sums: rank_.receive_sums(g_, kind); break;
      case Step::release: rank_.release(g_); break;
      case Step::rejoin: break;
    }
  }

  void mask(int peer) {
    std::set<int> masked = rank_.left_out();
    masked.insert(peer);
    rank_.leave_out(masked);
    rank_.set_gone(peer, Gone::without_us);
  }

  void begin_rejoin() {
    ++calls_;
    step_ = Step::rejoin;
    given_up_ = false;
    kernel_.begin(g_);
  }

  void look_for_others() {
    if (given_up_) {
      if (calls_ < plan_.calls) begin_rejoin();
      return;
    }
    if (kernel_.poll()) {
      g_ = base_ = kernel_.agreed();
      step_ = Step::dispatch;
    } else if (calls_ < plan_.calls || one_in(plan_.give_up ? 40 : 20000)) {
      // The deadline: all come once more. Another rank may have rejoined with what this one said.
      given_up_ = true;
      plan_.calls = std::max(plan_.calls, calls_ + 1);
    }
  }

  FakeRank rank_;
  FakeRejoin kernel_;
  Plan& plan_;
  std::mt19937& random_;
  Step step_ = Step::dispatch;
  Generation g_ = 0, base_ = 0;
  int calls_ = 0;
  bool given_up_ = false;
};

class Chaos {
 public:
  Chaos(int ranks, unsigned seed) : random_(seed), seed_(seed), network_(ranks) {
    FakeConfig config;
    config.exchange = {
        .capacity = 4, .hidden = 128, .topk = 2, .dtype = Dtype::bf16, .masks = true};
    config.experts = 2 * ranks;
    for (int r = 0; r < ranks; ++r) {
      players_.push_back(std::make_unique<Player>(r, ranks, config, network_, plan_, random_));
    }
    network_.set_on_send([this] {
      if (one_in(3)) any_player().poll();
      if (one_in(3)) deliver();
    });
  }

  void run() {
    ASSERT_NO_FATAL_FAILURE(go_on(2));
    for (int time = 0; time < 3; ++time) {
      plan_.late = true;
      steps(static_cast<int>(random_() % 400));
      plan_.late = false;
      ++plan_.calls;
      plan_.give_up = true;
      steps(static_cast<int>(random_() % 800));
      plan_.give_up = false;
      ASSERT_NO_FATAL_FAILURE(go_on(4));
    }
  }

 private:
  /// Until all have rejoined as often as they were to, and then made so many generations.
  void go_on(Generation generations) {
    constexpr int kMost = 2'000'000;
    std::vector<Generation> begun(players_.size(), 0);
    bool over = false;
    for (int i = 0; !over; ++i) {
      ASSERT_LT(i, kMost) << "nothing goes on; rejoins " << plan_.calls;
      step();
      over = true;
      for (std::size_t r = 0; r < players_.size(); ++r) {
        const Player& player = *players_[r];
        const bool back = player.calls() == plan_.calls && !player.rejoining();
        if (!back) begun[r] = 0;
        if (back && begun[r] == 0) begun[r] = player.generation() + 1;
        over &= back && player.generation() + 1 >= begun[r] + generations;
      }
    }
  }
  void steps(int count) {
    for (int i = 0; i < count; ++i) step();
  }
  void step() {
    switch (random_() % 4) {
      case 0: any_player().poll(); break;
      case 1: any_player().rank().crossing().poll(); break;
      default: deliver();
    }
  }
  void deliver() {
    network_.deliver_any(random_, [&](const auto& op) { return is_held(op); });
  }
  /// Most of the time: one in four, in every second run of puts alone, which then outlive much of
  /// what comes after them.
  bool is_held(const HeldNetwork::Op& op) {
    const bool puts = seed_ % 2 == 0;
    const std::uint64_t sum = op.offset * 0x9e3779b97f4a7c15 + op.tag * 0xc2b2ae3d27d4eb4f + seed_;
    const bool slow = (sum ^ sum >> 29) * 0xbf58476d1ce4e5b9 >> 62 == 0;
    return slow && !(puts && op.is_flag) && !one_in(puts ? 600 : 64);
  }
  bool one_in(unsigned n) { return random_() % n == 0; }
  Player& any_player() { return *players_[random_() % players_.size()]; }

  std::mt19937 random_;
  unsigned seed_;
  HeldNetwork network_;
  Plan plan_{};
  std::vector<std::unique_ptr<Player>> players_{};
};

#if defined(__SANITIZE_ADDRESS__)
constexpr unsigned kSeeds = 6;  // two seconds each
#else
constexpr unsigned kSeeds = 24;
#endif

TEST(LatencyCrossingChaos, WhoeverComesBackGetsWhatWasSent) {
  for (unsigned seed = 1; seed <= kSeeds; ++seed) {
    SCOPED_TRACE("seed " + std::to_string(seed));
    Chaos(seed % 3 == 0 ? 3 : 2, seed).run();
    if (::testing::Test::HasFailure()) return;
  }
}

}  // namespace
}  // namespace ferry::cuda::test
