// Ranks in processes that exchange through the CUDA engine, plainly and by a graph, while some are
// killed; the others regroup and go on, and processes take the places of the dead.
#pragma once
#include <signal.h>
#include <sys/mman.h>

#include <algorithm>
#include <array>
#include <atomic>
#include <chrono>
#include <new>
#include <optional>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "engine_graph.hpp"
#include "engine_seat.hpp"

namespace ferry::test {

/// Where a rank kills itself. `flight`: its dispatch is on its way; `replay`: in place of a replay
/// of the graph.
enum class DiesAt { plan, dispatch, flight, combine, after, replay };
inline constexpr std::array kDeaths = {DiesAt::plan,    DiesAt::dispatch, DiesAt::flight,
                                       DiesAt::combine, DiesAt::after,    DiesAt::replay};
inline const char* name_of(DiesAt at) {
  constexpr const char* kNames[] = {"plan", "dispatch", "flight", "combine", "after", "replay"};
  return kNames[static_cast<int>(at)];
}

/// When what happened, in ns; shared by the processes. `ready`: the tokens of the next epoch are on
/// the GPU, which a test makes anew; `usual`: how long what ends at `exchanged` took before.
struct LossTimes {
  static constexpr int kRanks = 16;
  std::atomic<std::int64_t> killed{0};
  struct Survivor {
    std::atomic<std::int64_t> usual{0}, failed{0}, regrouped{0}, ready{0}, exchanged{0},
        replayed{0};
  };
  std::array<Survivor, kRanks> ranks{};
};
/// For as long as the program runs.
inline std::vector<LossTimes*> shared_times(std::size_t count) {
  void* memory = mmap(nullptr, count * sizeof(LossTimes), PROT_READ | PROT_WRITE,
                      MAP_SHARED | MAP_ANONYMOUS, -1, 0);
  need(memory != MAP_FAILED, "mmap");
  std::vector<LossTimes*> all;
  for (std::size_t i = 0; i < count; ++i) {
    all.push_back(new (static_cast<LossTimes*>(memory) + i) LossTimes());
  }
  return all;
}
inline std::int64_t time_now() {
  return std::chrono::steady_clock::now().time_since_epoch().count();
}

/// Commits until a process waits for a place: the view with it, and the step of the last commit.
inline std::pair<ferry::GroupView, std::uint64_t> regroup_when_one_waits(Group& group) {
  std::uint64_t step = group.view().step + 1;
  try {
    while (!group.commit(step)) {
      ++step;
      std::this_thread::sleep_for(1ms);
    }
  } catch (const Error& error) {  // another rank had its answer before, and regroups
    need(error.kind() == ErrorKind::peer_failed, error.what());
  }
  return {group.regroup(), step};
}

/// Tokens of the ranks that are left alone, to experts of theirs alone.
inline World world_of(const std::vector<int>& left, int ranks, const Shape& shape,
                      std::uint64_t seed) {
  World world(ranks, shape, seed);
  const std::int64_t each = shape.experts / ranks;
  need(each * ranks == shape.experts, "as many experts for each rank");
  for (int r = 0; r < ranks; ++r) {
    Sent& sent = world.inputs[static_cast<std::size_t>(r)];
    if (!std::binary_search(left.begin(), left.end(), r)) {
      sent = {};
      continue;
    }
    for (std::int64_t& id : sent.topk_idx) {
      if (id < 0) continue;
      const auto at = static_cast<std::size_t>(id) % left.size();
      id = left[at] * each + id % each;
    }
  }
  return world;
}

class RegroupingRank {
 public:
  static Shape shape_of(int ranks) {
    return {.tokens = 203, .hidden = 1024, .experts = 3 * ranks, .dtype = Dtype::f32};
  }
  static constexpr std::int64_t kMostRows = 1700;

  /// `elastic`: as GroupConfig has it. A process that joins is in the group then, and `take_part`
  /// follows, as after `take_in` of the others. One that begins is alone in it; `take_in_all`
  /// follows.
  RegroupingRank(Bootstrap& bootstrap, std::uint64_t seed, const std::string& elastic = "")
      : shape_(shape_of(bootstrap.size())),
        seed_(seed),
        device_(take_gpu(bootstrap)),
        group_(borrowed(bootstrap), roomy(config_for(shape_), elastic)),
        own_(device_),
        world_(is_partial(bootstrap) ? world_now() : World(bootstrap.size(), shape_, seed)),
        mine_(world_.sent(group_.rank()), shape_, device_, copier_) {
    if (!is_partial(bootstrap)) step();
    trip_.max_recv_rows = kMostRows;
    graph_.emplace(own_.raw, [this] { exchange_in_graph(); });
    bytes_ = group_.memory();
    if (is_partial(bootstrap)) return;
    bootstrap.all_gather({}, 60s);
    replay();
    group_.barrier();
    bytes_ = group_.memory();
  }

  Group& group() { return group_; }
  const OnGpu& mine() const { return mine_; }
  const Copier& copier() const { return copier_; }

  /// An exchange of each order, all checked; this rank dies in it, if it is to.
  void step(std::optional<DiesAt> death = {}, LossTimes* times = nullptr) {
    for (const RowOrder order : kOrders) check(exchange(order, death, times));
  }

  /// The graph's exchange: plan, dispatch and combine.
  void replay() {
    graph_->run();
    group_.barrier();  // throws how it ended
    check_received(world_, group_.rank(), trip_, in_graph_, copier_);
    check_combined(world_, group_.rank(), trip_, sums_in_graph_, copier_);
  }

  /// Exchanges until the victim has died, then goes on without it.
  ferry::GroupView lose(int victim, DiesAt death, LossTimes& times) {
    LossTimes::Survivor& here = times.ranks[static_cast<std::size_t>(group_.rank())];
    group_.barrier();  // all begin at once
    const std::int64_t start = time_now();
    here.usual.store(step_together() - start);
    exchange_until_loss(victim, death, times);
    here.failed.store(time_now());
    const ferry::GroupView view = group_.regroup();
    here.regrouped.store(time_now());
    need(!std::binary_search(view.ranks.begin(), view.ranks.end(), victim), "the victim is there");
    send_new_tokens();
    here.ready.store(time_now());
    here.exchanged.store(step_together());
    return view;
  }

  /// Tokens to those that are left follow.
  ferry::GroupView regroup() {
    const ferry::GroupView view = group_.regroup();
    send_new_tokens();
    return view;
  }

  /// Exchanges until a rank leaves, then goes on without it, also by the graph.
  void miss(int leaver) {
    const auto error = error_of([&] {
      for (int i = 0; i < 2000; ++i) step();
    });
    need(error.has_value(), "exchanges went on without rank " + std::to_string(leaver));
    need(error->kind() == ErrorKind::peer_left && error->peer() == leaver, error->what());
    (void)regroup();
    take_part();
  }

  /// Commits until a process waits for the place of `lost`, and goes on with it.
  void take_in(int lost) {
    const auto [view, step] = regroup_when_one_waits(group_);
    need(view.joined == std::vector<int>{lost} && view.lost.empty() && view.step == step,
         "another view than that of a process that has joined");
    send_new_tokens();
    take_part();
  }
  /// As processes come, one by one or several at a time, until all places are taken.
  void take_in_all() {
    while (std::ssize(group_.view().ranks) < group_.size()) {
      (void)regroup_when_one_waits(group_);
      send_new_tokens();
    }
    take_part();
  }
  /// All ranks, plainly and by the graph that each has captured when it came.
  void take_part() {
    step_together();
    for (int i = 0; i < 3; ++i) replay();
  }

  /// By the graph that was captured when all ranks were there.
  void replay_after(LossTimes& times) {
    for (int i = 0; i < 3; ++i) {
      replay();
      if (i == 0) {
        times.ranks[static_cast<std::size_t>(group_.rank())].replayed.store(time_now());
      }
    }
    const MemoryStats now = group_.memory();
    need(now.arena_bytes == bytes_.arena_bytes && now.control_bytes == bytes_.control_bytes,
         "memory was registered");
  }

 private:
  /// Ranks may be missing.
  static bool is_partial(const Bootstrap& bootstrap) {
    return bootstrap.joins() || bootstrap.begins();
  }
  /// Also for what is not handed out as long as a lost rank may write there.
  static GroupConfig roomy(GroupConfig config, const std::string& elastic) {
    config.memory_bytes = std::size_t{64} << 20;
    config.elastic = elastic;
    return config;
  }
  World world_now() const {
    const ferry::GroupView view = group_.view();
    return world_of(view.ranks, group_.size(), shape_, seed_ + view.epoch);
  }
  void send_new_tokens() {
    world_ = world_now();
    mine_.fill(world_.sent(group_.rank()), copier_);
  }
  static constexpr std::array kOrders = {RowOrder::rank_major, RowOrder::expert_major};
  struct Exchanged {
    Trip trip{};
    Received got{};
    Combined sums{};
  };
  Exchanged exchange(RowOrder order, std::optional<DiesAt> death = {}, LossTimes* times = nullptr) {
    const auto at = [&](DiesAt now) { die_at(now, death, times); };
    Exchanged now{.trip = {.order = order, .alignment = order == RowOrder::expert_major ? 8 : 1}};
    now.trip.stream = &own_.stream;
    at(DiesAt::plan);
    // On a stream the dispatch learns that the plan has failed.
    const bool waits = order == RowOrder::expert_major;
    const Plan plan = group_.plan(mine_.routes_view(), {.stream = waits ? nullptr : &own_.stream});
    at(DiesAt::dispatch);
    now.got = group_.dispatch(mine_.x_view(), plan, dispatch_options(mine_, now.trip));
    at(DiesAt::flight);
    now.got.event.wait(60s);
    at(DiesAt::combine);
    now.sums = group_.combine(now.got.x, plan, combine_options(now.got, now.trip));
    now.sums.event.wait(60s);
    at(DiesAt::after);
    return now;
  }
  void check(const Exchanged& now) const {
    check_received(world_, group_.rank(), now.trip, now.got, copier_);
    check_combined(world_, group_.rank(), now.trip, now.sums, copier_);
  }
  /// A barrier and a step of all ranks; when it had ended, which comes before the checks, for those
  /// take longer.
  std::int64_t step_together() {
    group_.barrier();
    const std::array both = {exchange(kOrders[0]), exchange(kOrders[1])};
    const std::int64_t ended = time_now();
    for (const Exchanged& one : both) check(one);
    return ended;
  }
  void exchange_until_loss(int victim, DiesAt death, LossTimes& times) {
    const bool dies = group_.rank() == victim;
    const auto error = error_of([&] {
      for (int i = 0; i < 2000; ++i) {
        if (death == DiesAt::replay) {
          if (dies && i == 2) die_at(death, death, &times);
          replay();
        } else {
          step(dies && i == 2 ? std::optional(death) : std::nullopt, &times);
        }
      }
    });
    need(error.has_value(), "exchanges went on without rank " + std::to_string(victim));
    need(error->kind() == ErrorKind::peer_failed && error->peer() == victim, error->what());
  }
  static void die_at(DiesAt now, std::optional<DiesAt> death, LossTimes* times) {
    if (death != now) return;
    times->killed.store(time_now());
    raise(SIGKILL);
  }

  void exchange_in_graph() {
    trip_.stream = &own_.stream;
    const Plan plan = group_.plan(mine_.routes_view(), {.stream = &own_.stream});
    in_graph_ = group_.dispatch(mine_.x_view(), plan, dispatch_options(mine_, trip_));
    sums_in_graph_ = group_.combine(in_graph_.x, plan, combine_options(in_graph_, trip_));
  }

  Shape shape_;
  std::uint64_t seed_;
  int device_;
  Copier copier_{};
  Group group_;
  OwnStream own_;
  World world_;
  OnGpu mine_;
  Trip trip_{};
  Received in_graph_{};
  Combined sums_in_graph_{};
  std::optional<Graph> graph_{};
  MemoryStats bytes_{};
};

/// Runs ranks in processes of which `victims` are killed; what went wrong but that.
inline std::vector<std::string> run_losses(int ranks, const std::vector<int>& victims,
                                           const RankBody& body, int seconds) {
  std::vector<std::string> problems = run_ranks(ranks, 1, body, seconds);
  for (const int victim : victims) {
    const std::string killed =
        "rank " + std::to_string(victim) + ": its process ended before it did: signal 9 (Killed)";
    const auto found = std::find(problems.begin(), problems.end(), killed);
    if (found == problems.end()) {
      problems.push_back("rank " + std::to_string(victim) + " was not killed");
    } else {
      problems.erase(found);
    }
  }
  return problems;
}

}  // namespace ferry::test
