#include "plan/described.hpp"

#include <fmt/format.h>
#include <fmt/ranges.h>
#include <yaml-cpp/yaml.h>

#include <algorithm>
#include <cmath>
#include <filesystem>
#include <fstream>
#include <set>
#include <stdexcept>

namespace ferry::cli {
namespace {

const std::vector<std::string> kRates{"copy", "sm_copy", "nvlink", "nvlink_out", "nvlink_in",
                                      "nic",  "nic_out", "nic_in", "staging"};
const std::vector<std::string> kRateKeys{
    "latency_us", "few_latency_us", "few_token_us", "overlap",    "hidden_latency",   "message_us",
    "copy",       "sm_copy",        "nvlink",       "nvlink_out", "nvlink_in",        "nic",
    "nic_out",    "nic_in",         "staging",      "leaf_hosts", "oversubscription", "contention"};
const std::vector<std::string> kOperations{"dispatch", "combine", "latency_dispatch",
                                           "latency_combine"};

std::vector<std::string> keys_of(Kind kind) {
  if (kind == Kind::model) {
    return {"hidden",       "experts",          "topk",           "most_hosts", "moe_layers",
            "intermediate", "other_parameters", "parameter_bytes"};
  }
  std::vector<std::string> keys{"host_ranks", "memory_gb", "sms"};
  keys.insert(keys.end(), kRateKeys.begin(), kRateKeys.end());
  return keys;
}

bool one_of(const std::vector<std::string>& all, const std::string& word) {
  return std::find(all.begin(), all.end(), word) != all.end();
}

/// A word of the file, fit for a message.
std::string shown(const std::string& word) {
  constexpr std::size_t kMost = 40;
  std::string made = word.substr(0, kMost);
  for (char& one : made) one = one >= ' ' && one <= '~' ? one : '?';
  return made + (word.size() > kMost ? "..." : "");
}

/// Throws with the place.
[[noreturn]] void refuse(const std::string& file, const YAML::Node& node, const std::string& what) {
  throw std::runtime_error(fmt::format("{}, line {}: {}", file, node.Mark().line + 1, what));
}

/// What may stand in a file or a section.
std::string known_keys(const std::vector<std::string>& keys,
                       const std::vector<std::string>& sections) {
  std::string known = fmt::format("known are {}", fmt::join(keys, ", "));
  if (!sections.empty()) known += fmt::format(", and the sections {}", fmt::join(sections, ", "));
  return known;
}

double number_in(const std::string& file, const std::string& key, const YAML::Node& node) {
  constexpr double kMost = 1e15;  // what is made of such numbers is finite
  double value = 0;
  const bool read = node.IsScalar() && YAML::convert<double>::decode(node, value);
  if (!read || !(value >= 0 && value <= kMost)) {
    refuse(file, node,
           fmt::format("{} is {}, expected a number, not below 0 and at most {}", key,
                       node.IsScalar() ? shown(node.Scalar()) : "a list or map", kMost));
  }
  return value;
}

/// A word of a map; a list or a map stands in no such place.
std::string word_in(const std::string& file, const std::string& what, const YAML::Node& node) {
  if (!node.IsScalar() && !node.IsNull())
    refuse(file, node, what + " is a list or map, expected a word");
  return node.as<std::string>();
}

/// Throws at a value that no cluster or model has.
void check_value(const std::string& file, const std::string& key, const YAML::Node& node,
                 double value) {
  constexpr double kLeastRate = 1e-6, kMostCount = 1e6, kMostTimes = 1e3;
  if (one_of(kRates, key) && value != 0 && (value < kLeastRate || value > kMostRate)) {
    refuse(file, node,
           fmt::format("{} is {}, expected GB/s, from {} to {:.0f}, or 0 for one that is not "
                       "known: 45 is 45e9 bytes a second",
                       key, value, kLeastRate, kMostRate));
  }
  const bool counts = one_of({"host_ranks", "leaf_hosts", "hidden", "experts", "topk"}, key);
  if (counts && (value < 1 || value > kMostCount || value != std::floor(value))) {
    refuse(
        file, node,
        fmt::format("{} is {}, expected a whole number from 1 to {:.0f}", key, value, kMostCount));
  }
  if (key == "most_hosts" && (value > kMostCount || value != std::floor(value))) {
    refuse(file, node,
           fmt::format("most_hosts is {}, expected a whole number, or 0 for any", value));
  }
  if (key == "overlap" && (value < 1 || value > 10)) {
    refuse(file, node,
           fmt::format(
               "overlap is {}, expected from 1 (latency, then rows) to 10 (the longer of both)",
               value));
  }
  if (key == "hidden_latency" && value >= 1) {
    refuse(file, node,
           fmt::format(
               "hidden_latency is {}, expected a share of the latency, below 1: 0.33 is a third",
               value));
  }
  const bool is_times = value >= 1 && value <= kMostTimes;
  if (key == "contention" && !is_times) {
    refuse(file, node,
           fmt::format("contention is {}, expected from 1 to {}: 1.05 is 5 % more time", value,
                       kMostTimes));
  }
  if (key == "oversubscription" && !is_times) {
    refuse(file, node,
           fmt::format("{} is {}, expected from 1 to {}: 2 is half the links to the spine", key,
                       value, kMostTimes));
  }
}

Value value_in(const std::string& file, const std::string& key, const YAML::Node& node) {
  Value value;
  if (!node.IsMap()) {
    value.value = number_in(file, key, node);
    value.error = error_of(value.from);
    return value;
  }
  if (!node["value"]) refuse(file, node, key + " has no `value`");
  value.value = number_in(file, key, node["value"]);
  if (node["from"]) value.from = word_in(file, key + ": from", node["from"]);
  if (!one_of({"measured", "published", "assumed"}, value.from)) {
    refuse(file, node["from"],
           fmt::format("{} is from {}, expected measured, published or assumed", key,
                       shown(value.from)));
  }
  value.error = node["error"] ? number_in(file, "error", node["error"]) : error_of(value.from);
  if (value.error > 1) {
    refuse(file, node["error"],
           fmt::format("{}: error is {}, expected a fraction: 0.05 is 5 %", key, value.error));
  }
  for (const auto& part : node) {
    const std::string name = word_in(file, key + ": a key", part.first);
    if (!one_of({"value", "from", "error", "source"}, name)) {
      refuse(file, part.first,
             fmt::format("{}: unknown key {}; known are value, from, error, source", key,
                         shown(name)));
    }
  }
  return value;
}

std::map<std::string, Value> values_in(const std::string& file, const std::string& place,
                                       const YAML::Node& node, const std::vector<std::string>& keys,
                                       const std::vector<std::string>& sections) {
  if (node.IsNull()) {
    throw std::runtime_error(
        fmt::format("{}: nothing in {}; {}", file, place, known_keys(keys, sections)));
  }
  if (!node.IsMap()) refuse(file, node, "expected keys and values; " + known_keys(keys, sections));
  std::map<std::string, Value> values;
  std::set<std::string> seen;
  for (const auto& part : node) {
    const std::string key = word_in(file, "a key", part.first);
    if (!seen.insert(key).second) {
      refuse(file, part.first, fmt::format("{} is there twice", shown(key)));
    }
    if (key == "source" || one_of(sections, key)) continue;
    if (!one_of(keys, key)) {
      refuse(file, part.first,
             fmt::format("unknown key {}; {}", shown(key), known_keys(keys, sections)));
    }
    const Value value = value_in(file, key, part.second);
    check_value(file, key, part.second, value.value);
    values.emplace(key, value);
  }
  return values;
}

YAML::Node text_of(Kind kind, const std::string& name) {
  const auto preset = presets(kind).find(name);
  if (preset != presets(kind).end()) return YAML::Load(std::string(preset->second));
  std::ifstream in(name);
  if (!in || std::filesystem::is_directory(name)) {
    std::vector<std::string> names;
    for (const auto& [known, text] : presets(kind)) names.push_back(known);
    throw std::runtime_error(fmt::format("{}: {} is no file that can be read, and none of {}",
                                         kind == Kind::cluster ? "--cluster" : "--model", name,
                                         fmt::join(names, ", ")));
  }
  try {
    const std::vector<YAML::Node> all = YAML::LoadAll(in);
    if (all.size() > 1) {
      refuse(name, all[1], fmt::format("{} YAML documents in the file, expected one", all.size()));
    }
    return all.empty() ? YAML::Node() : all[0];
  } catch (const YAML::Exception& error) {
    throw std::runtime_error(
        fmt::format("{}, line {}: {}", name, error.mark.line + 1, shown(error.msg)));
  }
}

/// Throws at values that do not go together.
void check_together(const Described& made, Kind kind) {
  if (kind == Kind::model) {
    for (const char* key : {"hidden", "experts"}) {
      if (made.find("", key) != nullptr) continue;
      throw std::runtime_error(
          fmt::format("{}: {} is missing; add it: `ferry plan --show deepseek-v3` prints a model",
                      made.name(), key));
    }
    const double topk = made.number("topk", 8), experts = made.number("experts", topk);
    if (topk > experts) {
      throw std::runtime_error(fmt::format(
          "{}: topk is {} (8 unless given), more than the {} experts", made.name(), topk, experts));
    }
    return;
  }
  for (const std::string& operation : kOperations) {
    if (made.number(operation, "oversubscription", 1) > 1 &&
        made.find(operation, "leaf_hosts") == nullptr) {
      throw std::runtime_error(
          fmt::format("{}: oversubscription for {} without leaf_hosts, the number of hosts under "
                      "one leaf switch",
                      made.name(), operation));
    }
  }
}

}  // namespace

double error_of(const std::string& from) {
  return from == "measured" ? 0.05 : from == "published" ? 0.1 : 0.3;
}

Described Described::load(Kind kind, const std::string& name) {
  const YAML::Node text = text_of(kind, name);
  const std::vector<std::string> sections =
      kind == Kind::cluster ? kOperations : std::vector<std::string>{};
  Described made;
  made.name_ = name;
  made.sections_[""] = values_in(name, "the file", text, keys_of(kind), sections);
  for (const std::string& section : sections) {
    if (const YAML::Node part = text[section]) {
      made.sections_[section] = values_in(name, section, part, kRateKeys, {});
    }
  }
  check_together(made, kind);
  return made;
}

const Value* Described::find(const std::string& section, const std::string& key) const {
  for (const std::string& name : {section, std::string()}) {
    const auto values = sections_.find(name);
    if (values == sections_.end()) continue;
    const auto value = values->second.find(key);
    if (value != values->second.end()) return &value->second;
  }
  return nullptr;
}

double Described::number(const std::string& section, const std::string& key,
                         double otherwise) const {
  const Value* value = find(section, key);
  return value == nullptr ? otherwise : value->value;
}

double Described::number(const std::string& key, double otherwise) const {
  return number("", key, otherwise);
}

std::vector<std::string> Described::assumed() const {
  std::vector<std::string> keys;
  for (const auto& [section, values] : sections_) {
    for (const auto& [key, value] : values) {
      if (value.from != "assumed" || value.value == 0 || !one_of(kRateKeys, key)) continue;
      keys.push_back(section.empty() ? key : section + "." + key);
    }
  }
  return keys;
}

ExchangeRates rates_of(const Described& cluster, const std::string& operation, int num_sms,
                       double tokens, End end) {
  const double sign = end == End::likely ? 0 : end == End::fast ? 1 : -1;
  const auto rate = [&](const std::string& key, const std::string& other) {
    const Value* value = cluster.find(operation, key);
    if (value == nullptr) value = cluster.find(operation, other);
    if (value == nullptr || value->value <= 0) return ExchangeRates::kUnknown;
    return value->value * 1e9 * (1 + sign * std::min(value->error, 0.95));
  };
  const auto time = [&](const std::string& key) {
    const Value* value = cluster.find(operation, key);
    return value == nullptr ? 0 : value->value * 1e-6 * (1 - sign * std::min(value->error, 1.0));
  };
  ExchangeRates rates;
  const bool few = tokens <= kFewTokens && cluster.find(operation, "few_latency_us") != nullptr;
  rates.latency_s =
      few ? time("few_latency_us") + tokens * time("few_token_us") : time("latency_us");
  rates.overlap = cluster.number(operation, "overlap", 1);
  rates.hidden_latency = cluster.number(operation, "hidden_latency", 0);
  rates.message_s = time("message_us");
  rates.copy = std::min(rate("copy", "copy"), rate("sm_copy", "sm_copy") * num_sms);
  rates.nvlink_out = rate("nvlink_out", "nvlink");
  rates.nvlink_in = rate("nvlink_in", "nvlink");
  rates.nic_out = rate("nic_out", "nic");
  rates.nic_in = rate("nic_in", "nic");
  rates.staging = rate("staging", "staging");
  rates.leaf_hosts = static_cast<int>(cluster.number(operation, "leaf_hosts", 0));
  rates.oversubscription = cluster.number(operation, "oversubscription", 1);
  return rates;
}

}  // namespace ferry::cli
