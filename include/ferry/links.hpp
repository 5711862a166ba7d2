// What the ways between the ranks of a group carry: for diagnosis.
#pragma once
#include <cstddef>
#include <functional>
#include <vector>

#include "ferry/group.hpp"

namespace ferry {

/// Between every two ranks, as a group uses them: by memory inside a domain, over the network
/// across. [R, R] is row-major; the diagonal is 0.
struct Links {
  std::vector<int> domains{};         ///< [R]: of each rank
  std::vector<double> latency_ns{};   ///< [R, R]: half of a round trip of a flag, symmetric
  std::vector<double> bytes_per_s{};  ///< [R, R]: from the rank of the row to that of the column
  /// [R]: what a rank sends to all ranks of other domains while all ranks do so at once. Ranks that
  /// share a link, or send to one at a time, have less than each pair by itself. 0: one domain.
  std::vector<double> together_bytes_per_s{};

  int ranks() const { return static_cast<int>(domains.size()); }
  double latency(int a, int b) const { return latency_ns[at(a, b)]; }
  double rate(int from, int to) const { return bytes_per_s[at(from, to)]; }

 private:
  std::size_t at(int row, int column) const {
    return static_cast<std::size_t>(row) * domains.size() + static_cast<std::size_t>(column);
  }
};

/// Collective; the same on all ranks. Measures one pair of ranks after the other while the rest
/// waits: about a fifth of a second for a pair, more over networks slower than 10 MB/s. Of several
/// tries a round trip that is faster than most and the best rate count. Registers a few MiB on
/// every rank, which stay with the group. Throws Error(unsupported) on a group whose engine is not
/// the host's, and what exchanges throw when a rank fails. `progress` is called on every rank, with
/// how many of the measurements are over, and how many there are.
Links measure_links(Group& group, const std::function<void(int done, int total)>& progress = {});

}  // namespace ferry
