// ferry plan: how long exchanges would take on a cluster that is described, and what they wait for.
#include <fmt/format.h>
#include <fmt/ranges.h>

#include <algorithm>
#include <cstdio>
#include <fstream>
#include <map>
#include <memory>
#include <nlohmann/json.hpp>
#include <stdexcept>
#include <string>
#include <vector>

#include "command.hpp"
#include "ferry/exchange_model.hpp"

namespace ferry::cli {
namespace {

using nlohmann::json;

/// Rates in GB/s of one GPU, times in µs. Fitted: to bench/published/figures.csv
/// (docs/planning.md).
const std::map<std::string, const char*> kClusters{
    {"h800", R"({"host_ranks": 8, "nvlink": 134, "nic": 43.5,
                 "source": "fitted to DeepEP 1.2.1, EP8 and EP32"})"}};

const std::map<std::string, const char*> kModels{
    {"deepseek-v3", R"({"hidden": 7168, "experts": 256, "topk": 8, "most_hosts": 4})"},
    {"qwen3-235b", R"({"hidden": 4096, "experts": 128, "topk": 8})"},
    {"kimi-k2", R"({"hidden": 7168, "experts": 384, "topk": 8})"},
    {"gpt-oss-120b", R"({"hidden": 2880, "experts": 128, "topk": 4})"}};

struct PlanOptions {
  std::string cluster = "h800";
  std::string model = "deepseek-v3";
  std::vector<int> ranks{8, 16, 32, 64, 128, 256};
  double tokens = 4096;
  bool as_json = false;
};

/// A preset, or a file of the same form.
json described(const std::string& name, const std::map<std::string, const char*>& presets,
               const char* option, const std::vector<std::string>& keys) {
  json found;
  if (const auto preset = presets.find(name); preset != presets.end()) {
    found = json::parse(preset->second);
  } else {
    std::ifstream in(name);
    if (!in) {
      std::string names;
      for (const auto& [known, text] : presets) names += (names.empty() ? "" : ", ") + known;
      throw std::runtime_error(
          fmt::format("{}: {} is no file that can be read, and none of {}", option, name, names));
    }
    try {
      found = json::parse(in, nullptr, true, true);
    } catch (const json::exception& error) {
      throw std::runtime_error(fmt::format("{} {}: {}", option, name, error.what()));
    }
  }
  if (!found.is_object()) throw std::runtime_error(fmt::format("{} {}: no object", option, name));
  for (const auto& [key, value] : found.items()) {
    if (key == "source") continue;
    if (std::find(keys.begin(), keys.end(), key) == keys.end()) {
      throw std::runtime_error(fmt::format("{} {}: unknown key {}; known are {}", option, name, key,
                                           fmt::join(keys, ", ")));
    }
    if (!value.is_number() || value.get<double>() < 0) {
      throw std::runtime_error(fmt::format("{} {}: {} is {}, expected a number, not below 0",
                                           option, name, key, value.dump()));
    }
  }
  return found;
}

ExchangeRates rates_of(const json& cluster) {
  const auto rate = [&](const char* key, const char* other) {
    const double value = cluster.value(key, cluster.value(other, 0.0));
    return value > 0 ? value * 1e9 : ExchangeRates::kUnknown;
  };
  ExchangeRates rates;
  rates.latency_s = cluster.value("latency_us", 0.0) * 1e-6;
  rates.message_s = cluster.value("message_us", 0.0) * 1e-6;
  rates.copy = rate("copy", "copy");
  rates.nvlink_out = rate("nvlink_out", "nvlink");
  rates.nvlink_in = rate("nvlink_in", "nvlink");
  rates.nic_out = rate("nic_out", "nic");
  rates.nic_in = rate("nic_in", "nic");
  rates.staging = rate("staging", "staging");
  rates.leaf_hosts = cluster.value("leaf_hosts", 0);
  rates.oversubscription = cluster.value("oversubscription", 1.0);
  return rates;
}

json planned(const PlanOptions& options) {
  const json cluster = described(
      options.cluster, kClusters, "--cluster",
      {"host_ranks", "latency_us", "message_us", "copy", "nvlink", "nvlink_out", "nvlink_in", "nic",
       "nic_out", "nic_in", "staging", "leaf_hosts", "oversubscription"});
  const json model =
      described(options.model, kModels, "--model", {"hidden", "experts", "topk", "most_hosts"});
  const ExchangeRates rates = rates_of(cluster);
  json rows = json::array();
  for (const int ranks : options.ranks) {
    if (ranks > model.value("experts", 1)) {
      throw std::runtime_error(fmt::format("--ranks: {} ranks, but {} has {} experts", ranks,
                                           options.model, model.value("experts", 1)));
    }
    for (const bool combine : {false, true}) {
      ExchangeShape shape;
      shape.ranks = ranks;
      shape.host_ranks = std::max(1, cluster.value("host_ranks", 8));
      shape.tokens = options.tokens;
      shape.topk = std::max(1, model.value("topk", 8));
      shape.most_hosts = model.value("most_hosts", 0);
      const double hidden = model.value("hidden", 0);
      shape.row_bytes = combine ? hidden * 2 : hidden + hidden / 128 * 4;
      const ExchangeTime direct = exchange_time(uniform_bytes(shape, rates), rates);
      shape.hierarchical = true;
      const ExchangeBytes bytes = uniform_bytes(shape, rates);
      const ExchangeTime by_rail = exchange_time(bytes, rates);
      const bool choose = by_rail.seconds() < direct.seconds();
      rows.push_back({{"ranks", ranks},
                      {"operation", combine ? "combine bf16" : "dispatch e4m3"},
                      {"direct_us", direct.seconds() * 1e6},
                      {"hierarchical_us", by_rail.seconds() * 1e6},
                      {"crossing", choose ? "hierarchical" : "direct"},
                      {"bottleneck", (choose ? by_rail : direct).bottleneck()},
                      {"received_bytes", bytes.copy}});
    }
  }
  return rows;
}

int plan(const PlanOptions& options) {
  const json rows = planned(options);
  if (options.as_json) {
    fmt::print("{}\n", rows.dump(2));
    return 0;
  }
  fmt::print("{:>6}  {:<14} {:>10} {:>16}  {:<13} {:<13} {:>11}\n", "ranks", "operation",
             "direct us", "hierarchical us", "crossing", "waits for", "received MB");
  for (const json& row : rows) {
    fmt::print("{:>6}  {:<14} {:>10.0f} {:>16.0f}  {:<13} {:<13} {:>11.1f}\n",
               row["ranks"].get<int>(), row["operation"].get<std::string>(),
               row["direct_us"].get<double>(), row["hierarchical_us"].get<double>(),
               row["crossing"].get<std::string>(), row["bottleneck"].get<std::string>(),
               row["received_bytes"].get<double>() / 1e6);
  }
  return 0;
}

}  // namespace

void add_plan(CLI::App& app, int& exit_code) {
  auto options = std::make_shared<PlanOptions>();
  CLI::App* command = app.add_subcommand(
      "plan", "Predict how long exchanges take on a cluster, with uniform routes");
  command->add_option("--cluster", options->cluster,
                      "h800, or a JSON file: rates of one GPU in GB/s, times in us");
  command->add_option("--model", options->model,
                      "deepseek-v3, qwen3-235b, kimi-k2, gpt-oss-120b, or a JSON file");
  command->add_option("--ranks", options->ranks, "Numbers of ranks, with commas between")
      ->delimiter(',')
      ->check(CLI::PositiveNumber)
      ->multi_option_policy(CLI::MultiOptionPolicy::TakeAll);
  command->add_option("--tokens", options->tokens, "Tokens of a rank")->check(CLI::PositiveNumber);
  command->add_flag("--json", options->as_json, "Print JSON");
  command->footer("What the prediction is worth: docs/planning.md.");
  command->callback([options, &exit_code] { exit_code = plan(*options); });
}

}  // namespace ferry::cli
