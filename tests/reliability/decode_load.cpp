#include "decode_load.hpp"

#include <algorithm>
#include <bit>
#include <chrono>
#include <csignal>
#include <cstdlib>
#include <new>
#include <optional>
#include <thread>

#include "ferry/experts.hpp"

namespace ferry::test {
namespace {
namespace decoding {  // built together with other loads

constexpr int kSlots = 6;
constexpr std::int64_t kExperts = 8, kTokens = 8, kHidden = 32, kTopk = 2;

/// Where a round is: the same on all ranks.
struct Round {
  std::int64_t step = 0;
  int layer = 0;
};

/// What rank `source` sends in a round can be told from it, so all ranks can check all.
class Batch {
 public:
  Batch(int source, Round round) : source_(source), round_(round) {
    const auto seed =
        (round.step * DecodeBoard::kLayers + round.layer) * DecodeBoard::kMost + source + 1;
    std::minstd_rand random(unsigned(seed * 0x9e37'79b1 % 2'147'483'647));
    tokens = std::int64_t(random() % (kTokens + 1));
    for (std::int64_t t = 0; t < tokens; ++t) {
      const auto first = std::int64_t(random() % kExperts);
      const auto other = std::int64_t(random() % (kExperts - 1));
      routes.insert(routes.end(), {first, (first + 1 + other) % kExperts});
      for (int k = 0; k < kTopk; ++k) weights.push_back(float(random() % 4 + 1));
    }
  }
  /// Whole, and with an expert's factor and weights less than 2^24: sums are exact.
  float value(std::int64_t token) const {
    return float(
        ((round_.step % 512 * DecodeBoard::kLayers + round_.layer) * DecodeBoard::kMost + source_) *
            kTokens +
        token + 1);
  }
  bool goes_to(std::int64_t token, std::int64_t expert) const {
    const auto* to = routes.data() + token * kTopk;
    return std::find(to, to + kTopk, expert) != to + kTopk;
  }

  std::int64_t tokens = 0;
  std::vector<std::int64_t> routes{};
  std::vector<float> weights{};

 private:
  int source_;
  Round round_;
};

/// One rank, until it is killed or the job ends. Expert e multiplies by e + 1.
class Decoding {
 public:
  Decoding(Group& group, bool joins, DecodeBoard& board, const Reporter& reporter)
      : group_(group),
        joins_(joins),
        board_(board),
        reporter_(reporter),
        mine_(board.ranks[std::size_t(group.rank())]),
        rows_(std::size_t(kSlots * group.size() * kTokens * kHidden)) {}

  void run() {
    view_ = group_.view();
    bool changed = true;
    while (view_.step < std::uint64_t(board_.last)) {
      try {
        if (changed) settle();
        changed = false;
        if (step(view_.step + 1)) continue;
        view_ = group_.regroup();
      } catch (const Error& error) {
        if (error.kind() != ErrorKind::peer_failed) throw;
        view_ = group_.regroup();
      }
      changed = true;
    }
  }

 private:
  /// A process that joins has no part in an exchange that was made before. Ranks may have passed
  /// other epochs than this one, so where processes may join all make it anew.
  void settle() {
    check_view();
    placement_ = ExpertPlacement(kExperts, group_.size(), kSlots);
    placement_.balance(view_.ranks, {}, 2);
    held_ = placement_.held_by(group_.rank());
    board_.epoch = std::max<std::int64_t>(board_.epoch, std::int64_t(view_.epoch));
    if (latency_ && !joins_) return;
    latency_.reset();
    LatencyConfig config{kTokens, kHidden, kTopk, Dtype::f32};
    config.masks = true;
    latency_.emplace(group_, config);
  }
  /// All ranks have one view of an epoch.
  void check_view() const {
    std::uint64_t mine = view_.step + 1;
    for (const int rank : view_.ranks) mine ^= std::uint64_t{1} << (40 + rank);
    for (const int rank : view_.joined) mine ^= std::uint64_t{1} << (50 + rank);
    std::uint64_t none = 0;
    auto& first = board_.views[view_.epoch % DecodeBoard::kEpochs];
    if (!first.compare_exchange_strong(none, mine) && none != mine) fail("two views", view_.step);
  }

  /// False: the ranks must regroup, and make the step anew if nobody has committed it.
  bool step(std::uint64_t number) {
    const std::uint64_t before = *latency_->mask_count();
    std::int64_t tokens = 0;
    zeroed_ = 0;
    for (int layer = 0; layer < DecodeBoard::kLayers; ++layer) {
      if (!exchange({std::int64_t(number), layer}, tokens)) return false;
    }
    if (*latency_->mask_count() != before) {
      mine_.zeroed += zeroed_;
      return false;
    }
    if (zeroed_ > 0) fail("a sum without an expert, though no rank was lost", number);
    const bool one_waits = group_.commit(number);
    view_.step = number;
    view_.joined.clear();
    mine_.tokens += tokens;
    mine_.inside = true;
    board_.step = std::max<std::int64_t>(board_.step, std::int64_t(number));
    return !one_waits;
  }

  /// False: no copy of an expert is left, before a regroup.
  bool exchange(Round round, std::int64_t& tokens) {
    const Batch batch(group_.rank(), round);
    std::vector<float> x;
    for (std::int64_t t = 0; t < batch.tokens; ++t) x.insert(x.end(), kHidden, batch.value(t));
    const Extents slots{batch.tokens, kTopk};
    const std::vector<bool> before = latency_->masked();
    Tensor places;
    try {
      places = placement_.places({batch.routes.data(), Dtype::i64, slots}, group_.rank(), before);
    } catch (const Error& error) {
      if (error.kind() != ErrorKind::invalid_argument) throw;
      return false;
    }
    const LatencyReceived received =
        latency_->dispatch({x.data(), Dtype::f32, {batch.tokens, kHidden}}, places.view());
    compute(received, round);
    const Tensor sums =
        latency_
            ->combine({rows_.data(), Dtype::f32, received.x.view().shape}, received,
                      {batch.weights.data(), Dtype::f32, slots}, {.path = CombinePath::per_rank})
            .x;
    std::vector<bool> lost = latency_->masked();
    for (std::size_t r = 0; r < lost.size(); ++r) lost[r] = lost[r] && !before[r];
    for (std::int64_t t = 0; t < batch.tokens; ++t) {
      check_sum(batch, t, sums.as<float>() + t * kHidden, places.as<std::int64_t>() + t * kTopk,
                lost, round);
    }
    tokens += batch.tokens;
    return true;
  }

  /// Checks the rows that came, and multiplies them.
  void compute(const LatencyReceived& received, Round round) {
    for (int source = 0; source < group_.size(); ++source) {
      const Batch batch(source, round);
      for (std::int64_t slot = 0; slot < kSlots; ++slot) {
        const std::int64_t range =
            received.ranges.as<std::int64_t>()[slot * group_.size() + source];
        const std::int64_t first = slot * group_.size() * kTokens + (range >> 32);
        const std::int64_t end = first + (range & 0xffffffff);
        std::int64_t token = 0;
        for (std::int64_t row = first; row < end; ++row, ++token) {
          const float* x = received.x.as<float>() + row * kHidden;
          while (token < batch.tokens && batch.value(token) != x[0]) ++token;
          const std::int64_t expert = held_[std::size_t(slot)];
          const bool right = token < batch.tokens && batch.goes_to(token, expert) &&
                             std::all_of(x, x + kHidden, [=](float v) { return v == x[0]; });
          if (!right) fail("a wrong row of rank " + std::to_string(source), round.step);
          std::fill_n(rows_.begin() + row * kHidden, kHidden, x[0] * float(expert + 1));
        }
      }
    }
  }

  /// What is missing of a sum is of ranks that were lost in this very round.
  void check_sum(const Batch& batch, std::int64_t token, const float* sum,
                 const std::int64_t* places, const std::vector<bool>& lost, Round round) {
    for (int missing = 0; missing < 1 << kTopk; ++missing) {
      float factor = 0;
      bool can_be = true;
      for (int k = 0; k < kTopk; ++k) {
        const auto slot = std::size_t(token * kTopk + k);
        if ((missing >> k & 1) == 0) {
          factor += batch.weights[slot] * float(batch.routes[slot] + 1);
        } else {
          can_be = can_be && lost[std::size_t(places[k] / kSlots)];
        }
      }
      const float want = factor * batch.value(token);
      if (!can_be || std::any_of(sum, sum + kHidden, [=](float v) { return v != want; })) continue;
      zeroed_ += std::popcount(unsigned(missing));
      return;
    }
    fail("a wrong sum, or one without an expert", round.step);
  }

  [[noreturn]] void fail(const std::string& what, std::uint64_t step) const {
    reporter_.line(what + " in step " + std::to_string(step) + " of epoch " +
                   std::to_string(view_.epoch));
    std::_Exit(4);
  }

  Group& group_;
  bool joins_;
  DecodeBoard& board_;
  const Reporter& reporter_;
  DecodeBoard::Rank& mine_;
  GroupView view_{};
  ExpertPlacement placement_{kExperts, group_.size(), kSlots};
  std::vector<std::int32_t> held_{};
  std::optional<LatencyExchange> latency_{};
  std::int64_t zeroed_ = 0;
  std::vector<float> rows_;
};

}  // namespace decoding
}  // namespace

DecodeJob::DecodeJob(unsigned seed, DecodePolicy policy)
    : random_(seed), policy_(policy), dead_(std::size_t(policy.ranks)) {
  board_ = new (shared_.get()) DecodeBoard;
  const auto body = [board = board_, policy](int, std::shared_ptr<Bootstrap> bootstrap,
                                             const Reporter& reporter) {
    GroupConfig config;
    config.experts = policy.ranks * decoding::kSlots;
    config.deadline = std::chrono::seconds(60);  // it never decides: the end of a process does
    config.memory_bytes = 1 << 16;
    if (policy.joins) config.elastic = "decode";
    if (policy.domain_size > 0) {
      config.domain_size = policy.domain_size;
      config.network = FabricKind::ofi;
    }
    Group group(std::move(bootstrap), config);
    decoding::Decoding(group, policy.joins, *board, reporter).run();
    group.barrier();
  };
  ranks_ = std::make_unique<Ranks>(policy.ranks, body);
  seen_at_ = now();
}

void DecodeJob::check() {
  for (int rank = 0; rank < policy_.ranks && wrong_.empty(); ++rank) {
    if (dead_[std::size_t(rank)]) continue;
    const std::string line = ranks_->line(rank, 0);
    if (!line.empty()) wrong_ = "rank " + std::to_string(rank) + ": " + line;
  }
  const std::int64_t step = board_->step;
  counts_.longest = std::max(counts_.longest, now() - seen_at_);
  if (step != seen_) {
    seen_ = step;
    seen_at_ = now();
  } else if (now() - seen_at_ > 120 && wrong_.empty()) {
    wrong_ = "no step after step " + std::to_string(step) + " for 120 s";
  }
}

/// Of those that are left, `least` have made a step: so somebody can be joined.
void DecodeJob::kill_or_restart() {
  const auto rank = int(random_() % unsigned(policy_.ranks));
  auto& inside = board_->ranks[std::size_t(rank)].inside;
  if (dead_[std::size_t(rank)]) {
    if (!policy_.joins) return;
    ranks_->join(rank, 60);  // until then it may say that it is inside
    inside = false;
    ranks_->restart(rank);
    dead_[std::size_t(rank)] = false;
    ++counts_.joins;
    return;
  }
  int others = 0;
  for (int other = 0; other < policy_.ranks; ++other) {
    const bool there = board_->ranks[std::size_t(other)].inside && !dead_[std::size_t(other)];
    others += other != rank && there ? 1 : 0;
  }
  if (others < policy_.least()) return;
  dead_[std::size_t(rank)] = true;
  ranks_->signal(rank, SIGKILL);
  ++counts_.kills;
}

DecodeCounts DecodeJob::run(std::int64_t rounds) {
  const std::int64_t steps = (rounds + DecodeBoard::kLayers - 1) / DecodeBoard::kLayers;
  const int kills = policy_.joins ? 2 : policy_.ranks - policy_.least();
  const int joins = policy_.joins ? 2 : 0;
  while (wrong_.empty() &&
         (board_->step < steps || counts_.kills < kills || counts_.joins < joins)) {
    const std::chrono::microseconds pause = policy_.pause;
    std::this_thread::sleep_for(pause * (random_() % 1024) / 1024);
    kill_or_restart();
    check();
  }
  board_->last = board_->step + 20;
  for (int rank = 0; rank < policy_.ranks && wrong_.empty(); ++rank) {
    if (dead_[std::size_t(rank)] || !board_->ranks[std::size_t(rank)].inside) continue;
    while (wrong_.empty() && ranks_->join(rank, 0.1) < 0) check();
  }
  counts_.rounds = board_->step * DecodeBoard::kLayers;
  counts_.epochs = board_->epoch;
  for (const auto& rank : board_->ranks) {
    counts_.tokens += rank.tokens;
    counts_.zeroed += rank.zeroed;
  }
  return counts_;
}

}  // namespace ferry::test
