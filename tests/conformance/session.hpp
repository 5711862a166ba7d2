// What cases on one rank share: groups, latency exchanges, a stream.
#pragma once
#include <map>
#include <memory>
#include <string>
#include <tuple>

#include "case.hpp"
#include "ferry/ferry.hpp"
#include "fleet.hpp"

namespace ferry::conformance {

class Session {
 public:
  explicit Session(Rank& rank) : rank_(rank) {}

  Rank& rank() { return rank_; }
  /// Collective, as all that follows: the first case that needs a group makes it.
  Group& group(const Case& c);
  LatencyExchange& latency(const Case& c);
  /// The stream of this rank, or null when the case has none.
  Stream* stream(const Case& c);
  /// Bytes at an address that were poisoned when the last result there was dropped.
  std::map<void*, std::size_t>& poisoned() { return poisoned_; }
  /// Drops groups and exchanges when there are many of them.
  void tidy();

 private:
  using GroupKey = std::pair<std::int64_t, bool>;
  using LatencyKey = std::tuple<std::int64_t, std::int64_t, int, Dtype, std::int64_t, RowOrder>;
  Rank& rank_;
  std::shared_ptr<Stream> stream_{};  // outlives the groups' memory
  std::map<GroupKey, std::unique_ptr<Group>> groups_{};
  std::map<LatencyKey, std::unique_ptr<LatencyExchange>> exchanges_{};
  std::map<void*, std::size_t> poisoned_{};
};

/// Runs one case on this rank and reports what differs from the reference. Collective.
/// `label` is said before the case's line.
void run_case(Session& session, const Case& c, const std::string& label = {});
/// An order in which neighbours share groups and latency exchanges.
bool shares_before(const Case& a, const Case& b);
void run_throughput(Session& session, const Case& c);
void run_latency(Session& session, const Case& c);

}  // namespace ferry::conformance
