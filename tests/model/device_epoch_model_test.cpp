// Two ranks of the CUDA engine go on without a third, whose kernels may still store for a while
// (cuda/throughput/regroup.cpp). A search of its own: heads in mailboxes with their generations,
// rows in granted memory, plans. Calls are a plan, then its dispatch, which may post its head while
// the plan runs; by a graph or not.
#include <gtest/gtest.h>

#include <algorithm>
#include <array>
#include <cstdint>
#include <cstdio>
#include <cstring>
#include <string>
#include <unordered_set>
#include <vector>

#include "protocol/device_epoch.hpp"
#include "protocol/membership_statement.hpp"

namespace ferry::model::device_epoch_model {
namespace {

constexpr int kGpuRanks = 3, kLostGpu = 2, kSlots = 4;
constexpr int kOldCalls = 3, kOfLost = 4, kNewCalls = 2;
/// Of memory: the first is taken first, the last is a graph's.
constexpr int kPieces = 3, kOfGraph = 2;

struct GpuTraits {
  using Rules = protocol::DeviceEpochTraits;
  /// Nothing is awaited from the seat of a lost rank.
  static constexpr bool kHoles = true;
  /// Memory that was granted in a call that did not end well is put aside until the lost rank is
  /// known to be dead.
  static constexpr bool kQuarantine = true;
  /// Also what is free by then, as its tensor was dropped while the call ran.
  static constexpr bool kOfDropped = true;
  /// A graph, which has no other memory, waits for that.
  static constexpr bool kGraphsWait = true;
  /// A rank says that it has stopped when its kernels have ended.
  static constexpr bool kDrains = true;
};

struct Head {
  std::uint8_t generation = 0;
  std::uint8_t of_new = 0;
};
struct GpuRank {
  std::uint8_t ended = 0, posted = 0;   // generations
  std::uint8_t planned = 0;             // generation of the last plan
  std::uint8_t granted = 0;             // piece + 1 of the dispatch that runs
  std::uint8_t stopped = 0, fresh = 0;  // fresh: in the new epoch
  std::uint8_t offer = 0, before = 0;
  std::uint8_t aside = 0;      // pieces that the lost rank may write to
  std::uint8_t used = 0;       // pieces that calls of the new epoch have granted
  std::uint8_t rows_came = 0;  // of the lost rank, for the dispatch of this generation
  std::array<std::array<Head, kSlots>, kGpuRanks> mailbox{};
};
struct State {
  std::array<GpuRank, kGpuRanks> ranks{};
  // Of the lost rank, on their way to each of the others: heads by generation; for each piece the
  // generation of rows, whose flag comes with them.
  std::array<std::uint8_t, 2> heads{};
  std::array<std::array<std::uint8_t, kPieces>, 2> rows{};
  std::array<std::uint8_t, 2> sent{};  // newest dispatch whose rows it has sent
  std::uint8_t dead = 0;
};
static_assert(alignof(State) == 1, "compared by bytes: there are none between");

template <class Traits>
class GpuSearch {
 public:
  /// The first violation, or "".
  std::string run() {
    std::vector<State> todo{State{}};
    seen_.insert(bytes_of(todo.front()));
    while (!todo.empty() && failure_.empty()) {
      const State state = todo.back();
      todo.pop_back();
      next_.clear();
      expand(state);
      if (next_.empty() && !through(state)) fail("the ranks that are left are stuck");
      for (const State& next : next_) {
        if (seen_.insert(bytes_of(next)).second) todo.push_back(next);
      }
    }
    return failure_;
  }
  std::size_t states() const { return seen_.size(); }

 private:
  using Rules = protocol::DeviceEpoch<typename Traits::Rules>;

  static std::string bytes_of(const State& state) {
    std::string text(sizeof(state), '\0');
    std::memcpy(text.data(), &state, sizeof(state));
    return text;
  }
  void fail(const std::string& what) {
    if (failure_.empty()) failure_ = what;
  }
  static int limit(const GpuRank& rank, int r) {
    if (rank.fresh != 0) return rank.before + kNewCalls;
    return r == kLostGpu ? kOfLost : kOldCalls;
  }
  static bool through(const State& state) {
    return std::all_of(state.ranks.begin(), state.ranks.begin() + 2, [](const GpuRank& rank) {
      return rank.fresh != 0 && rank.ended == rank.before + kNewCalls;
    });
  }
  /// Calls of an epoch alternate; the first is a plan.
  static bool plans(const GpuRank& rank, int generation) {
    return (generation - rank.before) % 2 == 1;
  }

  void expand(const State& state) {
    for (int r = 0; r < kGpuRanks; ++r) {
      const GpuRank& rank = state.ranks[std::size_t(r)];
      if (r == kLostGpu && state.dead != 0) continue;
      const bool runs = rank.stopped == 0 || rank.fresh != 0;
      if (runs || !Traits::kDrains) {
        post(state, r);
        end(state, r);
      }
      if (r != kLostGpu && rank.stopped == 0) stop(state, r);
      if (r != kLostGpu && rank.stopped != 0 && rank.fresh == 0) go_on(state, r);
    }
    if (state.dead == 0) {
      send_rows(state);
      land(state);
      State next = state;
      next.dead = 1;
      next.heads = {};
      next.rows = {};
      next_.push_back(next);
    }
  }

  void post(const State& state, int r) {
    const GpuRank& rank = state.ranks[std::size_t(r)];
    const int generation = rank.posted + 1;
    if (generation > limit(rank, r)) return;
    const bool early = rank.posted == rank.ended + 1 && plans(rank, rank.posted);
    if (rank.posted != rank.ended && !early) return;
    if (plans(rank, generation) || r == kLostGpu) return put(state, r, generation, -1);
    for (const bool graph : {false, true}) {
      if (graph && r != 0) continue;  // one rank has graphs: fewer states
      const int piece = piece_for(state, r, graph);
      if (piece >= 0) put(state, r, generation, piece);
    }
  }
  static int piece_for(const State& state, int r, bool graph) {
    const GpuRank& rank = state.ranks[std::size_t(r)];
    const bool held = state.dead == 0 && rank.fresh != 0;
    if (graph) return held && Traits::kGraphsWait ? -1 : kOfGraph;
    for (int piece = 0; piece < kOfGraph; ++piece) {
      if (!held || (rank.aside >> piece & 1) == 0) return piece;
    }
    return -1;
  }
  void put(const State& state, int r, int generation, int piece) {
    State next = state;
    GpuRank& rank = next.ranks[std::size_t(r)];
    rank.posted = std::uint8_t(generation);
    if (piece >= 0) rank.granted = std::uint8_t(piece + 1);
    if (piece >= 0 && rank.fresh != 0) rank.used |= std::uint8_t(1 << piece);
    for (int to = 0; to < kGpuRanks; ++to) {
      if (r == kLostGpu && to != r) {
        next.heads[std::size_t(to)] |= std::uint8_t(1 << generation);
      } else {
        head(next, to, r, generation) = {std::uint8_t(generation), rank.fresh};
      }
    }
    next_.push_back(next);
  }
  static Head& head(State& state, int at, int from, int generation) {
    return state.ranks[std::size_t(at)]
        .mailbox[std::size_t(from)][std::size_t(generation % kSlots)];
  }

  void end(const State& state, int r) {
    State next = state;
    GpuRank& rank = next.ranks[std::size_t(r)];
    const int generation = rank.ended + 1;
    if (rank.posted < generation) return;
    for (int from = 0; from < kGpuRanks; ++from) {
      if (from == kLostGpu && rank.fresh != 0 && Traits::kHoles) continue;
      const Head found = head(next, r, from, generation);
      if (found.generation != generation) return;
      if (rank.fresh != found.of_new) return fail("a head of the old epoch counts in the new one");
    }
    const bool dispatch = !plans(rank, generation);
    if (dispatch && r != kLostGpu && rank.fresh == 0 && rank.rows_came < generation) return;
    if (dispatch && r != kLostGpu && !Rules::holds(rank.planned, rank.before)) {
      return fail("a plan of this epoch is refused");
    }
    if (dispatch) rank.granted = 0;
    if (!dispatch) rank.planned = std::uint8_t(generation);
    rank.ended = std::uint8_t(generation);
    next_.push_back(next);
  }

  void stop(const State& state, int r) {
    State next = state;
    GpuRank& rank = next.ranks[std::size_t(r)];
    rank.stopped = 1;
    rank.offer = std::uint8_t(Rules::newest_used(rank.ended, 0));
    const bool lasts = rank.granted == kOfGraph + 1;  // a graph keeps its memory
    if (rank.granted != 0 && Traits::kQuarantine && (Traits::kOfDropped || lasts)) {
      rank.aside = std::uint8_t(1 << (rank.granted - 1));
    }
    next_.push_back(next);
  }

  void go_on(const State& state, int r) {
    const GpuRank& other = state.ranks[std::size_t(1 - r)];
    if (other.stopped == 0) return;
    State next = state;
    GpuRank& rank = next.ranks[std::size_t(r)];
    const auto first = protocol::MembershipTraits::after(std::max(rank.offer, other.offer));
    if (state.ranks[kLostGpu].posted >= first) return fail("a generation belongs to two epochs");
    if (rank.planned != 0 && Rules::holds(rank.planned, first - 1)) {
      return fail("a plan of the old epoch is taken");
    }
    rank.before = rank.ended = rank.posted = std::uint8_t(first - 1);
    rank.granted = 0;
    rank.fresh = 1;
    forget_old(next, r);
    next_.push_back(next);
  }

  /// What can make no difference any more, so that there are fewer states: heads that no call of
  /// the new epoch takes for its own.
  static void forget_old(State& state, int r) {
    GpuRank& rank = state.ranks[std::size_t(r)];
    for (auto& from : rank.mailbox) {
      for (Head& found : from) {
        if (found.generation <= rank.before) found = {};
      }
    }
    for (int generation = 1; generation <= rank.before && generation <= kOfLost; ++generation) {
      state.heads[std::size_t(r)] &= std::uint8_t(~(1u << generation));
    }
  }

  /// The lost rank's dispatch stores rows where it was granted memory.
  void send_rows(const State& state) {
    const GpuRank& lost = state.ranks[kLostGpu];
    for (int to = 0; to < 2; ++to) {
      const auto t = std::size_t(to);
      const GpuRank& rank = state.ranks[t];
      const int generation = rank.posted;
      const bool granted = rank.fresh == 0 && rank.granted != 0 && state.sent[t] < generation;
      if (!granted || lost.posted < generation || plans(lost, generation)) continue;
      State next = state;
      next.rows[t][std::size_t(rank.granted - 1)] = std::uint8_t(generation);
      next.sent[t] = std::uint8_t(generation);
      next_.push_back(next);
    }
  }
  void land(const State& state) {
    for (int to = 0; to < 2; ++to) {
      const auto t = std::size_t(to);
      for (int generation = 1; generation <= kOfLost; ++generation) {
        if ((state.heads[t] >> generation & 1) == 0) continue;
        State next = state;
        next.heads[t] &= std::uint8_t(~(1u << generation));
        head(next, to, kLostGpu, generation) = {std::uint8_t(generation), 0};
        next_.push_back(next);
      }
      for (int piece = 0; piece < kPieces; ++piece) {
        const std::uint8_t generation = state.rows[t][std::size_t(piece)];
        if (generation == 0) continue;
        if ((state.ranks[t].used >> piece & 1) != 0) {
          return fail("rows of a lost rank come to memory of the new epoch");
        }
        State next = state;
        next.rows[t][std::size_t(piece)] = 0;
        next.ranks[t].rows_came = generation;
        next_.push_back(next);
      }
    }
  }

  std::unordered_set<std::string> seen_{};
  std::vector<State> next_{};
  std::string failure_{};
};

template <class Traits>
void expect_failure(const char* what, const char* why) {
  GpuSearch<Traits> search;
  EXPECT_EQ(search.run(), why) << what;
  std::printf("%s: %zu states\n", what, search.states());
}

TEST(DeviceEpochModel, NothingOfALostRankCounts) {
  expect_failure<GpuTraits>("two ranks go on without a third", "");
}

struct OffersWhatEnded : GpuTraits {
  struct Rules : protocol::DeviceEpochTraits {
    static constexpr std::uint64_t kUnderWay = 0;
  };
};
struct OffersItsOwn : GpuTraits {
  struct Rules : protocol::DeviceEpochTraits {
    static constexpr std::uint64_t kUnderWay = 2;
  };
};
struct PlansOfAnyEpoch : GpuTraits {
  struct Rules : protocol::DeviceEpochTraits {
    static constexpr bool kPlansOfEpoch = false;
  };
};
struct AwaitsLost : GpuTraits {
  static constexpr bool kHoles = false;
};
struct NoQuarantine : GpuTraits {
  static constexpr bool kQuarantine = false;
};
struct QuarantineOfHeld : GpuTraits {
  static constexpr bool kOfDropped = false;
};
struct GraphsAtOnce : GpuTraits {
  static constexpr bool kGraphsWait = false;
};
struct StopsUnderWay : GpuTraits {
  static constexpr bool kDrains = false;
};

TEST(DeviceEpochModel, MutantsAreCaught) {
  const char* rows = "rows of a lost rank come to memory of the new epoch";
  expect_failure<OffersWhatEnded>("offers the last call that ended",
                                  "a head of the old epoch counts in the new one");
  expect_failure<OffersItsOwn>("offers what it posted itself",
                               "a generation belongs to two epochs");
  expect_failure<PlansOfAnyEpoch>("plans of any epoch", "a plan of the old epoch is taken");
  expect_failure<AwaitsLost>("waits for a hole", "the ranks that are left are stuck");
  expect_failure<NoQuarantine>("no quarantine", rows);
  expect_failure<QuarantineOfHeld>("quarantine of memory that is held", rows);
  expect_failure<GraphsAtOnce>("graphs grant at once", rows);
  expect_failure<StopsUnderWay>("stops while calls run", rows);
}

}  // namespace
}  // namespace ferry::model::device_epoch_model
