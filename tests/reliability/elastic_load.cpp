#include "elastic_load.hpp"

#include <algorithm>
#include <chrono>
#include <csignal>
#include <new>
#include <random>
#include <thread>
#include <utility>

#include "conformance/device.hpp"

namespace ferry::test {
namespace {

constexpr std::int64_t kTokens = 96, kHidden = 256, kTopk = 2, kExpertsOfRank = 2;

std::size_t at(std::int64_t i) {
  return static_cast<std::size_t>(i);
}

std::uint64_t bits(const std::vector<int>& ranks) {
  std::uint64_t set = 0;
  for (const int rank : ranks) set |= std::uint64_t{1} << rank;
  return set;
}

/// One rank, until it is killed or evicted.
class Load {
 public:
  Load(Group& group, ElasticBoard& board, const Reporter& reporter, Device where)
      : group_(group),
        board_(board),
        reporter_(reporter),
        where_(where),
        random_(unsigned(group.rank())) {}

  void run() {
    step_ = group_.view().step + 1;
    enter(group_.view());
    reporter_.line("going");
    for (;;) {
      try {
        step();
        if (mine_.epoch != std::int64_t(view_.epoch) || mine_.exchanged == 0) {
          mine_.exchanged = now();
          mine_.epoch = std::int64_t(view_.epoch);
        }
        const bool one_waits = group_.commit(step_);
        ++step_;
        ++mine_.steps;
        if (one_waits) {
          enter(group_.regroup());
          check_joined();
        }
      } catch (const Error& error) {
        mine_.failed = now();
        if (!regroup(error)) return;
      }
    }
  }

 private:
  std::int64_t registered() const {
    return std::int64_t(group_.memory().control_bytes + group_.memory().arena_bytes);
  }
  /// No tensor is alive here: all memory is free, unless a rank that was lost may still run, or
  /// one of another domain ever was.
  void check_free_memory() const {
    if (where_.kind != DeviceKind::cpu) return;  // the driver takes its time to end a process
    for (int rank = 0; rank < group_.size(); ++rank) {
      const bool lost = !std::binary_search(view_.ranks.begin(), view_.ranks.end(), rank);
      const bool far = group_.domain_of(rank) != group_.domain_of(group_.rank());
      const int signal = board_.ranks[at(rank)].signal;
      if (far ? signal != 0 || lost : lost && signal != SIGKILL) return;
    }
    if (group_.memory().arena_used_bytes > 0) fail("memory of the step that failed is not free");
  }
  void enter(const GroupView& view) {
    view_ = view;
    std::uint64_t none = 0;
    const std::uint64_t mine = bits(view.ranks);
    if (!board_.views[view.epoch].compare_exchange_strong(none, mine) && none != mine) {
      fail("two views of epoch " + std::to_string(view.epoch));
    }
    none = 0;
    if (!board_.steps[view.epoch].compare_exchange_strong(none, view.step + 1) &&
        none != view.step + 1) {
      fail("two steps of epoch " + std::to_string(view.epoch));
    }
    if (view.step + 1 < step_ || view.step > step_) fail("a step is lost, or was not computed");
    step_ = view.step + 1;
  }
  [[noreturn]] void fail(const std::string& text) const {
    reporter_.line("wrong: rank " + std::to_string(group_.rank()) + ": " + text);
    for (;;) std::this_thread::sleep_for(std::chrono::hours(1));
  }
  void check_joined() const {
    for (const int rank : view_.joined) {
      if (!std::binary_search(view_.ranks.begin(), view_.ranks.end(), rank)) {
        fail("a rank joined that is not there");
      }
    }
  }
  void die_at(Stage stage) {
    if (mine_.order != int(stage)) return;
    mine_.order = -1;
    mine_.lost = now();
    std::raise(mine_.signal);
  }
  /// False: the others went on without this rank.
  bool regroup(const Error& failed) {
    try {
      if (failed.kind() == ErrorKind::evicted) throw failed;
      std::thread end;
      if (mine_.order == int(Stage::regroup)) {
        end = std::thread([this, wait = random_() % 1500] {
          std::this_thread::sleep_for(std::chrono::microseconds(wait));
          die_at(Stage::regroup);
        });
      }
      const std::int64_t before = registered();
      const GroupView next = group_.regroup();
      if (end.joinable()) end.join();
      enter(next);
      if (registered() != before) fail("regroup registered memory");
      check_free_memory();
      return true;
    } catch (const Error& error) {
      if (error.kind() != ErrorKind::evicted)
        fail(std::string(failed.what()) + "; " + error.what());
      mine_.evicted = 1;
      return false;
    }
  }
  float value(int source, std::int64_t token) const {
    return static_cast<float>(view_.epoch * 65536 + std::uint64_t(source) * 1024) +
           static_cast<float>(token);
  }
  void fill() {
    const auto pick = [&] {
      const int rank = view_.ranks[random_() % view_.ranks.size()];
      return rank * kExpertsOfRank + std::int64_t(random_() % kExpertsOfRank);
    };
    for (auto& id : routes_) id = pick();
    for (std::int64_t t = 0; t < kTokens; ++t) {
      std::fill_n(rows_.begin() + t * kHidden, kHidden, value(group_.rank(), t));
    }
  }
  void step() {
    fill();
    die_at(Stage::plan);
    const Tensor routes =
        conformance::to_device({routes_.data(), Dtype::i64, {kTokens, kTopk}}, where_);
    const Tensor rows =
        conformance::to_device({rows_.data(), Dtype::f32, {kTokens, kHidden}}, where_);
    const Plan plan = group_.plan(routes);
    die_at(Stage::dispatch);
    const Received got = group_.dispatch(rows, plan);
    check_rows(got, plan.recv_rows_per_rank());
    die_at(Stage::combine);
    check_sums(conformance::to_cpu(group_.combine(got.x, plan).x));
    die_at(Stage::after);
  }
  void check_rows(const Received& got, const std::vector<std::int64_t>& per_rank) {
    const Tensor tokens = conformance::to_cpu(got.source_token);
    const Tensor rows = conformance::to_cpu(got.x);
    std::int64_t row = 0;
    for (int source = 0; source < group_.size(); ++source) {
      for (std::int64_t i = 0; i < per_rank[at(source)]; ++i, ++row) {
        const float want = value(source, tokens.as<std::int32_t>()[row]);
        const float* have = rows.as<float>() + row * kHidden;
        if (std::any_of(have, have + kHidden, [=](float x) { return x != want; })) {
          fail("a wrong row of rank " + std::to_string(source));
        }
      }
    }
  }
  void check_sums(const Tensor& sums) {
    for (std::int64_t t = 0; t < kTokens; ++t) {
      const bool same =
          routes_[at(t * 2)] / kExpertsOfRank == routes_[at(t * 2 + 1)] / kExpertsOfRank;
      const float want = value(group_.rank(), t) * (same ? 1.0F : 2.0F);
      const float* have = sums.as<float>() + t * kHidden;
      if (std::any_of(have, have + kHidden, [=](float x) { return x != want; }))
        fail("a wrong sum");
    }
  }

  Group& group_;
  ElasticBoard& board_;
  const Reporter& reporter_;
  Device where_;
  std::mt19937 random_;
  ElasticBoard::Rank& mine_ = board_.ranks[at(group_.rank())];
  GroupView view_{};
  std::uint64_t step_ = 1;  // that comes next
  std::vector<std::int64_t> routes_ = std::vector<std::int64_t>(kTokens * kTopk);
  std::vector<float> rows_ = std::vector<float>(kTokens * kHidden);
};

}  // namespace

const char* name_of(Stage stage) {
  switch (stage) {
    case Stage::anywhere: return "anywhere";
    case Stage::plan: return "before plan";
    case Stage::dispatch: return "before dispatch";
    case Stage::combine: return "before combine";
    case Stage::after: return "after combine";
    case Stage::regroup: return "during regroup";
  }
  return "unknown";
}

ElasticJob::ElasticJob(int ranks, std::chrono::nanoseconds deadline, int domain_size, int gpus) {
  board_ = new (shared_.get()) ElasticBoard;
  GroupConfig config{
      .experts = ranks * kExpertsOfRank, .deadline = deadline, .memory_bytes = 4 << 20};
  config.elastic = "load";
  if (domain_size > 0) {
    config.domain_size = domain_size;
    config.network = FabricKind::ofi;
  }
  config.backend = gpus > 0 ? Backend::cuda : Backend::host;
  if (gpus > 0) config.memory_bytes = 32 << 20;  // also for what lost ranks may still write to
  ranks_.emplace(ranks, [this, config, gpus](int rank, std::shared_ptr<Bootstrap> bootstrap,
                                             const Reporter& reporter) {
    Device where;
    if (gpus > 0) where = {DeviceKind::cuda, rank % gpus};
    conformance::use_device(where);
    Group group(std::move(bootstrap), config);
    Load(group, *board_, reporter, where).run();
  });
  for (int rank = 0; rank < ranks; ++rank) {
    alive_.push_back(rank);
    if (const std::string line = ranks_->line(rank, 60); line != "going") {
      began_ = false;
      wrong_ = "at first: " + line;
    }
  }
}

ElasticJob::~ElasticJob() {
  ranks_.reset();
}

template <class Ready>
void ElasticJob::await(const char* what, const Ready& ready) {
  const double end = now() + 60;
  while (wrong_.empty() && !ready()) {
    std::this_thread::sleep_for(std::chrono::milliseconds(1));
    check_lines();
    if (now() > end && wrong_.empty()) wrong_ = std::string("no end of: ") + what + whereabouts();
  }
}

/// Of those that should be there.
std::string ElasticJob::whereabouts() {
  std::string text;
  for (const int rank : alive_) {
    const auto& mine = board_->ranks[at(rank)];
    const auto seconds_ago = [](double when) {
      return when == 0 ? std::string("never") : std::to_string(now() - when) + " s ago";
    };
    text += "\nrank " + std::to_string(rank) + ": epoch " + std::to_string(mine.epoch) + ", step " +
            std::to_string(mine.steps) + ", failed " + seconds_ago(mine.failed) + ", exchanged " +
            seconds_ago(mine.exchanged) + (mine.evicted != 0 ? ", evicted" : "");
    if (const int code = ranks_->join(rank, 0); code >= 0) text += ", exit " + std::to_string(code);
  }
  return text;
}

void ElasticJob::check_lines() {
  for (const int rank : alive_) {
    const std::string line = ranks_->line(rank, 0);
    if (!line.empty() && line != "going") wrong_ = line;
  }
}

double ElasticJob::strike(const std::vector<int>& victims, Stage stage, int signal) {
  const bool first_only = stage == Stage::regroup;
  double when = 0;
  for (std::size_t i = 0; i < victims.size(); ++i) {
    auto& victim = board_->ranks[at(victims[i])];
    victim.signal = signal;
    if (stage != Stage::anywhere && !(first_only && i == 0)) victim.order = int(stage);
  }
  if (stage == Stage::anywhere || first_only) {
    when = now();
    for (std::size_t i = 0; i < (first_only ? 1 : victims.size()); ++i) {
      ranks_->signal(victims[i], signal);
    }
  } else {
    await("a rank does away with itself", [&] {
      return std::all_of(victims.begin(), victims.end(), [&](int victim) {
        const auto& rank = board_->ranks[at(victim)];
        // One may fail because of the other before it comes there.
        return rank.lost > 0 || rank.failed > 0;
      });
    });
    for (const int victim : victims) {
      auto& rank = board_->ranks[at(victim)];
      if (rank.lost > 0) when = std::max<double>(when, rank.lost);
    }
  }
  return when;
}

Loss ElasticJob::lose(const std::vector<int>& victims, Stage stage, int signal) {
  std::erase_if(alive_, [&](int rank) {
    return std::find(victims.begin(), victims.end(), rank) != victims.end();
  });
  for (const int rank : alive_) board_->ranks[at(rank)].failed = 0;
  for (const int rank : victims) board_->ranks[at(rank)].failed = 0;
  const double struck = strike(victims, stage, signal);
  const std::uint64_t want = bits(alive_);
  const auto goes_on = [&](int rank) {
    const auto& mine = board_->ranks[at(rank)];
    return board_->views[at(mine.epoch)] == want && mine.exchanged > mine.failed;
  };
  await("the ranks that are left go on",
        [&] { return std::all_of(alive_.begin(), alive_.end(), goes_on); });
  Loss loss;
  double last = 0, first_step = 0;
  for (const int rank : alive_) {
    const auto& mine = board_->ranks[at(rank)];
    if (mine.failed > struck) loss.detected.push_back((mine.failed - struck) * 1e3);
    last = std::max<double>(last, mine.failed);
    first_step = std::max<double>(first_step, mine.exchanged);
  }
  loss.regrouped = (first_step - last) * 1e3;
  return loss;
}

void ElasticJob::restart(int rank) {
  auto& board = board_->ranks[at(rank)];
  board.order = -1;
  board.epoch = 0;
  board.exchanged = 0;
  board.failed = 0;
  board.lost = 0;
  board.evicted = 0;
  board.signal = SIGKILL;
  ranks_->restart(rank);
}

void ElasticJob::await_steps(const char* what) {
  const std::uint64_t want = bits(alive_);
  std::vector<std::int64_t> before;
  for (const int rank : alive_) before.push_back(board_->ranks[at(rank)].steps);
  await(what, [&] {
    for (std::size_t i = 0; i < alive_.size(); ++i) {
      const auto& rank = board_->ranks[at(alive_[i])];
      if (board_->views[at(rank.epoch)] != want || rank.steps <= before[i] + 10) return false;
    }
    return true;
  });
}

double ElasticJob::join(const std::vector<int>& ranks) {
  const double start = now();
  for (const int rank : ranks) {
    restart(rank);
    alive_.push_back(rank);
  }
  std::sort(alive_.begin(), alive_.end());
  const std::uint64_t want = bits(alive_);
  await("ranks join", [&] {
    return std::all_of(alive_.begin(), alive_.end(), [&](int rank) {
      const auto& mine = board_->ranks[at(rank)];
      return board_->views[at(mine.epoch)] == want && mine.exchanged > start;
    });
  });
  return (now() - start) * 1e3;
}

void ElasticJob::lose_joiner(int rank, std::chrono::microseconds after) {
  restart(rank);
  std::this_thread::sleep_for(after);
  ranks_->signal(rank, SIGKILL);
  await_steps("steps after a joiner was killed");
}

void ElasticJob::lose_beside_joiner(int joiner, int victim, std::chrono::microseconds after) {
  board_->ranks[at(victim)].signal = SIGKILL;
  restart(joiner);
  std::this_thread::sleep_for(after);
  std::erase(alive_, victim);
  ranks_->signal(victim, SIGKILL);
  alive_.push_back(joiner);
  std::sort(alive_.begin(), alive_.end());
  await_steps("steps after a rank was killed while a process joined");
}

void ElasticJob::resume(const std::vector<int>& victims) {
  std::vector<std::int64_t> before;
  for (const int rank : alive_) before.push_back(board_->ranks[at(rank)].steps);
  for (const int victim : victims) ranks_->signal(victim, SIGCONT);
  for (const int victim : victims) {
    await("an evicted rank hears of it", [&] { return board_->ranks[at(victim)].evicted == 1; });
  }
  // And the others are not disturbed.
  for (std::size_t i = 0; i < alive_.size(); ++i) {
    await("steps after a rank came back late",
          [&] { return board_->ranks[at(alive_[i])].steps > before[i] + 20; });
  }
}

}  // namespace ferry::test
