#include "masked_load.hpp"

#include <algorithm>
#include <csignal>
#include <cstdlib>
#include <limits>
#include <new>
#include <random>
#include <thread>

namespace ferry::test {
namespace {

constexpr int kRanks = MaskBoard::kRanks;
constexpr std::int64_t kTokens = 16, kHidden = 64, kExperts = 8, kTopk = 2;

std::int64_t now_ns() {
  return std::chrono::steady_clock::now().time_since_epoch().count();
}

/// Of a rank in a wait. A wait does not count time in which its own rank did not run: so when a
/// rank that was not stopped has not been seen for a while, those that wait sleep until it has
/// been, and a busy machine makes nobody late.
void pace(MaskBoard& board, int rank) {
  constexpr std::int64_t kUnseenNs = 50'000'000, kPauseNs = 101'000'000;
  std::atomic<std::int64_t>& mine = board.seen_ns[static_cast<std::size_t>(rank)];
  const std::int64_t now = now_ns();
  mine = now;
  for (int peer = 0; peer < kRanks; ++peer) {
    const std::int64_t seen = board.seen_ns[static_cast<std::size_t>(peer)];
    if (seen == 0 || (board.victims >> peer & 1) != 0 || now - seen < kUnseenNs) continue;
    mine = now + kPauseNs;
    std::this_thread::sleep_for(std::chrono::nanoseconds(kPauseNs));
    mine = now_ns();
    return;
  }
}

/// One rank's load. Rows tell source, round and token, so that a row that is paired wrongly shows.
class Load {
 public:
  Load(Group& group, MaskBoard& board, const Reporter& reporter)
      : rank_(group.rank()),
        board_(board),
        reporter_(reporter),
        latency_(group, config()),
        random_(static_cast<unsigned>(group.rank())),
        x_(kTokens * kHidden),
        routes_(kTokens * kTopk) {
    for (std::int64_t i = 0; i < kTokens; ++i) weights_.insert(weights_.end(), {1.0F, 2.0F});
  }

  void run() {
    for (std::int64_t round = 1; round != board_.stop_at; ++round) {
      decide(board_.rejoin_decider, board_.rejoin_at, round);
      decide(board_.stop_decider, board_.stop_at, round);
      try {
        if (round == board_.rejoin_at) rejoin(round);
        exchange(round);
      } catch (const Error& error) {
        if (error.kind() != ErrorKind::evicted) throw;
        board_.evicted[at(rank_)] = 1;
        while (board_.rejoin_at == 0 || board_.rejoin_at < round) {
          std::this_thread::sleep_for(std::chrono::milliseconds(1));
        }
        round = board_.rejoin_at;
        rejoin(round);
        exchange(round);
      }
      board_.round[at(rank_)] = round;
      board_.seen_ns[at(rank_)] = now_ns();
    }
    board_.seen_ns[at(rank_)] = std::numeric_limits<std::int64_t>::max();
  }

 private:
  static std::size_t at(int rank) { return static_cast<std::size_t>(rank); }
  static LatencyConfig config() {
    LatencyConfig config{kTokens, kHidden, kTopk, Dtype::f32};
    config.masks = true;
    return config;
  }

  /// The deciding rank names a round that no rank has reached: all are within one of each other.
  void decide(std::atomic<int>& decider, std::atomic<std::int64_t>& when, std::int64_t round) {
    if (decider != rank_) return;
    decider = -1;
    when = round + 3;
  }

  void rejoin(std::int64_t round) {
    latency_.rejoin();
    masked_ = *latency_.mask_count();
    board_.masked[at(rank_)] = 0;
    board_.rejoined[at(rank_)] = round;
  }

  void exchange(std::int64_t round) {
    const std::int64_t tokens = static_cast<std::int64_t>(random_() % (kTokens + 1));
    for (std::int64_t t = 0; t < tokens; ++t) {
      float* row = x_.data() + t * kHidden;
      for (std::int64_t h = 0; h < kHidden; ++h) row[h] = static_cast<float>(h);
      row[0] = static_cast<float>(rank_ + 1);
      row[1] = static_cast<float>(round % (1 << 20) + 1);
      row[2] = static_cast<float>(t + 1);
      for (std::int64_t k = 0; k < kTopk; ++k) {
        routes_[static_cast<std::size_t>(t * kTopk + k)] =
            static_cast<std::int64_t>(random_() % kExperts);
      }
    }
    const LatencyReceived received = latency_.dispatch(
        {x_.data(), Dtype::f32, {tokens, kHidden}}, {routes_.data(), Dtype::i64, {tokens, kTopk}});
    check_rows(received, round);
    LatencyCombineOptions options{.path = CombinePath::per_rank};
    const Tensor sums =
        latency_
            .combine(received.x, received, {weights_.data(), Dtype::f32, {tokens, kTopk}}, options)
            .x;
    for (std::int64_t t = 0; t < tokens; ++t) check_sum(sums.as<float>() + t * kHidden, t);
    if (*latency_.mask_count() != masked_) note_masks();
  }

  void note_masks() {
    const std::int64_t when = now_ns();
    masked_ = *latency_.mask_count();
    int bits = 0;
    const std::vector<bool> masks = latency_.masked();
    for (int peer = 0; peer < kRanks; ++peer) bits |= masks[at(peer)] ? 1 << peer : 0;
    board_.masked[at(rank_)] = bits;
    board_.masked_ns[at(rank_)] = when;
  }

  void check_rows(const LatencyReceived& received, std::int64_t round) const {
    for (std::int64_t e = 0; e < kExperts / kRanks; ++e) {
      for (int source = 0; source < kRanks; ++source) {
        const std::int64_t range = received.ranges.as<std::int64_t>()[e * kRanks + source];
        const std::int64_t first = range >> 32, count = range & 0xffffffff;
        for (std::int64_t row = first; row < first + count; ++row) {
          const std::int64_t place = e * kRanks * kTokens + row;
          const float* got = received.x.as<float>() + place * kHidden;
          const std::int64_t token = received.source_token.as<std::int32_t>()[place];
          const bool right = got[0] == static_cast<float>(source + 1) &&
                             got[1] == static_cast<float>(round % (1 << 20) + 1) &&
                             got[2] == static_cast<float>(token + 1) &&
                             got[kHidden - 1] == kHidden - 1;
          if (!right) give_up("wrong row", round);
        }
      }
    }
  }

  /// The part of a rank may be missing, whole; of a rank other than the victim it should not be.
  void check_sum(const float* sum, std::int64_t token) const {
    const float* row = x_.data() + token * kHidden;
    const float factor = sum[0] / row[0];
    bool right = false, expected = false;
    for (int missing = 0; missing < 1 << kRanks; ++missing) {
      float left = 0;
      for (std::int64_t k = 0; k < kTopk; ++k) {
        const auto slot = static_cast<std::size_t>(token * kTopk + k);
        const auto owner = static_cast<int>(routes_[slot] / (kExperts / kRanks));
        if ((missing >> owner & 1) == 0) left += weights_[slot];
      }
      if (factor != left) continue;
      const int victims = board_.victims;
      right = true;
      expected = expected || (missing & ~victims) == 0 || (victims >> rank_ & 1) != 0;
    }
    for (std::int64_t h = 0; h < kHidden; ++h) right = right && sum[h] == factor * row[h];
    if (!right) give_up("wrong sum, times", static_cast<std::int64_t>(factor * 1000));
    if (!expected) give_up("a rank was masked without a fault; masks", latency_.masked());
  }

  void give_up(const char* what, const std::vector<bool>& masks) const {
    std::int64_t digits = 0;
    for (const bool masked : masks) digits = digits * 10 + (masked ? 1 : 0);
    give_up(what, digits);
  }
  void give_up(const char* what, std::int64_t detail) const {
    reporter_.line(std::string(what) + " " + std::to_string(detail));
    std::_Exit(4);
  }

  int rank_;
  MaskBoard& board_;
  const Reporter& reporter_;
  LatencyExchange latency_;
  std::mt19937 random_;
  std::vector<float> x_, weights_{};
  std::vector<std::int64_t> routes_;
  std::uint64_t masked_ = 0;
};

}  // namespace

MaskedJob::MaskedJob(std::chrono::nanoseconds deadline, int domain_size) {
  board_ = new (shared_.get()) MaskBoard;
  GroupConfig config;
  config.experts = kExperts;
  config.deadline = deadline;
  config.domain_size = domain_size;
  for (int attempts = 20; !start(config) && attempts > 0; --attempts) {
    ranks_.reset();
    board_ = new (shared_.get()) MaskBoard;
  }
}

bool MaskedJob::start(const GroupConfig& config) {
  constexpr int kLate = 5;
  ranks_.emplace(kRanks, [board = board_, config](int rank, std::shared_ptr<Bootstrap> bootstrap,
                                                  const Reporter& reporter) {
    GroupConfig paced = config;
    paced.on_wait = [board, rank] {
      if (board->seen_ns[static_cast<std::size_t>(rank)] != 0) pace(*board, rank);
    };
    std::optional<Group> group;
    std::optional<Load> load;
    try {
      group.emplace(std::move(bootstrap), paced);
      load.emplace(*group, *board, reporter);
    } catch (const Error& error) {
      if (error.kind() != ErrorKind::deadline) throw;
      std::_Exit(kLate);
    }
    load->run();
  });
  bool late = false;
  await("load", [this, &late] {
    for (int rank = 0; rank < kRanks; ++rank) late = late || ranks_->join(rank, 0) == kLate;
    return late || std::all_of(board_->round.begin(), board_->round.end(),
                               [](const auto& round) { return round >= 5; });
  });
  return !late;
}

MaskedJob::~MaskedJob() {
  ranks_.reset();
}

template <class Ready>
void MaskedJob::await(const char* what, const Ready& ready) {
  const double give_up = now() + 60;
  while (!ready() && wrong_.empty()) {
    if (now() > give_up) wrong_ = std::string(what) + " did not come within 60 s";
    std::this_thread::sleep_for(std::chrono::microseconds(200));
  }
}

double MaskedJob::rounds_per_second(int rank) {
  const auto& round = board_->round[static_cast<std::size_t>(rank)];
  const std::int64_t before = round;
  const double start = now();
  std::this_thread::sleep_for(std::chrono::milliseconds(200));
  await("a round", [&] { return round > before + 1; });
  return static_cast<double>(round - before) / (now() - start);
}

bool MaskedJob::is_among(const std::vector<int>& ranks, int rank) {
  return std::find(ranks.begin(), ranks.end(), rank) != ranks.end();
}

MaskFault MaskedJob::fault(const std::vector<int>& victims, int number) {
  std::vector<int> survivors;
  for (int rank = 0; rank < kRanks; ++rank) {
    if (!is_among(victims, rank)) survivors.push_back(rank);
  }
  MaskFault found;
  found.rounds_before = rounds_per_second(survivors.front());
  int bits = 0;
  for (const int victim : victims) bits |= 1 << victim;
  board_->victims = bits;
  for (auto& when : board_->masked_ns) when = 0;
  const std::int64_t start = now_ns();
  for (const int victim : victims) ranks_->signal(victim, number);
  await("a mask", [&] {
    return std::all_of(survivors.begin(), survivors.end(), [&](int rank) {
      const auto r = static_cast<std::size_t>(rank);
      return board_->evicted[r] != 0 || (board_->masked[r] & bits) == bits;
    });
  });
  for (const int rank : survivors) {
    if (!wrong_.empty()) continue;
    const auto r = static_cast<std::size_t>(rank);
    found.mask_ms.push_back(static_cast<double>(board_->masked_ns[r] - start) * 1e-6);
    if (board_->evicted[r] != 0 || board_->masked[r] != bits) {
      wrong_ = "rank " + std::to_string(rank) + " masked bits " +
               std::to_string(board_->masked[r]) + ", expected " + std::to_string(bits) +
               (board_->evicted[r] != 0 ? "; it was evicted itself" : "");
    }
  }
  found.rounds_masked = rounds_per_second(survivors.front());
  return found;
}

MaskFault MaskedJob::kill(int victim) {
  dead_ = victim;
  return fault({victim}, SIGKILL);
}

MaskFault MaskedJob::stop(const std::vector<int>& victims, double seconds) {
  const double start = now();
  for (auto& evicted : board_->evicted) evicted = 0;
  MaskFault found = fault(victims, SIGSTOP);
  std::this_thread::sleep_for(std::chrono::duration<double>(start + seconds - now()));
  for (const int victim : victims) ranks_->signal(victim, SIGCONT);
  await("the news that they were evicted", [&] {
    return std::all_of(victims.begin(), victims.end(), [&](int victim) {
      return board_->evicted[static_cast<std::size_t>(victim)] != 0;
    });
  });
  const std::int64_t before = board_->rejoin_at;
  int survivor = 0;
  while (is_among(victims, survivor)) ++survivor;
  board_->rejoin_decider = survivor;
  await("the rejoin", [&] {
    const std::int64_t meet = board_->rejoin_at;
    return meet > before && std::all_of(board_->rejoined.begin(), board_->rejoined.end(),
                                        [&](const auto& rejoined) { return rejoined >= meet; });
  });
  board_->victims = 0;
  found.rounds_after = rounds_per_second((victims.front() + 1) % kRanks);
  for (const auto& masks : board_->masked) {
    if (masks != 0 && wrong_.empty()) wrong_ = "a mask without a fault";
  }
  return found;
}

std::string MaskedJob::end() {
  board_->stop_decider = dead_ == 0 ? 1 : 0;
  for (int rank = 0; rank < kRanks; ++rank) {
    const int code = ranks_->join(rank, 30);
    if (rank == dead_ ? code == 128 + SIGKILL : code == 0) continue;
    wrong_ += " rank " + std::to_string(rank) + " ended with " + std::to_string(code) + ": " +
              ranks_->line(rank, 0.1);
  }
  return wrong_;
}

}  // namespace ferry::test
