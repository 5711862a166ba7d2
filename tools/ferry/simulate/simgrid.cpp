// With SimGrid. Messages have no cost of their own here: the closed form has it.
#include <algorithm>
#include <simgrid/s4u.hpp>
#include <string>

#include "simulate/network.hpp"

namespace ferry::cli {
namespace {

namespace s4u = simgrid::s4u;

/// The nodes of a switch; `hosts` gets them.
void make_leaf(const SimulatedNetwork& network, s4u::NetZone* zone, std::size_t first,
               std::size_t end, std::vector<s4u::Host*>& hosts) {
  for (std::size_t node = first; node < end; ++node) {
    const std::string own = "node" + std::to_string(node);
    s4u::Host* host = zone->create_host(own, 1e9);
    const auto* out = zone->create_link(own + "-out", network.out[node])->set_latency(0)->seal();
    const auto* in = zone->create_link(own + "-in", network.in[node])->set_latency(0)->seal();
    zone->add_route(host->get_netpoint(), nullptr, nullptr, nullptr, {s4u::LinkInRoute(out)},
                    false);
    zone->add_route(nullptr, host->get_netpoint(), nullptr, nullptr, {s4u::LinkInRoute(in)}, false);
    hosts.push_back(host);
  }
}

std::vector<s4u::Host*> make_nodes(const SimulatedNetwork& network) {
  std::vector<s4u::Host*> hosts;
  const std::size_t nodes = network.out.size();
  const std::size_t leaf = network.leaf > 0 ? static_cast<std::size_t>(network.leaf) : nodes;
  if (leaf >= nodes) {
    s4u::NetZone* zone = s4u::create_star_zone("leaf");
    make_leaf(network, zone, 0, nodes, hosts);
    zone->seal();
    return hosts;
  }
  s4u::NetZone* spine = s4u::create_star_zone("spine");
  for (std::size_t first = 0; first < nodes; first += leaf) {
    const std::size_t end = std::min(nodes, first + leaf);
    const std::string name = "leaf" + std::to_string(first);
    s4u::NetZone* zone = s4u::create_star_zone(name);
    zone->set_parent(spine);
    make_leaf(network, zone, first, end, hosts);
    simgrid::kernel::routing::NetPoint* const router = zone->create_router(name + "-switch");
    double up = 0, down = 0;
    for (std::size_t node = first; node < end; ++node) {
      const bool own = network.trunk_out.empty();
      up += (own ? network.out : network.trunk_out)[node] / network.oversubscription;
      down += (own ? network.in : network.trunk_in)[node] / network.oversubscription;
    }
    const auto* out = spine->create_link(name + "-up", up)->set_latency(0)->seal();
    const auto* in = spine->create_link(name + "-down", down)->set_latency(0)->seal();
    zone->add_route(router, nullptr, nullptr, nullptr, {}, false);
    zone->add_route(nullptr, router, nullptr, nullptr, {}, false);
    zone->seal();
    spine->add_route(zone->get_netpoint(), nullptr, router, nullptr, {s4u::LinkInRoute(out)},
                     false);
    spine->add_route(nullptr, zone->get_netpoint(), nullptr, router, {s4u::LinkInRoute(in)}, false);
  }
  spine->seal();
  return hosts;
}

/// What the busiest node takes alone: no simulation ends before.
double least_seconds(const SimulatedNetwork& network, const std::vector<SimulatedFlow>& flows) {
  std::vector<double> out(network.out.size()), in = out;
  double least = 0;
  for (const SimulatedFlow& flow : flows) {
    const auto from = static_cast<std::size_t>(flow.from), to = static_cast<std::size_t>(flow.to);
    least = std::max({least, (out[from] += flow.bytes) / network.out[from],
                      (in[to] += flow.bytes) / network.in[to]});
  }
  return least;
}

}  // namespace

std::vector<double> simulate_flows(const SimulatedNetwork& network,
                                   const std::vector<SimulatedFlow>& flows) {
  std::vector<double> ends(flows.size());
  if (flows.empty()) return ends;
  char name[] = "ferry";
  char quiet[] = "--log=root.thres:error";
  char* arguments[] = {name, quiet, nullptr};
  int count = 2;
  s4u::Engine engine(&count, arguments);
  // Shares are all there is: nothing of TCP.
  for (const char* setting :
       {"network/model:CM02", "network/TCP-gamma:0", "network/crosstraffic:0",
        "network/bandwidth-factor:1", "network/latency-factor:1", "network/weight-S:0"}) {
    s4u::Engine::set_config(setting);
  }
  // Flows that end within two thousandths of the whole time end together: else each of them makes
  // all others' shares anew.
  constexpr double kTogether = 2e-3;
  s4u::Engine::set_config("surf/precision", least_seconds(network, flows) * kTogether);
  const std::vector<s4u::Host*> hosts = make_nodes(network);
  // Detached: SimGrid would look through all flows of an actor whenever one of them ends. The actor
  // stays until all have ended.
  constexpr double kLong = 1e6;
  std::vector<s4u::CommPtr> comms;
  s4u::Actor::create("flows", hosts.front(), [&] {
    for (const SimulatedFlow& flow : flows) {
      comms.push_back(s4u::Comm::sendto_init(hosts[static_cast<std::size_t>(flow.from)],
                                             hosts[static_cast<std::size_t>(flow.to)]));
      comms.back()->set_payload_size(static_cast<std::uint64_t>(flow.bytes))->detach();
    }
    s4u::this_actor::sleep_for(kLong);
  });
  engine.run();
  for (std::size_t i = 0; i < comms.size(); ++i) ends[i] = comms[i]->get_finish_time();
  return ends;
}

}  // namespace ferry::cli
