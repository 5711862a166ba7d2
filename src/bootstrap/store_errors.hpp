// The store's codes as errors in words: which rank, what was got, expected, what to do.
#pragma once
#include <chrono>
#include <cstdint>
#include <optional>
#include <string>

#include <ferry/error.hpp>

#include "bootstrap/store_messages.hpp"

namespace ferry::bootstrap {

/// Who speaks: this rank, and the store it talks to ("127.0.0.1:29500").
struct Speaker {
  int rank = 0;
  int size = 1;
  std::string store{};
};

Error refusal_error(const Speaker& who, const Refusal& refusal);

/// Where in the life of the bootstrap an error happened.
struct GatherState {
  std::uint64_t sequence = 0;
  std::size_t arrived = 0;
};

Error failure_error(const Speaker& who, const GatherState& gather, const Failure& failure);
/// `absences`: the store's last answer; none means that the store itself is silent. `accept_error`:
/// the errno that keeps the store on this rank from letting others in.
Error deadline_error(const Speaker& who, const GatherState& gather,
                     std::chrono::nanoseconds deadline, const std::optional<Absences>& absences,
                     int accept_error = 0);
/// The same of a wait that goes on, for a line on stderr.
std::string missing_text(const std::optional<Absences>& absences, int accept_error);
/// Rank 0's own store ended for want of memory.
Error store_full_error(const Speaker& who, const GatherState& gather);
/// The connection to rank 0 ended: in good order, or not.
Error store_gone_error(const Speaker& who, const GatherState& gather, bool in_good_order);

}  // namespace ferry::bootstrap
