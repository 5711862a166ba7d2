// How long a dispatch or combine takes: a closed form of what each rank copies, sends over NVLink
// and sends over its NIC, and which of them it waits for. Pure.
#pragma once
#include <array>
#include <limits>
#include <utility>

namespace ferry {

/// What a cluster can do, in bytes a second of one rank. What is not known is not waited for.
struct ExchangeRates {
  static constexpr double kUnknown = std::numeric_limits<double>::infinity();
  double latency_s = 0;  ///< of a call without rows
  /// Share of the latency that goes by while rows move: flags to and fro, of which a call that
  /// moves little waits for all.
  double hidden_latency = 0;
  /// Above 1: latency l and rows r take (l^overlap + r^overlap)^(1/overlap), where SMs copy and
  /// send in turn, so that r is the sum of both. 1: l and the longest phase, one after the other.
  double overlap = 1;
  double message_s = 0;  ///< of each message over a NIC: what a proxy or the NIC takes to post it
  double copy = kUnknown;
  double nvlink_out = kUnknown;
  double nvlink_in = kUnknown;
  double nic_out = kUnknown;
  double nic_in = kUnknown;
  double staging = kUnknown;  ///< over PCIe, where rows pass through CPU memory
  /// How many times as long SM copies and NVLink take beside other work of the GPU, with whose
  /// loads and stores theirs compete. A NIC does not: it needs far less of a GPU's memory than that
  /// gives.
  double contention = 1;
  /// Hosts under one leaf switch (0: all of them), and by how much its links to the spine carry
  /// less than those to its hosts.
  int leaf_hosts = 0;
  double oversubscription = 1;
};

/// Where the ranks are, and how rows go.
struct ExchangeShape {
  int ranks = 1;
  int host_ranks = 8;  ///< that share NVLink
  double tokens = 0;   ///< of a rank
  int topk = 8;
  double row_bytes = 0;
  int most_hosts = 0;         ///< that a token's routes name; 0: any
  bool each_slot = false;     ///< a copy for each slot, not one for each rank or host
  bool hierarchical = false;  ///< one copy for each host, spread there
};

/// What one rank moves, on average of uniform routes, in bytes out; as much comes in.
struct ExchangeBytes {
  double copy = 0;
  double nvlink = 0;
  double nic = 0;
  double spine = 0;  ///< of `nic`: to hosts under other leaf switches
  double hosts = 0;  ///< that a token goes to
  double ranks = 0;  ///< that a token goes to; each_slot: its copies
  double peers = 0;  ///< ranks of other hosts that get a message
};
ExchangeBytes uniform_bytes(const ExchangeShape& shape, const ExchangeRates& rates = {});
/// Of rows of one byte those of rows of so many. `sums`: of a combine in throughput mode, whose SMs
/// also write the sum of each of so many tokens.
ExchangeBytes bytes_of_rows(ExchangeBytes rows, double row_bytes, double sums = 0);

/// Seconds of each phase. They run at once, so that a call takes latency, messages and the longest
/// of the others, unless `overlap` or `hidden_latency` say otherwise.
struct ExchangeTime {
  double overlap = 1;         ///< as in ExchangeRates
  double hidden_latency = 0;  ///< as in ExchangeRates
  double latency = 0, messages = 0;
  double copy = 0, nvlink_out = 0, nvlink_in = 0, nic_out = 0, nic_in = 0, staging = 0, spine = 0;

  double seconds() const;
  /// All of them by name, in the order of the page.
  std::array<std::pair<const char*, double>, 9> phases() const;
  /// The longest: "SM copies", "NVLink in", "NIC out", "messages", …
  const char* bottleneck() const;
};
ExchangeTime exchange_time(const ExchangeBytes& bytes, const ExchangeRates& rates);

struct Interval {
  double low = 0, high = 0;
};
/// By how much, relatively, the form itself is off: the sources agree on rates, not on kernels.
/// With it nine of ten figures that were not fitted are within `predicted_interval`
/// (docs/planning.md has how many).
inline constexpr double kModelError = 0.17;
/// Within which a time is, nine times of ten, that is predicted with the likely rates, with rates
/// at the fast end of their errors, and at the slow end.
Interval predicted_interval(double likely_s, double fast_s, double slow_s);

}  // namespace ferry
