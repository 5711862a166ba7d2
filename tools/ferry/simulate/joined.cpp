// Nodes that are simulated as one: SimGrid's time grows with the square of flows.
#include <algorithm>

#include "simulate/network.hpp"

namespace ferry::cli {
namespace {

/// Rates of the joined nodes: of these each moves `bytes` at its own rate.
std::vector<double> joined_rates(const std::vector<double>& rates, const std::vector<double>& bytes,
                                 std::size_t each) {
  std::vector<double> made;
  for (std::size_t first = 0; first < rates.size(); first += each) {
    double all = 0, longest = 0, rate = 0;
    for (std::size_t node = first; node < std::min(rates.size(), first + each); ++node) {
      all += bytes[node];
      longest = std::max(longest, bytes[node] / rates[node]);
      rate += rates[node];
    }
    made.push_back(all > 0 ? all / longest : rate);
  }
  return made;
}

std::vector<double> sums(const std::vector<double>& values, std::size_t each) {
  std::vector<double> all((values.size() + each - 1) / each);
  for (std::size_t i = 0; i < values.size(); ++i) all[i / each] += values[i];
  return all;
}

}  // namespace

SimulatedPart joined(const SimulatedPart& part, int nodes) {
  const SimulatedNetwork& from = part.network;
  const auto count = from.out.size();
  const auto leaf = from.leaf > 0 ? static_cast<std::size_t>(from.leaf) : count;
  auto each = std::min(static_cast<std::size_t>(std::max(nodes, 1)), leaf);
  while (each > 1 && leaf % each != 0) --each;  // a leaf keeps its nodes
  if (each <= 1) return part;
  std::vector<double> out(count), in(count);
  for (const SimulatedFlow& flow : part.flows) {
    out[static_cast<std::size_t>(flow.from)] += flow.bytes;
    in[static_cast<std::size_t>(flow.to)] += flow.bytes;
  }
  SimulatedPart made;
  made.network.out = joined_rates(from.out, out, each);
  made.network.in = joined_rates(from.in, in, each);
  made.network.trunk_out = sums(from.out, each);
  made.network.trunk_in = sums(from.in, each);
  made.network.leaf = from.leaf > 0 ? static_cast<int>(leaf / each) : 0;
  made.network.oversubscription = from.oversubscription;
  const std::size_t nodes_left = made.network.out.size();
  std::vector<std::size_t> flow_of(nodes_left * nodes_left, part.flows.size());
  for (const SimulatedPart::Share& share : part.shares) {
    const SimulatedFlow& flow = part.flows[share.flow];
    const std::size_t a = static_cast<std::size_t>(flow.from) / each;
    const std::size_t b = static_cast<std::size_t>(flow.to) / each;
    std::size_t& place = flow_of[a * nodes_left + b];
    if (place == part.flows.size()) {
      place = made.flows.size();
      made.flows.push_back({static_cast<int>(a), static_cast<int>(b), 0});
    }
    made.flows[place].bytes += flow.bytes;
    made.shares.push_back({share.place, place});
  }
  return made;
}

}  // namespace ferry::cli
