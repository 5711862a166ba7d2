// An adversarial network between threads of one process, for tests.
#pragma once
#include <chrono>
#include <cstddef>
#include <cstdint>
#include <ferry/bootstrap.hpp>
#include <memory>

#include "fabric/fabric.hpp"

namespace ferry::fabric {

/// What the network does within what a provider promises, and which rank fails. Rank 0's options
/// hold for all ranks. Every choice follows from the seed and, for each (source, target), the order
/// of its puts and publishes; only the clock is real.
struct SimOptions {
  std::uint64_t seed = 1;
  std::uint32_t max_delay_us = 200;  ///< each piece and each signal is late by 0 to this
  /// 0: any number. Else every rank's link carries so many bytes in a microsecond (MB/s), in each
  /// direction: what is more waits its turn.
  std::uint64_t bytes_per_us = 0;
  bool split = true;    ///< puts travel in pieces of random sizes
  bool reorder = true;  ///< pieces and signals overtake each other
  /// `put` waits for room while this many bytes of one target are under way.
  std::size_t queue_bytes = std::size_t{64} << 20;

  /// This rank dies after so many of its puts and publishes: later ones vanish, and its state is
  /// dead for the others. What was under way still arrives. -1: none.
  int fail_rank = -1;
  std::uint64_t fail_after_ops = 0;
  /// The same, but it looks alive: as if stopped. -1: none.
  int stall_rank = -1;
  std::uint64_t stall_after_ops = 0;
};

/// Collective; all ranks are threads of this process. No peer pointers: only `put` and `publish`
/// reach a peer, each target's memory is written by a thread of its own. That thread ends with the
/// last rank. Throws like make_local_fabric; Error(invalid_argument) for options out of range.
std::unique_ptr<Fabric> make_sim_fabric(Bootstrap& bootstrap, const SimOptions& options,
                                        std::chrono::nanoseconds deadline,
                                        const OnWait& on_wait = {});

}  // namespace ferry::fabric
