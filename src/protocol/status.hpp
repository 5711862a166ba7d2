// What a protocol step returns: fine, or which peer kept it from going on.
#pragma once

#include <cstdint>
#include <type_traits>

#include "core/device.hpp"

namespace ferry::protocol {

/// The number of an exchange; flags carry it. The first generation is 1: memory starts as zeros.
using Generation = std::uint64_t;

/// Result of a protocol step. Protocols never throw: a kernel and a worker thread both pass this up
/// to the engine, which turns it into an error with words.
struct Status {
  enum class Code : std::uint32_t {
    kOk,           ///< done
    kDeadline,     ///< the time set by the caller is over
    kPeerFailed,   ///< `peer` died, or said that it failed
    kInterrupted,  ///< the caller asked to stop (Ctrl-C)
    kOvertaken,    ///< `peer` is further ahead than this exchange allows: we missed one
    kMismatch,     ///< something arrived that does not fit what was announced
    kEvicted,      ///< the other ranks went on without this one
  };

  Code code = Code::kOk;
  std::int32_t peer = -1;      ///< rank that is late, dead or ahead; -1: no rank in particular
  std::uint64_t expected = 0;  ///< flag value (usually a generation) that was waited for
  std::uint64_t seen = 0;      ///< flag value last read; set on success too

  FERRY_FN constexpr bool ok() const { return code == Code::kOk; }

  friend FERRY_FN constexpr bool operator==(const Status&, const Status&) = default;
};
static_assert(std::is_trivially_copyable_v<Status>);

}  // namespace ferry::protocol
