// What ferry simulate simulates: rows between ranks, and what the links carry.
#pragma once
#include <cstdint>
#include <string>
#include <vector>

#include "ferry/exchange_flows.hpp"
#include "ferry/exchange_model.hpp"
#include "plan/described.hpp"

namespace ferry::cli {

struct SimulateOptions {
  std::string cluster = "h800", model = "deepseek-v3";
  std::string routes;
  std::string crossing = "hierarchical";
  int ranks = 64, copies = 1;
  double tokens = 0;
  std::vector<std::string> slow_nics{};  ///< RANK:TIMES
  double oversubscription = 0;           ///< 0: the cluster's
  int leaf_hosts = 0;                    ///< 0: the cluster's
  double dead = 0;                       ///< share of the hosts
  double skew = 1;                       ///< how often each of an eighth of the experts is drawn
  std::uint64_t seed = 1;
  int rails = 0;         ///< 0: all
  int hosts_as_one = 0;  ///< 0: so many that kMostNodes are left
  std::string timeline;
  bool as_json = false;
};

struct World {
  FlowShape shape{};
  double tokens = 0;
  std::vector<Flow> flows{};
  ExchangeBytes row{};        ///< of the busiest rank, rows of a byte
  std::vector<double> nic{};  ///< [R]: of each rank's NIC, in speeds of the usual
  std::vector<bool> dead{};   ///< [R]
};

/// The cluster's, with what the options say instead. Throws where NVLink or the NIC is not known.
ExchangeRates rates_with(const Described& cluster, const std::string& call,
                         const SimulateOptions& options);
/// Throws at options that do not suit the cluster or the model.
World world_of(const SimulateOptions& options, const Described& cluster, const Described& model);

}  // namespace ferry::cli
