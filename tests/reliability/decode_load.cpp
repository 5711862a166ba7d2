#include "decode_load.hpp"

#include <algorithm>
#include <bit>
#include <chrono>
#include <csignal>
#include <cstdlib>
#include <new>
#include <thread>

namespace ferry::test {
namespace {
namespace decoding {  // built together with other loads

constexpr int kRanks = DecodeBoard::kRanks, kSlots = 4;
constexpr std::int64_t kExperts = 8, kTokens = 8, kHidden = 32, kTopk = 2;

/// Every place is taken: each expert has two copies, and they stay where they are.
ExpertPlacement two_copies() {
  ExpertPlacement placement(kExperts, kRanks, kSlots);
  placement.balance(std::vector<int>{0, 1, 2, 3}, {}, 2);
  return placement;
}

void pause_briefly() {
  std::this_thread::sleep_for(std::chrono::microseconds(200));
}

/// One rank, in one group. Expert e multiplies by e + 1; all numbers are whole, so sums are exact.
class Decoding {
 public:
  Decoding(Group& group, DecodeBoard& board, const Reporter& reporter)
      : rank_(group.rank()),
        board_(board),
        reporter_(reporter),
        mine_(board.ranks[std::size_t(rank_)]),
        placement_(two_copies()),
        held_(placement_.held_by(rank_)),
        latency_(group, config()),
        random_(unsigned(board.group * kRanks + rank_)),
        x_(kTokens * kHidden),
        weights_(kTokens * kTopk),
        routes_(kTokens * kTopk),
        rows_(std::size_t(kSlots * kRanks * kTokens * kHidden)) {}

  void run() {
    for (std::int64_t round = 1; round != board_.leave.at; ++round) {
      for (auto* turn : {&board_.pause, &board_.rejoin, &board_.leave}) decide(*turn, round);
      if (round == board_.pause.at) round = pause(round);
      if (round == board_.rejoin.at) latency_.rejoin();
      exchange();
      mine_.round = round;
    }
  }

 private:
  static LatencyConfig config() {
    LatencyConfig config{kTokens, kHidden, kTopk, Dtype::f32};
    config.masks = true;
    return config;
  }
  /// All ranks are within one round of each other.
  void decide(DecodeBoard::Turn& turn, std::int64_t round) const {
    if (turn.decider != rank_) return;
    turn.decider = -1;
    turn.at = round + 3;
  }
  /// The round in which this rank goes on.
  std::int64_t pause(std::int64_t round) {
    const int pausing = board_.pausing;
    if (pausing != rank_) {
      // Who is masked inside a call is evicted from it, and others may wait for its part.
      while (board_.ranks[std::size_t(pausing)].round < round - 1) pause_briefly();
      latency_.set_mask(pausing, true);
      return round;
    }
    while (board_.rejoin.at == 0) pause_briefly();
    return board_.rejoin.at;
  }

  void exchange() {
    const auto tokens = std::int64_t(random_() % (kTokens + 1));
    for (std::int64_t i = 0; i < tokens * kHidden; ++i) {
      x_[std::size_t(i)] = float(random_() % 255 + 1);
    }
    for (std::int64_t i = 0; i < tokens * kTopk; i += kTopk) {
      routes_[std::size_t(i)] = std::int64_t(random_() % kExperts);
      const auto other = std::int64_t(random_() % (kExperts - 1)) + 1;
      routes_[std::size_t(i + 1)] = (routes_[std::size_t(i)] + other) % kExperts;
      for (std::int64_t k = 0; k < kTopk; ++k)
        weights_[std::size_t(i + k)] = float(random_() % 4 + 1);
    }
    const std::vector<bool> before = latency_.masked();
    const Extents slots{tokens, kTopk};
    const Tensor places = placement_.places({routes_.data(), Dtype::i64, slots}, rank_, before);
    const LatencyReceived received =
        latency_.dispatch({x_.data(), Dtype::f32, {tokens, kHidden}}, places.view());
    compute(received);
    const Tensor sums =
        latency_
            .combine({rows_.data(), Dtype::f32, received.x.view().shape}, received,
                     {weights_.data(), Dtype::f32, slots}, {.path = CombinePath::per_rank})
            .x;
    std::vector<bool> lost = latency_.masked();
    for (std::size_t r = 0; r < lost.size(); ++r) lost[r] = lost[r] && !before[r];
    for (std::int64_t t = 0; t < tokens; ++t) {
      check(sums.as<float>() + t * kHidden, places.as<std::int64_t>() + t * kTopk, t, lost);
    }
    mine_.tokens += tokens;
  }

  void compute(const LatencyReceived& received) {
    for (std::int64_t slot = 0; slot < kSlots; ++slot) {
      const auto factor = float(held_[std::size_t(slot)] + 1);
      for (int source = 0; source < kRanks; ++source) {
        const std::int64_t range = received.ranges.as<std::int64_t>()[slot * kRanks + source];
        const std::int64_t first = slot * kRanks * kTokens + (range >> 32);
        const std::int64_t end = first + (range & 0xffffffff);
        for (std::int64_t i = first * kHidden; i < end * kHidden; ++i) {
          rows_[std::size_t(i)] = factor * received.x.as<float>()[i];
        }
      }
    }
  }

  /// What is missing of a sum is of whole slots. Of two explanations the one counts that blames
  /// ranks which were lost in this very call.
  void check(const float* sum, const std::int64_t* places, std::int64_t token,
             const std::vector<bool>& lost) {
    int zeroed = 0, later = kTopk + 1;
    for (int missing = 0; missing < 1 << kTopk; ++missing) {
      if (!explains(missing, sum, token)) continue;
      int old = 0;
      for (int k = 0; k < kTopk; ++k) {
        if ((missing >> k & 1) != 0 && !lost[std::size_t(places[k] / kSlots)]) ++old;
      }
      if (old >= later) continue;
      later = old;
      zeroed = std::popcount(unsigned(missing)) - old;
    }
    mine_.zeroed += zeroed;
    if (later <= kTopk) {
      mine_.zeroed_later += later;
      return;
    }
    reporter_.line("a wrong token in group " + std::to_string(board_.group) + ", after round " +
                   std::to_string(mine_.round));
    std::_Exit(4);
  }

  bool explains(int missing, const float* sum, std::int64_t token) const {
    float factor = 0;
    for (int k = 0; k < kTopk; ++k) {
      const auto slot = std::size_t(token * kTopk + k);
      if ((missing >> k & 1) == 0) factor += weights_[slot] * float(routes_[slot] + 1);
    }
    const float* x = x_.data() + token * kHidden;
    return std::equal(x, x + kHidden, sum,
                      [&](float from, float got) { return got == factor * from; });
  }

  int rank_;
  DecodeBoard& board_;
  const Reporter& reporter_;
  DecodeBoard::Rank& mine_;
  ExpertPlacement placement_;
  std::vector<std::int32_t> held_;
  LatencyExchange latency_;
  std::mt19937 random_;
  std::vector<float> x_, weights_;
  std::vector<std::int64_t> routes_;
  std::vector<float> rows_;
};

/// One rank, in one group after another.
void run_rank(int rank, DecodeBoard& board, const Reporter& reporter) {
  DecodeBoard::Rank& mine = board.ranks[std::size_t(rank)];
  for (;;) {
    while (board.group == mine.ended) pause_briefly();
    const int number = board.group;
    if (number < 0) return;
    TcpOptions options;
    options.rank = rank;
    options.size = kRanks;
    options.port = static_cast<std::uint16_t>(int(board.port));
    options.secret = "secret of a test";
    options.deadline = std::chrono::seconds(60);
    GroupConfig config;
    config.experts = kRanks * kSlots;
    config.deadline = std::chrono::seconds(60);  // it never decides: the end of a process does
    config.memory_bytes = 1 << 16;
    Group group(tcp_bootstrap(options), config);
    Decoding load(group, board, reporter);
    mine.round = 0;
    mine.inside = number;
    load.run();
    mine.ended = number;
    while (board.group == number) pause_briefly();  // who leaves before the others end is lost
  }
}

}  // namespace decoding
}  // namespace

DecodeJob::DecodeJob(unsigned seed) : random_(seed), placement_(decoding::two_copies()) {
  board_ = new (shared_.get()) DecodeBoard;
  ranks_.emplace(kRanks, [board = board_](int rank, const std::shared_ptr<Bootstrap>&,
                                          const Reporter& reporter) {
    decoding::run_rank(rank, *board, reporter);
  });
}

template <class Ready>
void DecodeJob::await(const char* what, const Ready& ready) {
  const double late = now() + 120;
  for (int polls = 0; wrong_.empty() && !ready(); ++polls) {
    decoding::pause_briefly();
    for (int rank = 0; polls % 500 == 499 && rank < kRanks; ++rank) {
      const std::string line = ranks_->line(rank, 0);
      if (!line.empty()) wrong_ += " rank " + std::to_string(rank) + ": " + line;
    }
    if (now() > late) wrong_ = std::string("no ") + what + " within 120 s";
  }
}

void DecodeJob::await_rounds(std::int64_t count) {
  for (int rank = 0; rank < kRanks; ++rank) {
    if (gone_[std::size_t(rank)]) continue;
    await("round", [&, until = at(rank).round + count] { return at(rank).round >= until; });
  }
}

std::int64_t DecodeJob::take_turn(DecodeBoard::Turn& turn) {
  turn.decider = int(std::find(gone_.begin(), gone_.end(), false) - gone_.begin());
  await("decision", [&] { return turn.at != 0; });
  return turn.at;
}

/// Whether another copy of each of its experts is left.
bool DecodeJob::may_lose(int rank) const {
  std::vector<bool> kept(decoding::kExperts);
  for (int other = 0; other < kRanks; ++other) {
    if (other == rank || gone_[std::size_t(other)]) continue;
    for (const int expert : placement_.held_by(other)) kept[std::size_t(expert)] = true;
  }
  return !gone_[std::size_t(rank)] && std::find(kept.begin(), kept.end(), false) == kept.end();
}

void DecodeJob::kill_one() {
  const int rank = int(random_() % kRanks);
  if (!may_lose(rank)) return;
  std::this_thread::sleep_for(std::chrono::microseconds(random_() % 3000));
  ranks_->signal(rank, SIGKILL);
  gone_[std::size_t(rank)] = true;
  ++counts_.kills;
}

void DecodeJob::pause_one() {
  const int rank = int(random_() % kRanks);
  if (!may_lose(rank)) return;
  board_->pausing = rank;
  gone_[std::size_t(rank)] = true;
  take_turn(board_->pause);
  await_rounds(std::int64_t(random_() % 40) + 4);
  if (random_() % 4 == 0) kill_one();
  const std::int64_t back = take_turn(board_->rejoin);
  if (random_() % 4 == 0) kill_one();  // perhaps while they rejoin
  await("rejoin", [&] { return at(rank).round >= back; });
  gone_[std::size_t(rank)] = false;
  await_rounds(1);  // until all have taken it back
  ++counts_.pauses;
}

/// Dead ranks are replaced.
void DecodeJob::begin_group() {
  const int number = board_->group;
  for (int rank = 0; rank < kRanks; ++rank) {
    if (!gone_[std::size_t(rank)]) continue;
    at(rank).ended = number;
    ranks_->restart(rank);
    gone_[std::size_t(rank)] = false;
    ++counts_.joins;
  }
  for (auto* turn : {&board_->pause, &board_->rejoin, &board_->leave}) turn->at = 0;
  board_->port = free_port();
  board_->group = number + 1;
  for (int rank = 0; rank < kRanks; ++rank) {
    await("group", [&] { return at(rank).inside == number + 1; });
  }
}

DecodeCounts DecodeJob::run(std::int64_t rounds) {
  while (wrong_.empty() && counts_.rounds < rounds) {
    begin_group();
    await_rounds(std::int64_t(random_() % 40) + 1);
    if (random_() % 3 == 0) pause_one();
    kill_one();
    await_rounds(std::int64_t(random_() % 40) + 1);
    if (random_() % 3 == 0) kill_one();
    await_rounds(std::int64_t(random_() % 20) + 1);
    counts_.rounds += take_turn(board_->leave) - 1;
    for (int rank = 0; rank < kRanks; ++rank) {
      if (gone_[std::size_t(rank)]) continue;
      await("end", [&] { return at(rank).ended == board_->group; });
    }
  }
  for (const auto& rank : board_->ranks) {
    counts_.tokens += rank.tokens;
    counts_.zeroed += rank.zeroed;
    counts_.zeroed_later += rank.zeroed_later;
  }
  board_->group = -1;
  return counts_;
}

}  // namespace ferry::test
