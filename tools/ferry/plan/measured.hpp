// What ferry bench, ferry doctor --net and bench/overlap_timeline.py measured, read from their JSON
// files.
#pragma once
#include <map>
#include <string>
#include <vector>

#include "plan/fit.hpp"

namespace ferry::cli {

struct Measured {
  std::map<std::string, std::vector<Observation>> calls{};
  std::vector<double> nic{};                   ///< bytes a second, of links between domains
  std::map<std::string, double> contention{};  ///< of operations beside matrix products
  int host_ranks = 0;
  double memory_gb = 0, sms = 0;
};

/// Throws with the file's name for what is none of them.
Measured read_results(const std::vector<std::string>& files);

}  // namespace ferry::cli
