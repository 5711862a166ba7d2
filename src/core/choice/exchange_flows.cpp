#include "ferry/exchange_flows.hpp"

#include <algorithm>
#include <numeric>
#include <random>
#include <string>
#include <utility>

#include "core/crossing_plan.hpp"
#include "core/domains.hpp"
#include "core/exchange_plan.hpp"
#include "ferry/error.hpp"

namespace ferry {
namespace {

/// A number below `end`.
std::int64_t below(std::mt19937_64& random, std::int64_t end) {
  return static_cast<std::int64_t>((random() >> 32) * static_cast<std::uint64_t>(end) >> 32);
}

Domains hosts_of(const FlowShape& shape) {
  return Domains::blocks(shape.ranks, shape.host_ranks);
}

/// Sums of rows by rank, out and in.
struct Sums {
  explicit Sums(int ranks) : out(index(ranks)), in(index(ranks)) {}
  void add(int from, int to, std::int64_t rows) {
    out[index(from)] += rows;
    in[index(to)] += rows;
  }
  double largest() const {
    return static_cast<double>(std::max(*std::max_element(out.begin(), out.end()),
                                        *std::max_element(in.begin(), in.end())));
  }
  std::vector<std::int64_t> out, in;
};

}  // namespace

RankRoutes draw_routes(const FlowShape& shape, const DrawnRoutes& drawn, int rank) {
  std::seed_seq seed{static_cast<std::uint32_t>(drawn.seed),
                     static_cast<std::uint32_t>(drawn.seed >> 32), static_cast<unsigned>(rank)};
  std::mt19937_64 random(seed);
  const Placement placement{shape.experts, shape.ranks};
  const int hosts = (shape.ranks + shape.host_ranks - 1) / shape.host_ranks;
  const bool limited = drawn.most_hosts > 0 && drawn.most_hosts < hosts;
  std::vector<int> order(index(hosts));  // of each token the first few, where it is limited
  std::iota(order.begin(), order.end(), 0);
  const auto may = [&](std::int32_t id) {
    const auto end = order.begin() + drawn.most_hosts;
    return !limited ||
           std::find(order.begin(), end, placement.rank_of(id) / shape.host_ranks) != end;
  };
  // One that is not hot.
  const auto usual = [&]() -> std::int32_t {
    if (!limited) {
      return static_cast<std::int32_t>(drawn.hot + below(random, shape.experts - drawn.hot));
    }
    const int head = order[index(below(random, drawn.most_hosts))] * shape.host_ranks;
    const std::int64_t first = placement.first_expert(head);
    const std::int64_t end = placement.first_expert(std::min(head + shape.host_ranks, shape.ranks));
    const auto id = static_cast<std::int32_t>(first + below(random, end - first));
    return first == end || id < drawn.hot ? -1 : id;
  };
  const double hot = drawn.hot * drawn.heat;
  const double share = hot / (hot + static_cast<double>(shape.experts - drawn.hot));
  RankRoutes routes;
  routes.reserve(index(drawn.tokens * shape.topk));
  for (std::int64_t token = 0; token < drawn.tokens; ++token) {
    for (int i = 0; limited && i < drawn.most_hosts; ++i) {
      std::swap(order[index(i)], order[index(i + below(random, hosts - i))]);
    }
    const auto first = static_cast<std::ptrdiff_t>(routes.size());
    // Distinct, while there are enough of them; what cannot be found soon is left out.
    for (int k = 0, tries = 0; k < shape.topk && tries < 1000 * shape.topk; ++tries) {
      const bool is_hot = drawn.hot > 0 && static_cast<double>(random() >> 11) * 0x1p-53 < share;
      const auto id = is_hot ? static_cast<std::int32_t>(below(random, drawn.hot)) : usual();
      if (id < 0 || (is_hot && !may(id))) continue;
      if (std::find(routes.begin() + first, routes.end(), id) != routes.end()) continue;
      routes.push_back(id);
      ++k;
    }
    routes.resize(index((token + 1) * shape.topk), -1);
  }
  return routes;
}

ExchangeFlows::ExchangeFlows(const FlowShape& shape) : shape_(shape) {
  if (shape.ranks < 1 || shape.host_ranks < 1 || shape.experts < 1 || shape.topk < 1) {
    throw Error(ErrorKind::invalid_argument,
                "exchange flows: ranks, ranks of a host, experts and topk must be at least 1");
  }
  const int hosts = hosts_of(shape).count();
  network_.resize(index(shape.ranks) * index(shape.hierarchical ? hosts : shape.ranks));
  inside_.resize(index(shape.ranks) * index(shape.host_ranks));
  copies_.resize(index(shape.ranks));
}

std::int64_t& ExchangeFlows::at(std::vector<std::int64_t>& matrix, int from, int to) const {
  return matrix[index(from) * (matrix.size() / index(shape_.ranks)) + index(to)];
}

int ExchangeFlows::rank_of(std::int64_t expert) const {
  return Placement{shape_.experts, shape_.ranks}.rank_of(expert);
}

void ExchangeFlows::add(int rank, RankRoutes routes) {
  const Placement placement{shape_.experts, shape_.ranks};
  for (const std::int32_t id : routes) {
    if (id >= -1 && id < shape_.experts) continue;
    throw Error(ErrorKind::invalid_argument,
                "exchange flows: a route of rank " + std::to_string(rank) + " names expert " +
                    std::to_string(id) + "; expected -1 to " + std::to_string(shape_.experts - 1));
  }
  const Domains hosts = hosts_of(shape_);
  const auto tokens = static_cast<std::int64_t>(routes.size()) / shape_.topk;
  const RouteCounts own = count_routes(std::move(routes), tokens, shape_.topk, placement);
  for (int target = 0; target < shape_.ranks; ++target) {
    const std::int64_t rows = own.tokens_per_rank[index(target)];
    copies_[index(rank)] += rows;
    const bool near = hosts.together(rank, target);
    const int from = near ? rank : hosts.rail(rank, hosts.of(target));
    if (near || shape_.hierarchical) at(inside_, from, hosts.index(target)) += rows;
    if (!near && !shape_.hierarchical) at(network_, rank, target) += rows;
  }
  if (!shape_.hierarchical) return;
  const std::vector<std::int32_t> crossing = count_crossings(own, placement, hosts, rank);
  for (int host = 0; host < hosts.count(); ++host) {
    at(network_, rank, host) += crossing[index(host)];
  }
}

std::vector<Flow> ExchangeFlows::flows() const {
  const Domains hosts = hosts_of(shape_);
  const auto width = network_.size() / index(shape_.ranks);
  std::vector<Flow> all;
  for (int from = 0; from < shape_.ranks; ++from) {
    const std::vector<int>& near = hosts.members(hosts.of(from));
    for (std::size_t i = 0; i < near.size(); ++i) {
      const std::int64_t rows = inside_[index(from) * index(shape_.host_ranks) + i];
      if (rows > 0 && near[i] != from) all.push_back({from, near[i], false, rows});
    }
    for (std::size_t i = 0; i < width; ++i) {
      const std::int64_t rows = network_[index(from) * width + i];
      if (rows == 0) continue;
      const int to =
          shape_.hierarchical ? hosts.rail(from, static_cast<int>(i)) : static_cast<int>(i);
      all.push_back({from, to, true, rows});
    }
  }
  return all;
}

ExchangeBytes ExchangeFlows::busiest(double row_bytes, const ExchangeRates& rates) const {
  const Domains hosts = hosts_of(shape_);
  Sums network(shape_.ranks), inside(shape_.ranks), spine(shape_.ranks);
  for (const Flow& flow : flows()) {
    (flow.network ? network : inside).add(flow.from, flow.to, flow.rows);
    const bool far = rates.leaf_hosts > 0 &&
                     hosts.of(flow.from) / rates.leaf_hosts != hosts.of(flow.to) / rates.leaf_hosts;
    if (flow.network && far) spine.add(flow.from, flow.to, flow.rows);
  }
  ExchangeBytes bytes;
  bytes.copy = static_cast<double>(*std::max_element(copies_.begin(), copies_.end())) * row_bytes;
  bytes.nvlink = inside.largest() * row_bytes;
  bytes.nic = network.largest() * row_bytes;
  bytes.spine = spine.largest() * row_bytes;
  bytes.peers = shape_.hierarchical ? hosts.count() - 1
                                    : shape_.ranks - static_cast<double>(hosts.members(0).size());
  return bytes;
}

}  // namespace ferry
