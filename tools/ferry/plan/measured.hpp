// What ferry bench and ferry doctor --net measured, read from their JSON files.
#pragma once
#include <map>
#include <string>
#include <vector>

#include "plan/fit.hpp"

namespace ferry::cli {

struct Measured {
  std::map<std::string, std::vector<Observation>> calls{};
  std::vector<double> nic{};  ///< bytes a second, of links between domains
  int host_ranks = 0;
  double memory_gb = 0, sms = 0;
};

/// Throws with the file's name for what is neither.
Measured read_results(const std::vector<std::string>& files);

}  // namespace ferry::cli
