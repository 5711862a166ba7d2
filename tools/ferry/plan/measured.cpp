#include "plan/measured.hpp"

#include <fmt/format.h>

#include <algorithm>
#include <cmath>
#include <filesystem>
#include <fstream>
#include <nlohmann/json.hpp>
#include <stdexcept>

namespace ferry::cli {
namespace {

using nlohmann::json;

/// What `ferry bench` calls the calls that a cluster file describes.
const std::map<std::string, std::string> kOperationOf{
    {"dispatch, full, worst case", "dispatch"},
    {"dispatch, full", "dispatch"},
    {"combine, registered", "combine"},
    {"latency dispatch", "latency_dispatch"},
    {"latency combine, per rank", "latency_combine"}};

constexpr const char* kKinds =
    "`ferry bench --json`, `ferry doctor --net --json` or `overlap_timeline.py --json`";

[[noreturn]] void refuse(const std::string& name, const json& got, const std::string& expected) {
  constexpr std::size_t kMost = 40;
  std::string text = got.dump(-1, ' ', true, json::error_handler_t::replace);
  if (text.size() > kMost) text = text.substr(0, kMost) + "...";
  throw std::out_of_range(fmt::format("{} is {}, expected {}", name, text, expected));
}

const json& part(const json& holder, const char* key) {
  if (!holder.is_object())
    refuse(fmt::format("what should have `{}`", key), holder, "keys and values");
  const auto found = holder.find(key);
  if (found == holder.end()) {
    throw std::out_of_range(fmt::format("`{}` is missing: not of {}", key, kKinds));
  }
  return *found;
}
const json& list_of(const json& holder, const char* key) {
  const json& list = part(holder, key);
  if (!list.is_array()) refuse(key, list, "a list");
  return list;
}
std::string word_of(const json& holder, const char* key) {
  const json& word = part(holder, key);
  if (!word.is_string()) refuse(key, word, "a word");
  return word;
}

/// A number that a machine can have. Throws otherwise.
double checked(const json& value, const std::string& name, double least, double most) {
  const double number = value.is_number() ? value.get<double>() : std::nan("");
  if (number >= least && number <= most) return number;
  refuse(name, value, fmt::format("a number from {} to {}", least, most));
}
double number_of(const json& holder, const char* key, double least, double most) {
  return checked(part(holder, key), key, least, most);
}
int checked_whole(const json& value, const std::string& name, int least, int most) {
  const double number = checked(value, name, least, most);
  if (number == std::floor(number)) return static_cast<int>(number);
  refuse(name, value, "a whole number");
}
int whole_of(const json& holder, const char* key, int least, int most) {
  return checked_whole(part(holder, key), key, least, most);
}

/// Of what a machine can have measured.
struct Bounds {
  static constexpr int ranks = 4096, tokens = 1 << 20, topk = 64, sms = 1024;
  static constexpr double bytes = 1e15, row_bytes = 1e9;
  static constexpr double shortest_us = 1e-3, longest_us = 1e10;
};

int domain_size_of(const json& settings) {
  return settings.contains("domain_size") ? whole_of(settings, "domain_size", 0, Bounds::ranks) : 0;
}

/// The bytes of a rank: counted inside a host; across domains, of uniform routes.
ExchangeBytes bytes_of(const json& result, const json& settings, const std::string& file) {
  ExchangeBytes bytes;
  const int ranks = whole_of(settings, "ranks", 1, Bounds::ranks);
  const int tokens = whole_of(result, "tokens", 1, Bounds::tokens);
  const int topk = whole_of(settings, "topk", 1, Bounds::topk);
  const double row_bytes = number_of(result, "row_bytes", 1, Bounds::row_bytes);
  bytes.copy = number_of(result, "logical_bytes", 1, Bounds::bytes) / ranks;
  bytes.nvlink = number_of(result, "wire_bytes", 0, Bounds::bytes) / ranks;
  if (word_of(result, "name").starts_with("latency")) {  // a copy for each expert
    bytes.copy = tokens * (topk * row_bytes);
  }
  const int domain = domain_size_of(settings);
  if (domain == 0 || domain >= ranks) return bytes;
  const std::string crossing = word_of(settings, "crossing");
  if (crossing == "automatic" || word_of(settings, "routes") != "uniform") {
    throw std::runtime_error(fmt::format(
        "{}: between domains only --routes uniform with --crossing direct or hierarchical says "
        "what crossed",
        file));
  }
  ExchangeShape shape;
  shape.ranks = ranks;
  shape.host_ranks = domain;
  shape.tokens = tokens;
  shape.topk = topk;
  shape.row_bytes = row_bytes;
  shape.hierarchical = crossing == "hierarchical";
  return uniform_bytes(shape);
}

void read_bench(const json& file, const std::string& name, Measured& measured) {
  const json& settings = part(file, "settings");
  for (const json& result : list_of(file, "results")) {
    const auto operation = kOperationOf.find(word_of(result, "name"));
    if (operation == kOperationOf.end() || part(result, "logical_bytes") == 0) continue;
    Observation call;
    call.operation = operation->second;
    call.dtype = word_of(result, "dtype");
    call.bytes = bytes_of(result, settings, name);
    call.ranks = whole_of(settings, "ranks", 1, Bounds::ranks);
    call.tokens = whole_of(result, "tokens", 1, Bounds::tokens);
    call.num_sms = whole_of(result, "sms", 0, Bounds::sms);
    call.seconds = number_of(result, "p50_us", Bounds::shortest_us, Bounds::longest_us) * 1e-6;
    if (call.operation == "combine") {  // its SMs also write the sums
      call.bytes.copy += call.tokens * number_of(result, "row_bytes", 1, Bounds::row_bytes);
    }
    measured.calls[call.operation].push_back(call);
  }
  const int domain = domain_size_of(settings);
  const int host = domain > 0 ? domain : whole_of(settings, "ranks", 1, Bounds::ranks);
  measured.host_ranks = std::max(measured.host_ranks, host);
  const json& machine = part(file, "machine");
  if (!machine.is_object() || !machine.contains("gpus")) return;
  const json& gpus = list_of(machine["gpus"], "all");
  if (gpus.empty()) return;
  measured.memory_gb = std::floor(number_of(gpus[0], "memory_bytes", 0, Bounds::bytes) / 1e9);
  measured.sms = whole_of(gpus[0], "multiprocessors", 0, Bounds::sms);
}

void read_links(const json& file, Measured& measured) {
  std::vector<int> domains;
  std::map<int, int> sizes;
  for (const json& domain : list_of(file, "domains")) {
    domains.push_back(checked_whole(domain, "one of domains", 0, Bounds::ranks));
    measured.host_ranks = std::max(measured.host_ranks, ++sizes[domains.back()]);
  }
  const json& rates = list_of(file, "bytes_per_s");
  for (std::size_t a = 0; a < domains.size(); ++a) {
    if (rates.size() != domains.size() || !rates[a].is_array() ||
        rates[a].size() != domains.size()) {
      refuse("bytes_per_s", rates, fmt::format("{0} lists of {0} rates", domains.size()));
    }
    for (std::size_t b = 0; b < domains.size(); ++b) {
      if (domains[a] == domains[b]) continue;
      measured.nic.push_back(checked(rates[a][b], "a rate of bytes_per_s", 1, Bounds::bytes));
    }
  }
}

/// How much longer calls took beside products that left them their SMs.
void read_timeline(const json& file, const std::string& name, Measured& measured) {
  std::map<std::string, json> lines;
  for (const json& line : list_of(file, "summary")) lines[word_of(line, "name")] = line;
  const auto alone = lines.find("exchanges alone"), beside = lines.find("together, own SMs");
  if (alone == lines.end() || beside == lines.end()) {
    throw std::runtime_error(fmt::format(
        "{}: a timeline without `exchanges alone` or `together, own SMs`: torch there could not "
        "tell products to leave SMs",
        name));
  }
  for (const std::string operation : {"dispatch", "combine"}) {
    const std::string key = operation + "_ms";
    const auto time_of = [&](const json& line) {
      return number_of(line, key.c_str(), Bounds::shortest_us / 1e3, Bounds::longest_us / 1e3);
    };
    measured.contention[operation] =
        std::max(1.0, time_of(beside->second) / time_of(alone->second));
  }
}

/// What is wrong with a file, without the name that the JSON library gives the error.
std::string reason_of(const json::exception& error) {
  const std::string text = error.what();
  const auto end = text.find("] ");
  return end == std::string::npos ? text : text.substr(end + 2);
}

}  // namespace

Measured read_results(const std::vector<std::string>& files) {
  Measured measured;
  for (const std::string& name : files) {
    std::ifstream in(name);
    if (!in || std::filesystem::is_directory(name)) {
      throw std::runtime_error(name + ": cannot be read");
    }
    try {
      const json file = json::parse(in);
      if (file.contains("results")) {
        read_bench(file, name, measured);
      } else if (file.contains("domains")) {
        read_links(file, measured);
      } else if (file.contains("summary")) {
        read_timeline(file, name, measured);
      } else {
        throw std::runtime_error(
            fmt::format("{}: not of {}: expected `settings` and `results`, or `domains` and "
                        "`bytes_per_s`, or `summary`",
                        name, kKinds));
      }
    } catch (const json::exception& error) {
      throw std::runtime_error(fmt::format("{}: not of {}: {}", name, kKinds, reason_of(error)));
    } catch (const std::out_of_range& error) {
      throw std::runtime_error(fmt::format("{}: {}", name, error.what()));
    }
  }
  return measured;
}

}  // namespace ferry::cli
