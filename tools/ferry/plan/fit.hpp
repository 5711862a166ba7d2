// Rates of the closed form from measured calls: a few points are fitted, the others tell how far
// off that is.
#pragma once
#include <cstddef>
#include <string>
#include <vector>

#include "ferry/exchange_model.hpp"

namespace ferry::cli {

/// A call that was measured.
struct Observation {
  std::string operation;  ///< a section of a cluster file: dispatch, latency_combine, …
  std::string dtype;
  int ranks = 0;
  int tokens = 0;
  int num_sms = 0;  ///< 0: has none
  ExchangeBytes bytes{};
  double seconds = 0;
};

/// What is fitted. `copy`: of one SM, or of a call that has no number of them. A rate that no point
/// waits for is unknown.
struct FittedRates {
  double latency_s = 0;  ///< infinite: only calls of few tokens were measured
  double few_latency_s = ExchangeRates::kUnknown;  ///< of few tokens in latency mode
  double few_token_s = 0;                          ///< of each of those tokens
  double overlap = 1;                              ///< not fitted
  double hidden_latency = 0;                       ///< not fitted
  double copy = ExchangeRates::kUnknown;
  double nvlink = ExchangeRates::kUnknown;
  double nic = ExchangeRates::kUnknown;

  ExchangeRates rates(const Observation& call) const;
  ExchangeTime time(const Observation& call) const;
};

/// Which of these to fit to. Each rate needs a call that waits for it: the one that carries least,
/// the one that carries most with the most SMs, and with the fewest; then again and again the one
/// that differs most, in bytes, NVLink bytes and bytes of an SM, from all that were taken. The
/// first of those is one of few tokens in latency mode, if there are any.
std::vector<std::size_t> spread_points(const std::vector<Observation>& calls, std::size_t count);

/// The rates whose relative errors have the least sum of squares.
FittedRates fit(const std::vector<Observation>& points);

}  // namespace ferry::cli
