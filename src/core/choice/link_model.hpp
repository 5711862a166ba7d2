// What the links between domains cost: α, the time of a message without bytes, and β, bytes a
// second.
#pragma once
#include <cstddef>
#include <vector>

#include "core/domains.hpp"
#include "ferry/collectives.hpp"

namespace ferry {

struct LinkCost {
  double latency_s = 0;    ///< α
  double bytes_per_s = 1;  ///< β

  double seconds(double bytes) const { return latency_s + bytes / bytes_per_s; }
};

/// A measurement sends so many bytes before those that count: token buckets, at hosts or in the
/// network, let the first bytes of a burst through at once.
inline constexpr std::size_t kProbeDrain = 512 << 10;
inline constexpr std::size_t kProbeBytes = 512 << 10;  ///< that count

/// Bytes a second of a flow whose first kProbeDrain bytes were there after `drained_s`, and `bytes`
/// more after `all_s`. Who looked late for the first ones saw too short a time for the others, so
/// they count for their part of the whole time at least.
double probed_rate(double drained_s, double all_s, std::size_t bytes = kProbeBytes);

/// What a domain got from another in a measurement, while each port carried one flow each way.
struct LinkProbe {
  int from = 0;
  int to = 0;
  double latency_s = 0;
  double bytes_per_s = 0;
};

/// The cost of the links between domains. Those of a domain share its network interface, so each
/// domain has a cost, and a link α of both and β of the slower; but slow pairs have a β of their
/// own.
class LinkTable {
 public:
  explicit LinkTable(int domains = 1, const LinkCost& first = {});

  int domains() const { return static_cast<int>(ports_.size()); }
  const LinkCost& port(int domain) const { return ports_[index(domain)]; }
  void set_port(int domain, const LinkCost& cost) { ports_[index(domain)] = cost; }
  /// In ascending order.
  const std::vector<SlowPair>& slow_pairs() const { return slow_; }
  void set_slow_pair(int a, int b, double bytes_per_second);
  LinkCost link(int a, int b) const;
  double largest_latency() const;

  /// A domain has β of its fastest flow: others were held up by their peers, or by a busy machine.
  /// So one that is faster than all others counts as the second fastest. A β that is within 15 % of
  /// what it was, and an α within a half and twice, stay. A pair is slow where the best flow of one
  /// direction had less than a 1.5th of what both domains have. Returns whether a β changed.
  bool measured(const std::vector<LinkProbe>& probes);
  /// Whether that would make a pair slow that is not yet: a single flow is held up by chance, too.
  bool doubtful(const std::vector<LinkProbe>& probes) const;

 private:
  bool measure_ports(const std::vector<LinkProbe>& probes);
  bool measure_pairs(const std::vector<LinkProbe>& probes);

  std::vector<LinkCost> ports_;
  std::vector<SlowPair> slow_{};
};

}  // namespace ferry
