// The tuner, replayed on sweeps that were recorded: what it settles on costs at most 3 % more than
// the best of the sweep, after at most 30 probes.
#include "core/choice/exchange_tuner.hpp"

#include <gtest/gtest.h>

#include <algorithm>
#include <bit>
#include <cmath>
#include <fstream>
#include <functional>
#include <iterator>
#include <map>
#include <random>
#include <string>
#include <utility>
#include <vector>

namespace ferry {
namespace {

constexpr unsigned kTunerSeed = 20261126;
constexpr double kRegret = 1.03;

std::string results_of(const std::string& file) {
  std::string path = FERRY_RESULTS;
  path += file;
  std::ifstream in(path);
  return {std::istreambuf_iterator<char>(in), std::istreambuf_iterator<char>()};
}

/// The value behind a key, from `at` on, which is moved behind it; empty: there is none.
std::string value_of(const std::string& text, const std::string& key, std::size_t& at) {
  const std::size_t found = text.find('"' + key + "\":", at);
  if (found == std::string::npos) return "";
  const std::size_t begin = text.find_first_not_of(" \"", found + key.size() + 3);
  at = text.find_first_of("\"\n,}", begin);
  return key == "name" ? text.substr(begin, text.find('"', begin) - begin)
                       : text.substr(begin, at - begin);
}

/// Of the flat objects of a file that have a median.
std::vector<std::string> rows_of(const std::string& text) {
  std::vector<std::string> rows;
  for (std::size_t at = text.find('{'); at != std::string::npos; at = text.find('{', at + 1)) {
    const std::string row = text.substr(at, text.find_first_of("{}", at + 1) - at);
    if (row.find("\"p50_us\"") != std::string::npos) rows.push_back(row);
  }
  return rows;
}

std::string field(const std::string& row, const std::string& key) {
  std::size_t at = 0;
  return value_of(row, key, at);
}

/// What a call takes at each place of one axis: usually, and now and then.
struct Sweep {
  std::string name;
  std::size_t axis = sm_axis;
  std::vector<double> usual{}, slow{};

  double best() const { return *std::min_element(usual.begin(), usual.end()); }
  int size() const { return static_cast<int>(usual.size()); }
};

/// By numbers of SMs, at most `most`, ascending: calls on GPUs.
std::vector<Sweep> sm_sweeps(int most) {
  std::vector<Sweep> sweeps;
  for (const char* file : {"2xh200_exchange.json", "4xh200_exchange.json"}) {
    std::map<std::string, std::map<int, std::pair<double, double>>> times;
    for (const std::string& row : rows_of(results_of(file))) {
      const int num_sms = std::stoi(field(row, "sms"));
      if (num_sms == 0 || num_sms > most || field(row, "name") == "plan") continue;
      const std::string name = file + (" " + field(row, "name")) + " " + field(row, "dtype");
      times[name][num_sms] = {std::stod(field(row, "p50_us")), std::stod(field(row, "p95_us"))};
    }
    for (const auto& [name, by_sms] : times) {
      Sweep sweep{name};
      for (const auto& [num_sms, us] : by_sms) {
        sweep.usual.push_back(us.first * 1e-6);
        sweep.slow.push_back(us.second * 1e-6);
      }
      sweeps.push_back(sweep);
    }
  }
  return sweeps;
}

/// Direct and hierarchical, between hosts.
std::vector<Sweep> crossing_sweeps() {
  std::vector<Sweep> sweeps;
  for (const char* file : {"2core_hosts_crossing.json", "2core_hosts_crossing_threes.json"}) {
    const std::string text = results_of(file);
    std::size_t at = 0;
    for (std::string ms = value_of(text, "dispatch_ms", at); !ms.empty();
         ms = value_of(text, "dispatch_ms", at)) {
      Sweep sweep{file + (" " + std::to_string(sweeps.size())), crossing_axis};
      sweep.usual = {std::stod(ms) / 1e3, std::stod(value_of(text, "dispatch_ms", at)) / 1e3};
      sweep.slow = sweep.usual;
      sweeps.push_back(sweep);
    }
  }
  return sweeps;
}

/// Calls until the search settles. Every third takes as long as a slow one; what a call took is
/// known when the next one has begun, as in a group.
TuningSearch replay(const Sweep& sweep, int start) {
  TuningGrid grid;
  grid.sizes[sweep.axis] = sweep.size();
  grid.start[sweep.axis] = start;
  TuningSearch search(grid);
  TuningPlace last = search.next();
  for (int call = 1; !search.settled() && call <= 100; ++call) {
    const TuningPlace now = search.next();
    const auto at = static_cast<std::size_t>(last[sweep.axis]);
    search.observe(last, call % 3 == 0 ? sweep.slow[at] : sweep.usual[at]);
    last = now;
  }
  return search;
}

void expect_little_regret(const std::vector<Sweep>& sweeps) {
  for (const Sweep& sweep : sweeps) {
    for (int start = 0; start < sweep.size(); ++start) {
      const TuningSearch search = replay(sweep, start);
      const auto at = static_cast<std::size_t>(search.best()[sweep.axis]);
      EXPECT_TRUE(search.settled()) << sweep.name << " from " << start;
      EXPECT_LE(search.probes(), 30) << sweep.name << " from " << start;
      EXPECT_LE(sweep.usual[at], kRegret * sweep.best()) << sweep.name << " from " << start;
    }
  }
}

TEST(TuningSearch, RecordedSweepsOfSmsWithinBounds) {
  const auto sweeps = sm_sweeps(24);
  ASSERT_GE(sweeps.size(), 20u);
  expect_little_regret(sweeps);
}

TEST(TuningSearch, RecordedSweepsOfAllSms) {
  expect_little_regret(sm_sweeps(64));
}

TEST(TuningSearch, RecordedCrossings) {
  const auto sweeps = crossing_sweeps();
  ASSERT_GE(sweeps.size(), 28u);
  expect_little_regret(sweeps);
}

/// Calls of every setting, one by one, as `ferry bench --oracle` wrote them: of one kind of calls.
struct RecordedCalls {
  TuningGrid grid{};
  std::map<TuningPlace, std::vector<double>> us{};

  double usual(const TuningPlace& place) const {
    std::vector<double> calls = us.at(place);
    const auto middle = calls.begin() + static_cast<std::ptrdiff_t>(calls.size() / 2);
    std::nth_element(calls.begin(), middle, calls.end());
    return *middle;
  }
};

std::map<std::string, RecordedCalls> recorded_calls() {
  const std::string text = results_of("2core_tuner_calls.json");
  std::map<std::string, RecordedCalls> all;
  for (std::size_t at = text.find("\"us\": ["); at != std::string::npos;
       at = text.find("\"us\": [", at + 1)) {
    std::size_t entry = text.rfind("\"call\"", at), setting = text.rfind('{', at);
    RecordedCalls& calls = all[value_of(text, "call", entry)];
    TuningPlace place{};
    std::size_t crossing = setting;
    place[chunk_axis] = std::bit_width(std::stoul(value_of(text, "chunk_bytes", setting)) >> 17);
    place[crossing_axis] = value_of(text, "crossing", crossing) == "direct" ? 1 : 0;
    std::vector<double>& us = calls.us[place];
    std::size_t digit = at + 7;
    for (const std::size_t end = text.find(']', at); digit < end;) {
      std::size_t read = 0;
      us.push_back(std::stod(text.substr(digit + 1, 40), &read));
      digit = text.find_first_of(",]", digit + 1);
    }
    for (std::size_t axis = 0; axis < kTuningAxes; ++axis) {
      calls.grid.sizes[axis] = std::max(calls.grid.sizes[axis], place[axis] + 1);
    }
    calls.grid.start[chunk_axis] = 2;
  }
  return all;
}

/// What searches lose, of the usual time of the best place.
struct Regrets {
  double mean = 0;
  double beyond = 0;  ///< share that loses more than 3 %

  template <class Usual, class Draw>
  static Regrets of(const TuningGrid& grid, double best, const Usual& usual, const Draw& draw) {
    constexpr int kSearches = 800;
    Regrets made;
    for (int i = 0; i < kSearches; ++i) {
      TuningSearch search(grid);
      for (TuningPlace last = search.next(); !search.settled();) {  // known one call late
        const TuningPlace now = search.next();
        search.observe(last, draw(last));
        last = now;
      }
      EXPECT_LE(search.probes(), 30);
      const double regret = usual(search.best()) / best - 1;
      made.mean += regret / kSearches;
      made.beyond += (regret > kRegret - 1) / double{kSearches};
    }
    return made;
  }
};

/// What settings usually take is as recorded; calls vary by chance.
TEST(TuningSearch, LosesLittleWhereCallsVary) {
  std::mt19937 random(kTunerSeed);
  std::normal_distribution<double> normal;
  std::exponential_distribution<double> tail(10);
  std::uniform_real_distribution<double> uniform;
  const std::map<std::string, std::function<double()>> kinds{
      {"3 % each way", [&] { return std::exp(0.03 * normal(random)); }},
      {"8 % each way", [&] { return std::exp(0.08 * normal(random)); }},
      {"10 % longer", [&] { return 1 + tail(random); }},
      {"a fifth 1.3 to 2 times as long", [&] {
         return uniform(random) < 0.2 ? 1.3 + 0.7 * uniform(random) : 1 + 0.3 * tail(random);
       }}};
  for (const auto& [name, calls] : recorded_calls()) {
    double best = 1e9;
    for (const auto& [place, us] : calls.us) best = std::min(best, calls.usual(place));
    const auto usual = [&, &calls = calls](const TuningPlace& place) { return calls.usual(place); };
    for (const auto& [kind, noise] : kinds) {
      const Regrets regrets = Regrets::of(calls.grid, best, usual, [&](const TuningPlace& place) {
        return usual(place) * noise();
      });
      EXPECT_LE(regrets.mean, 0.01) << name << ", " << kind;
      EXPECT_LE(regrets.beyond, 0.15) << name << ", " << kind;
    }
  }
}

TEST(TuningSearch, TakesTheFewestSmsThatCostThreePercent) {
  const Sweep sweep{"made", sm_axis, {2.0, 1.04, 1.025, 1.0, 1.0}, {2.0, 1.04, 1.025, 1.0, 1.0}};
  for (int start = 0; start < sweep.size(); ++start) {
    EXPECT_EQ(replay(sweep, start).best()[sm_axis], 2) << start;
  }
}

TEST(TuningSearch, StaysWhereNothingIsBetterByMuch) {
  Sweep sweep{"made", chunk_axis, {0.98, 1.0, 0.985, 0.99, 1.0}, {}};
  sweep.slow = sweep.usual;
  EXPECT_EQ(replay(sweep, 1).best()[chunk_axis], 1);
}

TEST(TuningSearch, BeginsAgainWhenTimesShift) {
  TuningGrid grid;
  grid.sizes[sm_axis] = 6;
  TuningSearch search(grid);
  std::mt19937 random(kTunerSeed);
  std::uniform_real_distribution<double> noise(1, 1.02);
  const auto run = [&](int calls, int fastest) {
    for (int call = 0; call < calls; ++call) {
      const int away = std::abs(search.next()[sm_axis] - fastest);
      search.observe(search.next(), (1 + 0.5 * away) * noise(random));
    }
  };
  run(100, 4);
  EXPECT_EQ(search.best()[sm_axis], 4);
  run(1000, 4);
  EXPECT_EQ(search.restarts(), 0);  // noise alone does not
  run(200, 1);
  EXPECT_EQ(search.restarts(), 1);
  EXPECT_EQ(search.best()[sm_axis], 1);
  EXPECT_TRUE(search.settled());
}

TEST(TuningSearch, OneSlowCallDoesNotCount) {
  TuningGrid grid;
  grid.sizes[chunk_axis] = 2;
  TuningSearch search(grid);
  int calls = 0;
  while (!search.settled()) {
    const bool second = search.next()[chunk_axis] == 1;
    search.observe(search.next(), ++calls == 5 ? 100 : second ? 1 : 2);
  }
  EXPECT_EQ(search.best()[chunk_axis], 1);
}

TuningKey key_of(CallKind call, bool any_crossing) {
  return {call, Dtype::bf16, RowOrder::rank_major, 7168, 12, false, Crossing::direct,
          true, any_crossing};
}

TEST(ExchangeTuner, NeverChangesTheCrossingWhereBitsWould) {
  for (const bool any : {false, true}) {
    ExchangeTuner tuner(8);
    const TuningKey key = key_of(any ? CallKind::dispatch : CallKind::combine, any);
    bool other = false;
    for (int call = 0; call < 50; ++call) {
      const CallSettings settings = tuner.next(key);
      other = other || settings.crossing != key.crossing;
      tuner.observe(key, settings, 4096, 1);
    }
    EXPECT_EQ(other, any);
  }
}

TEST(ExchangeTuner, StartsFromTheEntryThatSaysMost) {
  TunedCall any{.call = "dispatch"}, fits{.call = "dispatch", .ranks = 8, .tokens = 5000};
  any.num_sms = 20;
  fits.num_sms = 12;
  fits.chunk_bytes = 1 << 20;
  TunedCall other = fits;
  other.ranks = 16;
  other.num_sms = 2;
  ExchangeTuner tuner(8, {any, fits, other}, 4, 24);
  TuningKey key = key_of(CallKind::dispatch, false);
  EXPECT_EQ(tuner.next(key), (CallSettings{Crossing::direct, 1 << 20, 12}));
  key.tokens_class = 3;
  EXPECT_EQ(tuner.next(key).num_sms, 20);
  key.dtype = Dtype::f32;
  EXPECT_EQ(tuner.next(key).num_sms, 24);  // no entry: the most
}

TEST(ExchangeTuner, KeepsToAStartThatIsSettled) {
  TunedCall start{.call = "dispatch", .crossing = Crossing::hierarchical, .chunk_bytes = 1 << 20};
  start.settled = true;
  ExchangeTuner tuner(8, {start});
  const TuningKey key = key_of(CallKind::dispatch, true);
  for (int call = 0; call < 60; ++call) {
    const CallSettings settings = tuner.next(key);
    EXPECT_EQ(settings, (CallSettings{Crossing::hierarchical, 1 << 20, 0}));
    tuner.observe(key, settings, 4096, call < 9 ? 1 : 5);
  }
  EXPECT_DOUBLE_EQ(tuner.tuned().front().seconds, 1);
}

TEST(ExchangeTuner, KeepsToTheBoundsOfSms) {
  ExchangeTuner tuner(8, {}, 3, 10);
  const TuningKey key = key_of(CallKind::dispatch, false);
  for (int call = 0; call < 60; ++call) {
    const CallSettings settings = tuner.next(key);
    EXPECT_GE(settings.num_sms, 3);
    EXPECT_LE(settings.num_sms, 10);
    tuner.observe(key, settings, 4096, settings.num_sms);
  }
  EXPECT_EQ(tuner.tuned().front().num_sms, 3);
  EXPECT_TRUE(tuner.tuned().front().settled);
}

TEST(ExchangeTuner, SaysWhy) {
  ExchangeTuner tuner(8);
  const TuningKey key = key_of(CallKind::combine, false);
  const auto run = [&](int calls, std::int64_t fastest) {
    for (int call = 0; call < calls; ++call) {
      const CallSettings settings = tuner.next(key);
      const double away = static_cast<double>(settings.chunk_bytes) / static_cast<double>(fastest);
      tuner.observe(key, settings, 4096, away > 1 ? away : 1 / away);
    }
    return tuner.tuned().front().why;
  };
  EXPECT_NE(run(3, 1 << 20).find("searching: 2 of at most 30"), std::string::npos);
  EXPECT_NE(run(40, 1 << 20).find("75 % less time than what the model"), std::string::npos);
  // From the other end of the grid; where the model would begin was not timed again.
  const std::string again = run(200, 2 << 20);
  EXPECT_EQ(again.rfind("better than its neighbours", 0), 0u) << again;
  EXPECT_NE(again.find("begun again, as times had shifted"), std::string::npos) << again;
}

// A kind of calls has between n and 2n tokens: that more take longer is no other time.
TEST(ExchangeTuner, TokensOfAKindMayDiffer) {
  ExchangeTuner tuner(8);
  const TuningKey key = key_of(CallKind::combine, false);
  std::mt19937 random(kTunerSeed);
  for (int call = 0; call < 500; ++call) {
    const auto tokens = static_cast<std::int64_t>(4096 + random() % 4096);
    tuner.observe(key, tuner.next(key), tokens, 1e-6 * static_cast<double>(tokens));
  }
  const TunedCall tuned = tuner.tuned().front();
  EXPECT_TRUE(tuned.settled);
  EXPECT_EQ(tuned.chunk_bytes, 256 << 10);
  EXPECT_NEAR(tuned.seconds, 4096e-6, 1e-9);
  EXPECT_EQ(tuned.why.find("begun again"), std::string::npos);
}

}  // namespace
}  // namespace ferry
