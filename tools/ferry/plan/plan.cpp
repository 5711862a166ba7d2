// ferry plan: how long exchanges would take on a cluster that is described, their bottlenecks, and
// whether the model fits.
#include <fmt/format.h>
#include <fmt/ranges.h>

#include <algorithm>
#include <cmath>
#include <cstdio>
#include <fstream>
#include <memory>
#include <nlohmann/json.hpp>
#include <optional>
#include <stdexcept>
#include <string>
#include <vector>

#include "bench/plot.hpp"
#include "command.hpp"
#include "number.hpp"
#include "plan/balance.hpp"
#include "plan/predict.hpp"

namespace ferry::cli {
namespace {

using nlohmann::json;

struct PlanOptions {
  std::string cluster = "h800";
  std::string model = "deepseek-v3";
  std::string mode = "throughput";
  std::vector<int> ranks{};  ///< none: those of usual_ranks
  int copies = 1;
  bool beside = false;
  double tokens = 0;  ///< 0: that of the mode
  std::vector<int> sms{1, 24};
  double reserve_gb = 0;
  std::string routes;
  int balance = 0;  ///< slots of a rank; 0: not asked for
  int copy_rows = 16;
  std::string tuning;
  std::string plot;
  std::string show;
  bool as_json = false;
};

/// What is said of one number of ranks.
struct Planned {
  Load load{};
  Memory memory{};
  double memory_bytes = 0;
  double limit_bytes = 0;  ///< 0: not known
  std::vector<Predicted> calls{};
  std::optional<BalanceGain> balance{};

  bool fits() const { return limit_bytes == 0 || memory_bytes <= limit_bytes; }
};

Load load_of(const PlanOptions& options, const RecordedRoutes* routes, int ranks) {
  Load load;
  load.ranks = ranks;
  load.copies = options.copies;
  load.latency = options.mode == "latency";
  load.beside = options.beside;
  load.routes = routes;
  const double usual = routes != nullptr ? routes->mean_tokens() : load.latency ? 128 : 4096;
  load.tokens = options.tokens > 0 ? options.tokens : usual;
  load.fewest_sms = options.sms.front();
  load.most_sms = options.sms.back();
  return load;
}

std::vector<Planned> planned(const PlanOptions& options, const Described& cluster,
                             const Described& model, const RecordedRoutes* routes) {
  std::vector<Planned> all;
  const double experts = model.number("experts", 1) * options.copies;
  for (const int ranks : options.ranks) {
    check_ranks(cluster, model, ranks, options.copies);
    Planned made;
    made.load = load_of(options, routes, ranks);
    made.memory = memory_of(cluster, model, made.load);
    if (options.reserve_gb > 0) made.memory.emplace_back("reserve", options.reserve_gb * 1e9);
    for (const auto& [name, bytes] : made.memory) made.memory_bytes += bytes;
    made.limit_bytes = cluster.number("memory_gb", 0) * 1e9;
    made.calls = predicted(cluster, model, made.load);
    if (options.balance > 0) {
      if (std::fmod(experts, ranks) != 0) {
        throw std::runtime_error(
            fmt::format("--balance: {:.0f} experts on {} ranks; expected as many experts on each",
                        experts, ranks));
      }
      made.balance =
          gain_of_balance(*routes, ranks,
                          {.slots = options.balance,
                           .copies = options.copies,
                           .domain_size = static_cast<int>(cluster.number("host_ranks", 8)),
                           .copy_rows = options.copy_rows});
    }
    all.push_back(made);
  }
  return all;
}

const char* crossing_of(const Planned& made, const Predicted& call, const Described& cluster) {
  if (made.load.ranks <= cluster.number("host_ranks", 8)) return "-";
  return call.hierarchical ? "hierarchical" : "direct";
}

json phases_us(const ExchangeTime& time) {
  json phases;
  for (const auto& [name, seconds] : time.phases()) phases[name] = seconds * 1e6;
  return phases;
}

json as_json(const BalanceGain& gain) {
  return {{"before", gain.before}, {"worst_before", gain.worst_before},
          {"after", gain.after},   {"worst_after", gain.worst_after},
          {"copies", gain.copies}, {"fetched", gain.fetched}};
}

json as_json(const std::vector<Planned>& all, const Described& cluster) {
  json rows = json::array();
  for (const Planned& made : all) {
    json memory;
    for (const auto& [name, bytes] : made.memory) memory[name] = bytes;
    for (const Predicted& call : made.calls) {
      rows.push_back({{"ranks", made.load.ranks},
                      {"call", call.call},
                      {"dtype", call.dtype},
                      {"tokens", made.load.tokens},
                      {"mode", made.load.latency ? "latency" : "throughput"},
                      {"direct_us", call.direct_s * 1e6},
                      {"hierarchical_us", call.hierarchical_s * 1e6},
                      {"us", call.likely_s() * 1e6},
                      {"low_us", call.seconds.low * 1e6},
                      {"high_us", call.seconds.high * 1e6},
                      {"crossing", crossing_of(made, call, cluster)},
                      {"bottleneck", call.bottleneck},
                      {"phases_us", phases_us(call.phases)},
                      {"num_sms", call.num_sms},
                      {"received_bytes", call.received_bytes},
                      {"memory_bytes", memory},
                      {"fits", made.fits()}});
      if (made.balance) rows.back()["balance"] = as_json(*made.balance);
    }
  }
  return rows;
}

void print_times(const std::vector<Planned>& all, const Described& cluster) {
  fmt::print("{:>6}  {:<14} {:>8} {:>15}  {:<13} {:<12} {:>4} {:>12}\n", "ranks", "call", "us",
             "90 % within", "crossing", "bottleneck", "SMs", "received MB");
  for (const Planned& made : all) {
    for (const Predicted& call : made.calls) {
      fmt::print("{:>6}  {:<14} {:>8.0f} {:>15}  {:<13} {:<12} {:>4} {:>12.1f}\n", made.load.ranks,
                 call.call + " " + call.dtype, call.likely_s() * 1e6,
                 fmt::format("{:.0f} - {:.0f}", call.seconds.low * 1e6, call.seconds.high * 1e6),
                 crossing_of(made, call, cluster), call.bottleneck,
                 call.num_sms > 0 ? std::to_string(call.num_sms) : "-", call.received_bytes / 1e6);
    }
  }
}

/// Where half of all rows stay inside, the sources are further off than elsewhere.
void print_two_hosts(const std::vector<Planned>& all, const Described& cluster) {
  const double two = 2 * cluster.number("host_ranks", 8);
  if (std::none_of(all.begin(), all.end(), [&](const auto& p) { return p.load.ranks == two; })) {
    return;
  }
  fmt::print(
      "\nTwo hosts ({:.0f} ranks) are the least sure: others measured up to 20 % more or less than "
      "this model says, with more hosts 10 %.\n",
      two);
}

void print_memory(const std::vector<Planned>& all) {
  fmt::print("\nGB of a GPU:\n");
  for (const Planned& made : all) {
    std::vector<std::string> parts;
    for (const auto& [name, bytes] : made.memory) {
      parts.push_back(fmt::format("{} {:.1f}", name, bytes / 1e9));
    }
    const std::string limit =
        made.limit_bytes > 0 ? fmt::format(" of {:.0f}", made.limit_bytes / 1e9) : "";
    fmt::print("{:>6}  {:.1f}{}: {}{}\n", made.load.ranks, made.memory_bytes / 1e9, limit,
               fmt::join(parts, ", "), made.fits() ? "" : ". DOES NOT FIT");
  }
}

void print_balance(const std::vector<Planned>& all, int slots) {
  if (slots == 0) return;
  fmt::print("\nRows of the heaviest rank over the mean of all, with {} slots for copies a rank:\n",
             slots);
  fmt::print("{:>6}  {:>15} {:>15} {:>13} {:>26}\n", "ranks", "before (worst)", "after (worst)",
             "copies a call", "new, if weights stay");
  for (const Planned& made : all) {
    const BalanceGain& gain = *made.balance;
    fmt::print("{:>6}  {:>15} {:>15} {:>13.1f} {:>26.1f}\n", made.load.ranks,
               fmt::format("{:.2f} ({:.2f})", gain.before, gain.worst_before),
               fmt::format("{:.2f} ({:.2f})", gain.after, gain.worst_after), gain.copies,
               gain.fetched);
  }
}

/// The settings of what fits.
void write_tuning(const PlanOptions& options, const std::vector<Planned>& all,
                  const Described& cluster) {
  json entries = json::array();
  for (json& row : as_json(all, cluster)) {
    if (!row["fits"].get<bool>()) continue;
    for (const char* key : {"memory_bytes", "fits", "received_bytes", "phases_us", "balance"})
      row.erase(key);
    if (row["crossing"] == "-") row["crossing"] = "direct";
    entries.push_back(row);
  }
  const json file{{"format", 1},
                  {"program", "ferry plan"},
                  {"cluster", options.cluster},
                  {"model", options.model},
                  {"entries", entries}};
  std::ofstream out(options.tuning);
  out << file.dump(2) << '\n';
  if (!out.flush()) {
    throw std::runtime_error(fmt::format("--tuning: {} cannot be written", options.tuning));
  }
}

int show(const std::string& name) {
  for (const Kind kind : {Kind::cluster, Kind::model}) {
    const auto found = presets(kind).find(name);
    if (found == presets(kind).end()) continue;
    fmt::print("{}", found->second);
    return 0;
  }
  throw std::runtime_error(fmt::format("--show: no preset is called {}", name));
}

int plan(PlanOptions& options) {
  if (!options.show.empty()) return show(options.show);
  if (!may_write("plan", options.tuning) || !may_draw("plan", options.plot)) return 1;
  if (options.sms.size() != 2 || options.sms.front() > options.sms.back()) {
    throw std::runtime_error(fmt::format("--sms: got {}, expected two numbers, the fewest first",
                                         fmt::join(options.sms, ",")));
  }
  if (options.balance > 0 && options.routes.empty()) {
    throw std::runtime_error("--balance: no routes; expected --routes with what was recorded");
  }
  const Described cluster = Described::load(Kind::cluster, options.cluster);
  const Described model = Described::load(Kind::model, options.model);
  if (options.ranks.empty()) {
    const int experts = static_cast<int>(model.number("experts", 1)) * options.copies;
    options.ranks = usual_ranks(cluster, options.mode == "latency", experts);
  }
  RecordedRoutes recorded;
  if (!options.routes.empty()) recorded = routes_for(model, options.routes);
  const std::vector<Planned> all =
      planned(options, cluster, model, options.routes.empty() ? nullptr : &recorded);
  if (options.as_json) {
    fmt::print("{}\n", as_json(all, cluster).dump(2));
  } else {
    print_times(all, cluster);
    print_two_hosts(all, cluster);
    print_memory(all);
    print_balance(all, options.balance);
    const std::vector<std::string> assumed = cluster.assumed();
    if (!assumed.empty()) fmt::print("\nAssumed of the cluster: {}\n", fmt::join(assumed, ", "));
  }
  const bool fits = std::any_of(all.begin(), all.end(), [](const auto& p) { return p.fits(); });
  if (!fits) {
    const Planned& last = all.back();
    throw std::runtime_error(fmt::format(
        "{} does not fit: on {} ranks a GPU would hold {:.1f} GB, but has {:.0f}; "
        "take more ranks, or fewer --tokens or --copies",
        options.model, last.load.ranks, last.memory_bytes / 1e9, last.limit_bytes / 1e9));
  }
  if (!options.tuning.empty()) write_tuning(options, all, cluster);
  if (options.plot.empty()) return 0;
  const json plotted{
      {"cluster", options.cluster}, {"model", options.model}, {"entries", as_json(all, cluster)}};
  return draw_text(kPlanPlot, plotted.dump(), options.plot) ? 0 : 1;
}

std::string names_of(Kind kind) {
  std::vector<std::string> names;
  for (const auto& [name, text] : presets(kind)) names.push_back(name);
  return fmt::format("{}, or a YAML file", fmt::join(names, ", "));
}

}  // namespace

void add_plan(CLI::App& app, int& exit_code) {
  auto options = std::make_shared<PlanOptions>();
  CLI::App* command = app.add_subcommand(
      "plan", "Predict how long exchanges take on a cluster, with uniform routes");
  command->add_option("--cluster", options->cluster, names_of(Kind::cluster));
  command->add_option("--model", options->model, names_of(Kind::model));
  command->add_option("--mode", options->mode, "throughput or latency")
      ->check(CLI::IsMember({"throughput", "latency"}));
  command
      ->add_option("--ranks", options->ranks,
                   "Numbers of ranks, with commas between; else those that suit the cluster")
      ->delimiter(',')
      ->check(whole_number(1, kMostRanks))
      ->multi_option_policy(CLI::MultiOptionPolicy::TakeAll);
  command->add_option("--copies", options->copies, "Replicas of each expert")
      ->check(whole_number(1, 4096));
  command
      ->add_option("--tokens", options->tokens,
                   "Tokens of a rank; as recorded, or 4096, latency mode 128")
      ->check(whole_number(1, 1 << 20));
  command->add_flag("--beside-products", options->beside,
                    "Matrix products run on the other SMs meanwhile (`contention` of the cluster)");
  command->add_option("--sms", options->sms, "Fewest and most SMs of a call, as 1,24")
      ->delimiter(',')
      ->check(whole_number(1, 1024))
      ->multi_option_policy(CLI::MultiOptionPolicy::TakeAll);
  command
      ->add_option("--reserve-gb", options->reserve_gb,
                   "Of a GPU's memory, for activations and key-value caches")
      ->check(number_between(0, 1e6));
  command->add_option("--routes", options->routes,
                      "What Group.record_routes recorded, in place of uniform routes");
  command
      ->add_option("--balance", options->balance,
                   "Say what so many slots a rank for copies of busy experts would give (--routes)")
      ->check(whole_number(1, 1024));
  command->add_option("--copy-rows", options->copy_rows, "What a copy costs, in rows (--balance)")
      ->check(whole_number(0, 1 << 20));
  command->add_option("--tuning", options->tuning, "Write the settings to this JSON file");
  command
      ->add_option(
          "--plot", options->plot,
          "Draw times with their intervals, and how busy links are (python3 with matplotlib)")
      ->type_name("FILE");
  command->add_option("--show", options->show, "Print a preset, as the beginning of a file");
  command->add_flag("--json", options->as_json, "Print JSON");
  command->footer("What the prediction is worth: docs/planning.md.");
  command->callback([options, &exit_code] { exit_code = plan(*options); });
}

}  // namespace ferry::cli
