// What the links between domains cost: α, the time of a message without bytes, and β, bytes a
// second.
#pragma once
#include <cstdint>
#include <vector>

#include "core/domains.hpp"

namespace ferry {

struct LinkCost {
  double latency_s = 0;    ///< α
  double bytes_per_s = 1;  ///< β

  double seconds(double bytes) const { return latency_s + bytes / bytes_per_s; }
};

/// The cost of one link, fitted to what was observed by least squares of relative errors, which
/// forget: an observation counts 0.9 times as much after the next one. An observation that is off
/// by more than two is ignored unless two more follow on the same side, with at most four others
/// before each: then the link has changed, and what was before is forgotten. Every rank that is
/// given the same has the same bits.
class LinkFit {
 public:
  explicit LinkFit(const LinkCost& first = {});
  const LinkCost& cost() const { return cost_; }
  /// Returns whether the link has changed.
  bool observe(double bytes, double seconds);

 private:
  void count(double bytes, double seconds);
  void fit();

  LinkCost cost_;
  double n_ = 0, x_ = 0, y_ = 0, xx_ = 0, xy_ = 0;  // weighted sums; x: bytes, y: seconds
  int odd_ = 0;    // observations that were far off: above if positive, else below
  int usual_ = 0;  // others since
  double odd_bytes_ = 0, odd_seconds_ = 0;
};

/// Partial results that one domain gave another.
struct Flow {
  int from = 0;
  int to = 0;
  double sent_bytes = 0;  ///< that `from` sends in the meantime, to all
  double got_bytes = 0;   ///< that `to` gets, from all
  double seconds = 0;     ///< until they were there
  bool waited = true;     ///< else they were there when somebody looked: they came no later
};

/// The cost of the links between domains. Those of a domain share its network interface, so each
/// domain has a cost, and a link α of both and β of the slower.
class LinkTable {
 public:
  explicit LinkTable(int domains = 1, const LinkCost& first = {});

  int domains() const { return static_cast<int>(ports_.size()); }
  const LinkCost& port(int domain) const { return ports_[index(domain)].cost(); }
  void set_port(int domain, const LinkCost& cost) { ports_[index(domain)] = LinkFit(cost); }
  LinkCost link(int a, int b) const;
  double largest_latency() const;
  double slowest() const;

  double expected(const Flow& flow) const;
  /// Flows of one call. What came later than expected is due to a domain all of whose flows did, so
  /// there should be flows of all domains among them.
  void observe(const std::vector<Flow>& flows);
  /// How often a domain has changed.
  int changes() const { return changes_; }

 private:
  void observe_port(int domain, const std::vector<Flow>& flows, const std::vector<double>& late);

  int changes_ = 0;
  std::vector<LinkFit> ports_;
};

}  // namespace ferry
