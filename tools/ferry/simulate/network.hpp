// Flows that share a network, simulated by SimGrid: at any time each gets its fair share of the
// links that it crosses. In a process of its own, for a process can simulate once.
#pragma once
#include <cstddef>
#include <functional>
#include <vector>

namespace ferry::cli {

/// Nodes that send and receive through links of their own; `leaf` of them at a time are under one
/// leaf switch, whose links to and from the spine carry what those of its nodes do, divided by
/// `oversubscription`.
struct SimulatedNetwork {
  std::vector<double> out{}, in{};  ///< bytes a second of each node
  int leaf = 0;                     ///< 0: all of them
  double oversubscription = 1;
  /// What each node adds to the links of its leaf; empty: as out, in.
  std::vector<double> trunk_out{}, trunk_in{};
};

struct SimulatedFlow {
  int from = 0, to = 0;
  double bytes = 0;
};

/// Flows of one network, and where what each of some other things (`places`) moves is among them.
struct SimulatedPart {
  struct Share {
    std::size_t place = 0, flow = 0;
  };
  SimulatedNetwork network{};
  std::vector<SimulatedFlow> flows{};
  std::vector<Share> shares{};
};

/// The same with so many nodes of a leaf as one, and flows between the same two as one, where there
/// were many. A node of several takes as long for all that it sends as the one of them that takes
/// longest by itself, so the whole takes no less than the busiest node does.
SimulatedPart joined(const SimulatedPart& part, int nodes);

/// When each flow ends, in seconds; all begin at once.
std::vector<double> simulate_flows(const SimulatedNetwork& network,
                                   const std::vector<SimulatedFlow>& flows);

/// Runs each of these in a process of its own, so many at once; what they return, in order. Throws
/// what one of them threw, or that it was killed. `waits`: called again and again while a result is
/// awaited, with the number of those that came.
std::vector<std::vector<double>> run_apart(
    const std::vector<std::function<std::vector<double>()>>& jobs, int at_once,
    const std::function<void(int)>& waits);

}  // namespace ferry::cli
