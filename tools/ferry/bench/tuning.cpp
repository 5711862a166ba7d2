#include "bench/tuning.hpp"

#include <fmt/format.h>

#include <algorithm>
#include <cmath>
#include <fstream>
#include <nlohmann/json.hpp>
#include <stdexcept>

#include "bench/report.hpp"
#include "ferry/group.hpp"

namespace ferry::cli {
namespace {

using nlohmann::json;

std::vector<double> ascending(std::vector<double> values) {
  std::sort(values.begin(), values.end());
  return values;
}

bool is_faster(const SettingTimes& one, const SettingTimes& other) {
  return one.middle() < other.middle();
}

/// How many times as long as the fastest setting this one takes, in the middle of all rounds, each
/// against the setting that the other rounds call the fastest: chance does not name it and measure
/// it at once. All have as many rounds.
double regret_apart(const SettingTimes& own, const std::vector<SettingTimes>& times) {
  std::vector<double> ratios;
  for (std::size_t round = 0; round < own.seconds.size(); ++round) {
    std::vector<SettingTimes> others = times;
    for (SettingTimes& one : others) {
      one.seconds.erase(one.seconds.begin() + static_cast<std::ptrdiff_t>(round));
    }
    const auto fastest = std::min_element(others.begin(), others.end(), is_faster);
    const auto& there = times[static_cast<std::size_t>(fastest - others.begin())].seconds;
    ratios.push_back(own.seconds[round] / there[round]);
  }
  return percentile(ascending(ratios), 0.5) - 1;
}

/// What a call's settings lose against the fastest of all that were measured; null: they were not.
json loss_of(const TunedCall& tuned, const std::vector<SettingTimes>& all) {
  std::vector<SettingTimes> times;
  for (const SettingTimes& one : all) {
    if (one.call == tuned.call && !tuned.first) times.push_back(one);
  }
  const auto own = std::find_if(times.begin(), times.end(), [&](const SettingTimes& one) {
    return one.crossing == tuned.crossing && one.chunk_bytes == tuned.chunk_bytes;
  });
  if (own == times.end()) return nullptr;
  const auto [fastest, slowest] = std::minmax_element(times.begin(), times.end(), is_faster);
  json loss{{"settings", times.size()},
            {"us", own->middle() * 1e6},
            {"fastest_us", fastest->middle() * 1e6},
            {"fastest_spread", fastest->spread()},
            {"slowest_us", slowest->middle() * 1e6},
            {"fastest_crossing", ferry::name_of(fastest->crossing)},
            {"fastest_chunk_bytes", fastest->chunk_bytes},
            {"regret", own->middle() / fastest->middle() - 1}};
  for (const SettingTimes& one : times) {
    json& calls = loss["calls_us"].emplace_back(
        json{{"crossing", ferry::name_of(one.crossing)}, {"chunk_bytes", one.chunk_bytes}});
    for (const double us : one.calls_us) calls["us"].push_back(std::round(us * 10) / 10);
  }
  if (own->seconds.size() > 2) loss["regret_apart"] = regret_apart(*own, times);
  return loss;
}

}  // namespace

double SettingTimes::middle() const {
  return percentile(ascending(seconds), 0.5);
}

double SettingTimes::spread() const {
  const std::vector<double> all = ascending(seconds);
  return (percentile(all, 0.75) - percentile(all, 0.25)) / middle();
}

std::vector<TunedCall> kept_settings(Dtype dispatch, Dtype combine, Crossing crossing,
                                     std::int64_t chunk_bytes) {
  TunedCall kept;
  kept.crossing = crossing;
  kept.chunk_bytes = chunk_bytes;
  kept.settled = true;
  std::vector<TunedCall> calls(2, kept);
  calls[0].call = "dispatch";
  calls[0].dtype = dispatch;
  calls[1].call = "combine";
  calls[1].dtype = combine;
  return calls;
}

void add_times(std::vector<SettingTimes>& all, const std::vector<TunedCall>& tuned,
               const std::map<std::string, std::vector<double>>& calls_us) {
  for (const TunedCall& call : tuned) {
    if (call.first || !(call.seconds > 0)) continue;
    auto at = std::find_if(all.begin(), all.end(), [&](const SettingTimes& one) {
      return one.call == call.call && one.crossing == call.crossing &&
             one.chunk_bytes == call.chunk_bytes;
    });
    if (at == all.end()) at = all.insert(at, {call.call, call.crossing, call.chunk_bytes});
    at->seconds.push_back(call.seconds);
    const std::vector<double>& each = calls_us.at(call.call);
    at->calls_us.insert(at->calls_us.end(), each.begin(), each.end());
  }
}

void write_tuning(const std::string& file, const std::vector<TunedCall>& calls,
                  const std::vector<SettingTimes>& times) {
  json entries = json::array();
  for (const TunedCall& one : calls) {
    const bool expert_major = one.order == RowOrder::expert_major;
    entries.push_back({{"ranks", one.ranks},
                       {"call", one.call},
                       {"dtype", ferry::name_of(one.dtype)},
                       {"order", expert_major ? "expert_major" : "rank_major"},
                       {"hidden", one.hidden},
                       {"tokens", one.tokens},
                       {"first", one.first},
                       {"mode", "throughput"},
                       {"crossing", ferry::name_of(one.crossing)},
                       {"chunk_bytes", one.chunk_bytes},
                       {"us", one.seconds * 1e6},
                       {"probes", one.probes},
                       {"settled", one.settled},
                       {"why", one.why}});
    if (one.num_sms > 0) entries.back()["num_sms"] = one.num_sms;
    if (json loss = loss_of(one, times); !loss.is_null()) entries.back()["oracle"] = loss;
  }
  std::ofstream out(file);
  out << json{{"format", 1}, {"program", "ferry bench"}, {"entries", entries}}.dump(2) << '\n';
  if (!out.flush()) throw std::runtime_error(fmt::format("--tune: {} cannot be written", file));
}

std::string tuning_table(const std::string& file) {
  std::ifstream in(file);
  std::string text = "\nTuned:\n";
  std::string losses;
  const json tuned = json::parse(in);
  for (const json& one : tuned.at("entries")) {
    const std::string call = one["call"].get<std::string>() + (one["first"] ? ", first" : "");
    const auto line = [&](const std::string& crossing, int chunk_bytes) {
      return fmt::format("{:<16} {:<5} {:<13} {:>5} KiB  ", call, one["dtype"].get<std::string>(),
                         crossing, chunk_bytes / 1024);
    };
    const std::string why = one["why"].get<std::string>() + '\n';
    if (one.contains("num_sms")) {
      text += fmt::format("{:<16} {:<5} {:<12} {:>7} tokens {:>3} SMs  {}", call,
                          one["dtype"].get<std::string>(), one["order"].get<std::string>(),
                          one["tokens"].get<int>(), one["num_sms"].get<int>(), why);
      continue;
    }
    text += line(one["crossing"], one["chunk_bytes"]) + why;
    if (!one.contains("oracle")) continue;
    const json& loss = one["oracle"];
    const auto number = [&](const char* key) { return loss[key].get<double>(); };
    losses += line(loss["fastest_crossing"], loss["fastest_chunk_bytes"]) +
              fmt::format(
                  "{:.0f} us (+- {:.1f} %), the slowest {:.0f}; tuned after {} calls: {:.0f}, "
                  "regret {:.1f} %{}\n",
                  number("fastest_us"), 50 * number("fastest_spread"), number("slowest_us"),
                  one["probes"].get<int>(), number("us"), 100 * number("regret"),
                  loss.contains("regret_apart")
                      ? fmt::format(", {:+.1f} % against what other rounds call the fastest",
                                    100 * number("regret_apart"))
                      : "");
  }
  return losses.empty() ? text : text + "\nFastest of all settings:\n" + losses;
}

}  // namespace ferry::cli
