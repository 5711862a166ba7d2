// ferry simulate: exchanges on a cluster that is described, flow by flow, where the closed form of
// ferry plan sees each rank alone.
#include <fmt/format.h>

#include <algorithm>
#include <functional>
#include <memory>
#include <nlohmann/json.hpp>
#include <stdexcept>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "command.hpp"
#include "number.hpp"
#include "plan/predict.hpp"
#include "progress.hpp"
#include "simulate/network.hpp"
#include "simulate/timeline.hpp"
#include "simulate/world.hpp"

namespace ferry::cli {
namespace {

using nlohmann::json;

constexpr int kMostNodes = 64;  // of a rail; hosts whose NVLink is simulated

/// The rails whose NICs carry most, at most so many.
std::vector<int> busiest_rails(const World& world, int count) {
  const int host = world.shape.host_ranks;
  std::vector<double> sent(static_cast<std::size_t>(world.shape.ranks)), got = sent;
  for (const Flow& flow : world.flows) {
    if (!flow.network) continue;
    const auto rows = static_cast<double>(flow.rows);
    sent[static_cast<std::size_t>(flow.from)] +=
        rows / world.nic[static_cast<std::size_t>(flow.from)];
    got[static_cast<std::size_t>(flow.to)] += rows / world.nic[static_cast<std::size_t>(flow.to)];
  }
  std::vector<double> most(static_cast<std::size_t>(host));
  std::vector<int> rails(static_cast<std::size_t>(host));
  for (std::size_t i = 0; i < rails.size(); ++i) rails[i] = static_cast<int>(i);
  for (std::size_t rank = 0; rank < sent.size(); ++rank) {
    double& rail = most[rank % static_cast<std::size_t>(host)];
    rail = std::max({rail, sent[rank], got[rank]});
  }
  std::stable_sort(rails.begin(), rails.end(), [&](int a, int b) {
    return most[static_cast<std::size_t>(a)] > most[static_cast<std::size_t>(b)];
  });
  rails.resize(static_cast<std::size_t>(std::min(count, host)));
  return rails;
}

/// A combine brings the rows of a dispatch back.
SimulatedFlow simulated(const Flow& flow, double row_bytes, bool combine) {
  const double bytes = static_cast<double>(flow.rows) * row_bytes;
  return combine ? SimulatedFlow{flow.to, flow.from, bytes}
                 : SimulatedFlow{flow.from, flow.to, bytes};
}

/// The NICs that rails join: hierarchical, each rail by itself; direct, all of them together.
std::vector<SimulatedPart> network_parts(const World& world, const ExchangeRates& rates,
                                         double row_bytes, bool combine,
                                         const std::vector<int>& rails) {
  const int host = world.shape.host_ranks;
  const bool together = !world.shape.hierarchical;
  std::vector<SimulatedPart> parts(together ? 1 : rails.size());
  for (std::size_t i = 0; i < parts.size(); ++i) {
    for (int rank = 0; rank < world.shape.ranks; ++rank) {
      if (!together && rank % host != rails[i]) continue;
      const double share = world.nic[static_cast<std::size_t>(rank)];
      parts[i].network.out.push_back(rates.nic_out * share);
      parts[i].network.in.push_back(rates.nic_in * share);
    }
    parts[i].network.leaf = rates.leaf_hosts * (together ? host : 1);
    parts[i].network.oversubscription = rates.oversubscription;
  }
  for (std::size_t place = 0; place < world.flows.size(); ++place) {
    const Flow& flow = world.flows[place];
    if (!flow.network) continue;
    for (std::size_t i = 0; i < parts.size(); ++i) {
      if (!together && (flow.from % host != rails[i] || flow.to % host != rails[i])) continue;
      SimulatedFlow made = simulated(flow, row_bytes, combine);
      if (!together) {
        made.from /= host;
        made.to /= host;
      }
      parts[i].shares.push_back({place, parts[i].flows.size()});
      parts[i].flows.push_back(made);
    }
  }
  return parts;
}

/// The hosts whose busiest rank moves most inside, at most so many: no other host's NVLink matters.
std::vector<bool> busiest_hosts(const World& world, int count) {
  const auto ranks = static_cast<std::size_t>(world.shape.ranks);
  const auto each = static_cast<std::size_t>(world.shape.host_ranks);
  std::vector<double> out(ranks), in(ranks), most((ranks + each - 1) / each);
  for (const Flow& flow : world.flows) {
    if (flow.network) continue;
    out[static_cast<std::size_t>(flow.from)] += static_cast<double>(flow.rows);
    in[static_cast<std::size_t>(flow.to)] += static_cast<double>(flow.rows);
  }
  for (std::size_t rank = 0; rank < ranks; ++rank) {
    most[rank / each] = std::max({most[rank / each], out[rank], in[rank]});
  }
  std::vector<double> sorted = most;
  std::sort(sorted.begin(), sorted.end(), std::greater<>());
  const auto last = std::min(sorted.size(), static_cast<std::size_t>(count)) - 1;
  std::vector<bool> busy;
  for (const double one : most) busy.push_back(one >= sorted[last]);
  return busy;
}

SimulatedPart nvlink_part(const World& world, const ExchangeRates& rates, double row_bytes,
                          bool combine) {
  SimulatedPart part;
  const std::vector<bool> busy = busiest_hosts(world, kMostNodes);
  const auto ranks = static_cast<std::size_t>(world.shape.ranks);
  part.network.out.assign(ranks, rates.nvlink_out);
  part.network.in.assign(ranks, rates.nvlink_in);
  for (std::size_t place = 0; place < world.flows.size(); ++place) {
    const Flow& flow = world.flows[place];
    if (flow.network || !busy[static_cast<std::size_t>(flow.from / world.shape.host_ranks)]) {
      continue;
    }
    part.shares.push_back({place, part.flows.size()});
    part.flows.push_back(simulated(flow, row_bytes, combine));
  }
  return part;
}

/// Of a rail; direct crossings are simulated rank by rank.
int hosts_as_one(const World& world, const SimulateOptions& options) {
  if (!world.shape.hierarchical) return 1;
  const int hosts = (world.shape.ranks + world.shape.host_ranks - 1) / world.shape.host_ranks;
  return options.hosts_as_one > 0 ? options.hosts_as_one : (hosts + kMostNodes - 1) / kMostNodes;
}

struct Simulated {
  std::string call;
  double seconds = 0, closed_s = 0, nic_s = 0, nvlink_s = 0;
  std::string bottleneck;
};

/// Ends of flows into a timeline, and the last of them.
double ended(const World& world, const SimulatedPart& part, const std::vector<double>& ends,
             bool combine, Timeline& timeline, double begin) {
  double last = 0;
  for (const SimulatedPart::Share& share : part.shares) {
    const Flow& flow = world.flows[share.place];
    const int from = combine ? flow.to : flow.from, to = combine ? flow.from : flow.to;
    const double end = ends[share.flow];
    last = std::max(last, end);
    timeline.add(from, flow.network ? "NIC out" : "NVLink out", begin, end);
    timeline.add(to, flow.network ? "NIC in" : "NVLink in", begin, end);
  }
  return last;
}

Simulated simulated_call(const World& world, const Described& cluster, const Described& model,
                         const SimulateOptions& options, const std::vector<int>& rails,
                         bool combine, Timeline& timeline, double begin) {
  Simulated made;
  made.call = combine ? "combine" : "dispatch";
  const double row = row_bytes_of(model.number("hidden", 0), combine);
  const ExchangeRates rates = rates_with(cluster, made.call, options);
  std::vector<SimulatedPart> parts = network_parts(world, rates, row, combine, rails);
  for (SimulatedPart& part : parts) part = joined(part, hosts_as_one(world, options));
  parts.push_back(nvlink_part(world, rates, row, combine));
  std::vector<std::function<std::vector<double>()>> jobs;
  for (const SimulatedPart& part : parts) {
    jobs.emplace_back([&part] { return simulate_flows(part.network, part.flows); });
  }
  const int cores = std::max(1, static_cast<int>(std::thread::hardware_concurrency()));
  Progress progress("simulate", static_cast<int>(jobs.size()));
  const auto ends = run_apart(jobs, cores, [&](int done) { progress.show(done, made.call); });
  for (std::size_t i = 0; i < parts.size(); ++i) {
    double& last = i + 1 == parts.size() ? made.nvlink_s : made.nic_s;
    last = std::max(last, ended(world, parts[i], ends[i], combine, timeline, begin));
  }
  const ExchangeBytes bytes = bytes_of_rows(world.row, row, combine ? world.tokens : 0);
  const ExchangeTime closed = exchange_time(bytes, rates);
  made.closed_s = closed.seconds();
  made.bottleneck = closed.bottleneck();
  made.seconds = closed.latency + closed.messages +
                 std::max({made.nic_s, made.nvlink_s, closed.copy, closed.staging});
  return made;
}

void print_simulated(const std::vector<Simulated>& calls, const World& world,
                     const std::vector<int>& rails, bool as_json) {
  if (as_json) {
    json rows = json::array();
    for (const Simulated& one : calls) {
      rows.push_back({{"call", one.call},
                      {"ranks", world.shape.ranks},
                      {"flows", world.flows.size()},
                      {"us", one.seconds * 1e6},
                      {"closed_form_us", one.closed_s * 1e6},
                      {"nic_us", one.nic_s * 1e6},
                      {"nvlink_us", one.nvlink_s * 1e6},
                      {"bottleneck", one.bottleneck}});
    }
    fmt::print("{}\n", rows.dump(2));
    return;
  }
  fmt::print("{} ranks, {} flows", world.shape.ranks, world.flows.size());
  if (world.shape.hierarchical && static_cast<int>(rails.size()) < world.shape.host_ranks) {
    fmt::print("; NICs: the {} busiest of {} rails", rails.size(), world.shape.host_ranks);
  }
  fmt::print("\n{:<10} {:>10} {:>12} {:>14} {:>10}  {}\n", "call", "us", "by NICs us",
             "by NVLink us", "closed us", "bottleneck of the closed form");
  for (const Simulated& one : calls) {
    fmt::print("{:<10} {:>10.0f} {:>12.0f} {:>14.0f} {:>10.0f}  {}\n", one.call, one.seconds * 1e6,
               one.nic_s * 1e6, one.nvlink_s * 1e6, one.closed_s * 1e6, one.bottleneck);
  }
}

int simulate(const SimulateOptions& options) {
  constexpr std::size_t kManyFlows = 200000;  // more of them take minutes
  if (!may_write("simulate", options.timeline)) return 1;
  const Described cluster = Described::load(Kind::cluster, options.cluster);
  const Described model = Described::load(Kind::model, options.model);
  const World world = world_of(options, cluster, model);
  if (world.flows.size() > kManyFlows && !world.shape.hierarchical) {
    throw std::runtime_error(fmt::format(
        "{} flows are too many to simulate; take fewer --ranks, or --crossing hierarchical, whose "
        "rails are simulated one by one",
        world.flows.size()));
  }
  const int all = options.rails > 0 ? options.rails : world.shape.host_ranks;
  const std::vector<int> rails = busiest_rails(world, all);
  Timeline timeline;
  std::vector<Simulated> calls;
  double begin = 0;
  for (const bool combine : {false, true}) {
    calls.push_back(
        simulated_call(world, cluster, model, options, rails, combine, timeline, begin));
    begin += calls.back().seconds;
  }
  print_simulated(calls, world, rails, options.as_json);
  if (!options.timeline.empty()) timeline.write(options.timeline);
  return 0;
}

}  // namespace

void add_simulate(CLI::App& app, int& exit_code) {
  auto options = std::make_shared<SimulateOptions>();
  CLI::App* command =
      app.add_subcommand("simulate", "Simulate exchanges on a cluster flow by flow, with SimGrid");
  command->add_option("--cluster", options->cluster, "A preset, or a YAML file: ferry plan --help");
  command->add_option("--model", options->model, "A preset, or a YAML file: ferry plan --help");
  command->add_option("--ranks", options->ranks, "How many ranks")->check(whole_number(1, 4096));
  command->add_option("--copies", options->copies, "Replicas of each expert")
      ->check(whole_number(1, 4096));
  command->add_option("--tokens", options->tokens, "Tokens of a rank; 4096")
      ->check(whole_number(1, 1 << 20));
  command->add_option("--crossing", options->crossing, "direct or hierarchical")
      ->check(CLI::IsMember({"direct", "hierarchical"}));
  command->add_option("--routes", options->routes,
                      "What Group.record_routes recorded: its first call");
  command->add_option("--slow-nic", options->slow_nics, "RANK:TIMES, as 5:0.25; may be repeated")
      ->multi_option_policy(CLI::MultiOptionPolicy::TakeAll);
  command
      ->add_option("--oversubscription", options->oversubscription,
                   "Of leaf switches, in place of the cluster's")
      ->check(number_between(1, 1000));
  command
      ->add_option("--leaf-hosts", options->leaf_hosts,
                   "Hosts under a leaf switch, in place of the cluster's")
      ->check(whole_number(1, 4096));
  command->add_option("--dead", options->dead, "Share of the hosts that are dead")
      ->check(number_between(0, 0.9));
  command
      ->add_option("--skew", options->skew,
                   "How many times as often as others an eighth of the experts is named")
      ->check(number_between(1, 1000));
  command->add_option("--seed", options->seed, "Of drawn routes");
  command
      ->add_option("--hosts-as-one", options->hosts_as_one,
                   "So many hosts of a leaf switch as one; as many as leave 64")
      ->check(whole_number(1, 4096));
  command->add_option("--rails", options->rails, "How many rails, the busiest first")
      ->check(whole_number(1, 4096));
  command->add_option("--timeline", options->timeline, "Write a timeline for ui.perfetto.dev");
  command->add_flag("--json", options->as_json, "Print JSON");
  command->callback([options, &exit_code] { exit_code = simulate(*options); });
}

}  // namespace ferry::cli
