// For tests over libfabric: whether there is any here.
#pragma once
#include <ferry/ferry.hpp>

namespace ferry::engine::test {

/// False: no libfabric in this build or on this machine. Also makes libfabric look at the machine
/// once, before the ranks are forked, and not in every one of them: that takes a second.
inline bool has_network() {
  static const bool there = [] {
    try {
      const Group group(thread_bootstrap(1)[0], {.experts = 1, .fabric = FabricKind::ofi});
      return true;
    } catch (const Error& error) {
      if (error.kind() != ErrorKind::unsupported) throw;
      return false;
    }
  }();
  return there;
}

}  // namespace ferry::engine::test
