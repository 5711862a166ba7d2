// Whether what ranks show each other in shared memory is stored through the caches or past them.
#pragma once
#include <array>
#include <cstddef>
#include <cstdint>
#include <map>

#include "core/call.hpp"

namespace ferry {

/// A line that one core has just written comes to another one from the first one's cache. Cores
/// that share a cache do that faster than memory could; others take up to five times as long. The
/// system moves ranks between cores, so calls tell which it is: of each kind and size of call the
/// way is kept whose least time of the last three calls is less. The other one is tried every
/// fourth call until three times, then every 64th, or every 256th where it took twice as long.
/// Pure: ranks that are given the same decide alike.
class StoreChoice {
 public:
  struct Calls {
    CallKind kind = CallKind::none;
    int bits = 0;  ///< of the number of bytes
    friend auto operator<=>(const Calls&, const Calls&) = default;
  };
  static Calls calls_of(CallKind kind, std::size_t bytes);

  /// Whether past the caches: what is expected to take less time, and what the next call does.
  bool best(const Calls& calls) const;
  bool next(const Calls& calls) const;
  /// A call took so long on its slowest rank.
  void observe(const Calls& calls, bool past, double seconds);

 private:
  struct Way {
    std::array<double, 3> last_s{};
    std::uint64_t count = 0;
    double least_s() const;  ///< 0: not tried
  };
  struct Seen {
    std::array<Way, 2> ways{};  // [past]
    bool best() const;
  };
  std::map<Calls, Seen> seen_{};
};

}  // namespace ferry
