#include "plan/measured.hpp"

#include <fmt/format.h>

#include <algorithm>
#include <cmath>
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

/// The bytes of a rank: counted inside a host; across domains, of uniform routes.
ExchangeBytes bytes_of(const json& result, const json& settings, const std::string& file) {
  ExchangeBytes bytes;
  const double ranks = settings.at("ranks");
  bytes.copy = result.at("logical_bytes").get<double>() / ranks;
  bytes.nvlink = result.at("wire_bytes").get<double>() / ranks;
  if (result.at("name").get<std::string>().starts_with("latency")) {  // a copy for each expert
    bytes.copy = result.at("tokens").get<double>() * settings.at("topk").get<double>() *
                 result.at("row_bytes").get<double>();
  }
  const int domain = settings.value("domain_size", 0);
  if (domain == 0 || domain >= ranks) return bytes;
  const std::string crossing = settings.at("crossing");
  if (crossing == "automatic" || settings.at("routes") != "uniform") {
    throw std::runtime_error(fmt::format(
        "{}: between domains only --routes uniform with --crossing direct or hierarchical says "
        "what crossed",
        file));
  }
  ExchangeShape shape;
  shape.ranks = settings.at("ranks");
  shape.host_ranks = domain;
  shape.tokens = result.at("tokens");
  shape.topk = settings.at("topk");
  shape.row_bytes = result.at("row_bytes");
  shape.hierarchical = crossing == "hierarchical";
  return uniform_bytes(shape);
}

void read_bench(const json& file, const std::string& name, Measured& measured) {
  const json& settings = file.at("settings");
  for (const json& result : file.at("results")) {
    const auto operation = kOperationOf.find(result.at("name").get<std::string>());
    if (operation == kOperationOf.end() || result.at("logical_bytes") == 0) continue;
    Observation call;
    call.operation = operation->second;
    call.dtype = result.at("dtype");
    call.ranks = settings.at("ranks");
    call.tokens = result.at("tokens");
    call.num_sms = result.at("sms");
    call.seconds = result.at("p50_us").get<double>() * 1e-6;
    call.bytes = bytes_of(result, settings, name);
    if (call.operation == "combine") {  // its SMs also write the sums
      call.bytes.copy += call.tokens * result.at("row_bytes").get<double>();
    }
    if (!(call.seconds > 0)) throw std::runtime_error(name + ": a call that took no time");
    measured.calls[call.operation].push_back(call);
  }
  const int domain = settings.value("domain_size", 0);
  const int host = domain > 0 ? domain : settings.at("ranks").get<int>();
  measured.host_ranks = std::max(measured.host_ranks, host);
  const json gpus = file.at("machine").value("gpus", json::object()).value("all", json::array());
  if (gpus.empty()) return;
  measured.memory_gb = std::floor(gpus[0].value("memory_bytes", 0.0) / 1e9);
  measured.sms = gpus[0].value("multiprocessors", 0);
}

void read_links(const json& file, Measured& measured) {
  const std::vector<int> domains = file.at("domains");
  const json& rates = file.at("bytes_per_s");
  std::map<int, int> sizes;
  for (const int domain : domains)
    measured.host_ranks = std::max(measured.host_ranks, ++sizes[domain]);
  for (std::size_t a = 0; a < domains.size(); ++a) {
    for (std::size_t b = 0; b < domains.size(); ++b) {
      if (domains[a] != domains[b]) measured.nic.push_back(rates.at(a).at(b));
    }
  }
}

/// How much longer calls took beside products that left them their SMs.
void read_timeline(const json& file, const std::string& name, Measured& measured) {
  std::map<std::string, json> lines;
  for (const json& line : file.at("summary")) lines[line.at("name")] = line;
  const auto alone = lines.find("exchanges alone"), beside = lines.find("together, own SMs");
  if (alone == lines.end() || beside == lines.end()) {
    throw std::runtime_error(fmt::format(
        "{}: a timeline without `exchanges alone` or `together, own SMs`: torch there could not "
        "tell products to leave SMs",
        name));
  }
  for (const std::string operation : {"dispatch", "combine"}) {
    const double was = alone->second.at(operation + "_ms"),
                 is = beside->second.at(operation + "_ms");
    if (!(was > 0)) throw std::runtime_error(name + ": a call that took no time");
    measured.contention[operation] = std::max(1.0, is / was);
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
    if (!in) throw std::runtime_error(name + ": cannot be read");
    try {
      const json file = json::parse(in);
      if (file.contains("results")) {
        read_bench(file, name, measured);
      } else if (file.contains("domains")) {
        read_links(file, measured);
      } else if (file.contains("summary")) {
        read_timeline(file, name, measured);
      } else {
        throw std::runtime_error(fmt::format(
            "{}: not of `ferry bench --json`, `ferry doctor --net --json` or "
            "`overlap_timeline.py --json`: expected `settings` and `results`, or `domains` and "
            "`bytes_per_s`, or `summary`",
            name));
      }
    } catch (const json::exception& error) {
      throw std::runtime_error(
          fmt::format("{}: not of `ferry bench --json` or `ferry doctor --net --json`: {}", name,
                      reason_of(error)));
    }
  }
  return measured;
}

}  // namespace ferry::cli
