#include "plan/predict.hpp"

#include <fmt/format.h>

#include <algorithm>
#include <cmath>
#include <stdexcept>

#include "ferry/latency.hpp"

namespace ferry::cli {
namespace {

/// Of rows of one byte. Ferry sends a row for each rank, in latency mode, too.
ExchangeShape shape_of(const Described& cluster, const Described& model, const Load& load) {
  ExchangeShape shape;
  shape.ranks = load.ranks;
  shape.host_ranks = std::max(1, static_cast<int>(cluster.number("host_ranks", 8)));
  shape.tokens = load.tokens;
  shape.topk = std::max(1, static_cast<int>(model.number("topk", 8)));
  shape.most_hosts = static_cast<int>(model.number("most_hosts", 0));
  shape.row_bytes = 1;
  return shape;
}

std::string operation_of(bool latency, bool combine) {
  return std::string(latency ? "latency_" : "") + (combine ? "combine" : "dispatch");
}

bool has_nic(const Described& cluster, const std::string& operation) {
  return !std::isinf(rates_of(cluster, operation, 1, kFewTokens).nic_out);
}

/// Several hosts without a rate of the NIC would be predicted as if their network took no time.
void check_nic(const Described& cluster, const std::string& operation, int ranks) {
  const double host_ranks = cluster.number("host_ranks", 8);
  if (ranks <= host_ranks || has_nic(cluster, operation)) return;
  throw std::runtime_error(fmt::format(
      "--ranks {} spans {:.0f} hosts, but {} has no nic for {}; add its rate, as `ferry doctor "
      "--net` measures it, or plan for one host, --ranks {:.0f} at most",
      ranks, std::ceil(ranks / host_ranks), cluster.name(), operation, host_ranks));
}

/// A file that knows nothing of an operation would say that it takes no time.
void check_time(const Described& cluster, const std::string& operation, bool latency,
                double seconds) {
  if (seconds > 0) return;
  throw std::runtime_error(fmt::format(
      "{} has no latency and no rate for {} on one host; add them, as `ferry bench --mode {} "
      "--json FILE` and `ferry calibrate` measure them",
      cluster.name(), operation, latency ? "latency" : "throughput"));
}

/// Without it, calls beside products would take as long as alone.
void check_contention(const Described& cluster, const std::string& operation, const Load& load) {
  if (!load.beside || cluster.find(operation, "contention") != nullptr) return;
  throw std::runtime_error(fmt::format(
      "--beside-products: {} has no contention for {}; add it, as `bench/overlap_timeline.py "
      "--json FILE` and `ferry calibrate` measure it",
      cluster.name(), operation));
}

/// A row of one byte; of recorded routes the mean of the busiest ranks of the calls.
ExchangeBytes rows_of(const Described& cluster, const ExchangeShape& shape, const Load& load) {
  const ExchangeRates rates = rates_of(cluster, "dispatch", load.most_sms, load.tokens);
  if (load.routes == nullptr) return uniform_bytes(shape, rates);
  constexpr int kMostCalls = 16;  // spread over all that were recorded
  const int calls = std::min(kMostCalls, load.routes->count());
  ExchangeBytes mean;
  for (int i = 0; i < calls; ++i) {
    ExchangeFlows flows({.experts = load.routes->experts * load.copies,
                         .ranks = shape.ranks,
                         .host_ranks = shape.host_ranks,
                         .topk = load.routes->topk,
                         .hierarchical = shape.hierarchical});
    for (int rank = 0; rank < shape.ranks; ++rank) {
      flows.add(rank, load.routes->of(rank, i * load.routes->count() / calls, load.copies));
    }
    const ExchangeBytes one = flows.busiest(shape.row_bytes, rates);
    mean.copy += one.copy / calls;
    mean.nvlink += one.nvlink / calls;
    mean.nic += one.nic / calls;
    mean.spine += one.spine / calls;
    mean.peers = one.peers;
  }
  const double times = load.tokens / load.routes->mean_tokens();
  for (double* bytes : {&mean.copy, &mean.nvlink, &mean.nic, &mean.spine}) *bytes *= times;
  return mean;
}

ExchangeTime time_of(const Described& cluster, const ExchangeBytes& bytes,
                     const std::string& operation, int num_sms, const Load& load,
                     End end = End::likely) {
  ExchangeRates rates = rates_of(cluster, operation, num_sms, load.tokens, end);
  if (load.beside) rates.contention = cluster.number(operation, "contention", 1);
  return exchange_time(bytes, rates);
}
double seconds(const Described& cluster, const ExchangeBytes& bytes, const std::string& operation,
               int num_sms, const Load& load, End end = End::likely) {
  return time_of(cluster, bytes, operation, num_sms, load, end).seconds();
}

/// The fewest that cost at most 3 % of time; 0: their rate is not known.
int enough_sms(const Described& cluster, const ExchangeBytes& bytes, const std::string& operation,
               const Load& load) {
  constexpr double kWorth = 1.03;
  if (cluster.find(operation, "sm_copy") == nullptr) return 0;
  const double best = seconds(cluster, bytes, operation, load.most_sms, load);
  int sms = load.fewest_sms;
  while (sms < load.most_sms && seconds(cluster, bytes, operation, sms, load) > best * kWorth)
    ++sms;
  return sms;
}

}  // namespace

std::vector<int> usual_ranks(const Described& cluster, bool latency, int experts) {
  const int host_ranks = static_cast<int>(cluster.number("host_ranks", 8));
  const int most = std::min(experts, kMostRanks);
  const bool network = has_nic(cluster, operation_of(latency, false)) &&
                       has_nic(cluster, operation_of(latency, true));
  std::vector<int> ranks;
  for (int hosts = 2; network && hosts <= 32 && hosts * host_ranks <= most; hosts *= 2) {
    ranks.push_back(hosts * host_ranks);
  }
  if (!ranks.empty()) return ranks;
  const int one_host = std::min(host_ranks, most);
  for (int few = 2; few < one_host; few *= 2) ranks.push_back(few);
  ranks.push_back(one_host);
  return ranks;
}

double row_bytes_of(double hidden, bool combine) {
  return combine ? hidden * 2 : hidden + std::ceil(hidden / 128) * 4;
}

std::vector<Predicted> predicted(const Described& cluster, const Described& model,
                                 const Load& load) {
  ExchangeShape shape = shape_of(cluster, model, load);
  const ExchangeBytes received = rows_of(cluster, shape, load);
  ExchangeBytes direct = received;
  if (load.latency) direct.copy = load.tokens * shape.topk;  // a copy for each expert
  shape.hierarchical = true;
  const ExchangeBytes by_rail = load.latency ? direct : rows_of(cluster, shape, load);
  const double hidden = model.number("hidden", 0);
  std::vector<Predicted> all;
  for (const bool combine : {false, true}) {
    const std::string operation = operation_of(load.latency, combine);
    check_nic(cluster, operation, load.ranks);
    check_contention(cluster, operation, load);
    const double row = row_bytes_of(hidden, combine);
    const double sums = combine && !load.latency ? load.tokens : 0;
    Predicted made;
    made.call = combine ? "combine" : "dispatch";
    made.dtype = combine ? "bf16" : "e4m3";
    made.direct_s =
        seconds(cluster, bytes_of_rows(direct, row, sums), operation, load.most_sms, load);
    if (!load.latency) {
      made.hierarchical_s =
          seconds(cluster, bytes_of_rows(by_rail, row, sums), operation, load.most_sms, load);
      made.hierarchical = made.hierarchical_s < made.direct_s;
    }
    const ExchangeBytes bytes = bytes_of_rows(made.hierarchical ? by_rail : direct, row, sums);
    made.num_sms = enough_sms(cluster, bytes, operation, load);
    const int sms = made.num_sms > 0 ? made.num_sms : load.most_sms;
    const ExchangeTime time = time_of(cluster, bytes, operation, sms, load);
    check_time(cluster, operation, load.latency, time.seconds());
    made.bottleneck = time.bottleneck();
    made.phases = time;
    made.received_bytes = received.copy * row;
    made.seconds =
        predicted_interval(time.seconds(), seconds(cluster, bytes, operation, sms, load, End::fast),
                           seconds(cluster, bytes, operation, sms, load, End::slow));
    all.push_back(made);
  }
  return all;
}

void check_ranks(const Described& cluster, const Described& model, int ranks, int copies) {
  const double experts = model.number("experts", 1) * copies;
  if (ranks > experts) {
    throw std::runtime_error(fmt::format(
        "--ranks: {} ranks, but {} has {} experts; --copies gives each of them replicas", ranks,
        model.name(), experts));
  }
  const double host_ranks = cluster.number("host_ranks", 8);
  if (ranks > host_ranks && std::fmod(ranks, host_ranks) != 0) {
    throw std::runtime_error(fmt::format(
        "--ranks: {} ranks are no whole hosts of {}; expected a multiple of {:.0f}, or fewer",
        ranks, cluster.name(), host_ranks));
  }
}

RecordedRoutes routes_for(const Described& model, const std::string& file) {
  RecordedRoutes routes = RecordedRoutes::load(file);
  const double experts = model.number("experts", 1), topk = model.number("topk", 8);
  if (static_cast<double>(routes.experts) != experts || routes.topk != topk) {
    throw std::runtime_error(fmt::format(
        "--routes: recorded with {0} experts and top-{1} routes, but the model {2} has {3} and "
        "top-{4}; expected --model FILE with experts: {0}, topk: {1} (record without balance=: its "
        "group counts slots for copies as experts)",
        routes.experts, routes.topk, model.name(), experts, topk));
  }
  return routes;
}

Memory memory_of(const Described& cluster, const Described& model, const Load& load) {
  const double hidden = model.number("hidden", 0), experts = model.number("experts", 1);
  const double bytes = model.number("parameter_bytes", 2);
  const double held = std::ceil(experts * load.copies / load.ranks);
  const double expert = 3 * hidden * model.number("intermediate", 0);
  Memory memory{{"experts", held * model.number("moe_layers", 0) * expert * bytes},
                {"other parameters", model.number("other_parameters", 0) * bytes}};
  if (load.latency) {
    LatencyConfig config;
    config.capacity = static_cast<std::int64_t>(load.tokens);
    config.hidden = static_cast<std::int64_t>(hidden);
    config.topk = static_cast<int>(model.number("topk", 8));
    const double host_ranks = std::max(1.0, cluster.number("host_ranks", 8));
    const auto hint = LatencyExchange::memory_hint(
        config, static_cast<std::int64_t>(experts) * load.copies, load.ranks, DeviceKind::cuda,
        static_cast<int>(std::ceil(load.ranks / host_ranks)));
    memory.emplace_back("latency buffers", static_cast<double>(hint));
    return memory;
  }
  const ExchangeBytes rows = uniform_bytes(shape_of(cluster, model, load));
  memory.emplace_back(
      "received rows",
      load.tokens * rows.ranks * (row_bytes_of(hidden, false) + row_bytes_of(hidden, true)));
  if (load.ranks > cluster.number("host_ranks", 8)) {
    memory.emplace_back("staging", load.tokens * rows.hosts * row_bytes_of(hidden, true));
  }
  return memory;
}

}  // namespace ferry::cli
