#include "simulate/world.hpp"

#include <fmt/format.h>

#include <algorithm>
#include <cmath>
#include <stdexcept>
#include <utility>

#include "number.hpp"
#include "plan/predict.hpp"
#include "progress.hpp"

namespace ferry::cli {
namespace {

/// Of each rank the speed of its NIC, in speeds of the usual.
std::vector<double> nic_speeds(int ranks, const std::vector<std::string>& slow) {
  constexpr double kLeast = 1e-6;
  std::vector<double> speeds(static_cast<std::size_t>(ranks), 1);
  for (const std::string& text : slow) {
    const auto colon = text.find(':');
    const std::string rank = text.substr(0, colon);
    const std::string times = colon == std::string::npos ? "" : text.substr(colon + 1);
    const bool fits =
        whole_number(0, ranks - 1)(rank).empty() && number_between(kLeast, 1)(times).empty();
    if (!fits) {
      throw std::runtime_error(
          fmt::format("--slow-nic: {}: expected RANK:TIMES, a rank below {} and from {} to 1",
                      text.substr(0, 40), ranks, kLeast));
    }
    speeds[std::stoul(rank)] = std::stod(times);
  }
  return speeds;
}

}  // namespace

ExchangeRates rates_with(const Described& cluster, const std::string& call,
                         const SimulateOptions& options) {
  ExchangeRates rates = rates_of(cluster, call, 24, options.tokens);
  if (options.leaf_hosts > 0) rates.leaf_hosts = options.leaf_hosts;
  if (options.oversubscription > 0) rates.oversubscription = options.oversubscription;
  if (std::isinf(rates.nic_out) || std::isinf(rates.nic_in) || std::isinf(rates.nvlink_out) ||
      std::isinf(rates.nvlink_in)) {
    throw std::runtime_error(fmt::format("--cluster: {} has no rate of NVLink or of the NIC in {}",
                                         cluster.name(), call));
  }
  if (options.oversubscription > 1 && rates.leaf_hosts == 0) {
    throw std::runtime_error(fmt::format(
        "--oversubscription: {} says nothing of leaf switches; give --leaf-hosts", cluster.name()));
  }
  return rates;
}

World world_of(const SimulateOptions& options, const Described& cluster, const Described& model) {
  World world;
  check_ranks(cluster, model, options.ranks, options.copies);
  world.nic = nic_speeds(options.ranks, options.slow_nics);
  const bool drawn = options.routes.empty();
  const RecordedRoutes recorded = drawn ? RecordedRoutes() : routes_for(model, options.routes);
  FlowShape& shape = world.shape;
  shape.experts = static_cast<std::int64_t>(model.number("experts", 1)) * options.copies;
  shape.ranks = options.ranks;
  shape.host_ranks = std::max(1, static_cast<int>(cluster.number("host_ranks", 8)));
  shape.topk = static_cast<int>(model.number("topk", 8));
  shape.hierarchical = options.crossing == "hierarchical";
  world.tokens = !drawn ? recorded.mean_tokens() : options.tokens > 0 ? options.tokens : 4096;
  DrawnRoutes draw;
  draw.tokens = static_cast<std::int64_t>(world.tokens);
  draw.most_hosts = static_cast<int>(model.number("most_hosts", 0));
  draw.hot = options.skew > 1 ? static_cast<int>(std::max<std::int64_t>(1, shape.experts / 8)) : 0;
  draw.heat = options.skew;
  draw.seed = options.seed;
  const int hosts = (shape.ranks + shape.host_ranks - 1) / shape.host_ranks;
  const int lost = static_cast<int>(std::lround(hosts * options.dead));
  for (int rank = 0; rank < shape.ranks; ++rank) {
    // Spread: every so many hosts one is dead.
    const int host = rank / shape.host_ranks;
    world.dead.push_back((host + 1) * lost / hosts > host * lost / hosts);
  }
  ExchangeFlows flows(shape);
  Progress progress("simulate", shape.ranks);
  for (int rank = 0; rank < shape.ranks; ++rank) {
    progress.show(rank, "routes");
    if (world.dead[static_cast<std::size_t>(rank)]) continue;
    RankRoutes routes =
        drawn ? draw_routes(shape, draw, rank) : recorded.of(rank, 0, options.copies);
    for (std::int32_t& id : routes) {  // nothing goes to the dead
      if (id >= 0 && world.dead[static_cast<std::size_t>(flows.rank_of(id))]) id = -1;
    }
    flows.add(rank, std::move(routes));
  }
  world.flows = flows.flows();
  world.row = flows.busiest(1, rates_with(cluster, "dispatch", options));
  return world;
}

}  // namespace ferry::cli
