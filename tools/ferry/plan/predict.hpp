// What `ferry plan` says about a number of ranks.
#pragma once
#include <cstddef>
#include <string>
#include <utility>
#include <vector>

#include "plan/described.hpp"
#include "plan/routes.hpp"

namespace ferry::cli {

struct Load {
  int ranks = 0;
  int copies = 1;  ///< of each expert
  double tokens = 4096;
  bool latency = false;  ///< latency mode
  bool beside = false;   ///< matrix products run on the other SMs
  int fewest_sms = 1, most_sms = 24;
  const RecordedRoutes* routes = nullptr;  ///< null: uniform
};

struct Predicted {
  std::string call;  ///< dispatch, combine
  std::string dtype;
  double direct_s = 0, hierarchical_s = 0;  ///< hierarchical: 0 in latency mode
  bool hierarchical = false;                ///< the choice
  int num_sms = 0;                          ///< 0: not known
  std::string bottleneck;
  ExchangeTime phases{};  ///< of the choice
  Interval seconds{};     ///< of the choice
  double received_bytes = 0;

  double likely_s() const { return hierarchical ? hierarchical_s : direct_s; }
};

/// Dispatch: e4m3 and a scale of four bytes for each 128 channels; combine: bf16.
double row_bytes_of(double hidden, bool combine);

inline constexpr int kMostRanks = 4096;
/// Throws at ranks for which the model has too few experts, or that are no whole hosts.
void check_ranks(const Described& cluster, const Described& model, int ranks, int copies);
/// What was recorded in FILE.0, FILE.1, …. Throws when it is of another model.
RecordedRoutes routes_for(const Described& model, const std::string& file);

/// Numbers of ranks that suit a cluster: 2, 4, ... 32 hosts; where its file has no network, or the
/// experts are too few for that, 2, 4, ... ranks of one.
std::vector<int> usual_ranks(const Described& cluster, bool latency, int experts);

std::vector<Predicted> predicted(const Described& cluster, const Described& model,
                                 const Load& load);

/// What one GPU holds, in bytes, by name.
using Memory = std::vector<std::pair<std::string, double>>;
Memory memory_of(const Described& cluster, const Described& model, const Load& load);

}  // namespace ferry::cli
