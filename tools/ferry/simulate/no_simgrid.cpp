#include <stdexcept>

#include "simulate/network.hpp"

namespace ferry::cli {

std::vector<double> simulate_flows(const SimulatedNetwork&, const std::vector<SimulatedFlow>&) {
  throw std::runtime_error(
      "this command was built without SimGrid; install libsimgrid-dev and build with "
      "-DFERRY_SIMGRID=ON");
}

}  // namespace ferry::cli
