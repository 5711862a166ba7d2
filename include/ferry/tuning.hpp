// Settings of calls that are found out while they run, or read from a file.
#pragma once
#include <cstdint>
#include <string>
#include <vector>

#include "ferry/dtype.hpp"
#include "ferry/network.hpp"

namespace ferry {

enum class RowOrder : std::uint8_t;

/// How calls of one kind are made: where a tuner starts, or what it has found. Calls are of one
/// kind when all that stands before `crossing` is alike.
struct TunedCall {
  std::string call{};  ///< "dispatch" or "combine"
  Dtype dtype = Dtype::bf16;
  RowOrder order{};         ///< where a tuner starts: of any
  std::int64_t hidden = 0;  ///< 0: any
  int ranks = 0;            ///< of the group; 0: any
  /// Of the rank that has most: from so many to less than twice as many; where a tuner starts: 0 is
  /// any, other numbers stand for those of their power of two.
  std::int64_t tokens = 0;
  bool first =
      false;  ///< the plan's first dispatch, which brings routes; where a tuner starts: any

  Crossing crossing = Crossing::automatic;  ///< of a dispatch; automatic: not known
  std::int64_t chunk_bytes = 0;  ///< what crosses between domains as one write; 0: not known
  int num_sms = 0;               ///< CUDA; 0: not known

  // What is found.
  bool settled = false;  ///< where a tuner starts: calls keep to it, and nothing is tried
  int probes = 0;        ///< calls that were timed since the search began
  double seconds = 0;    ///< a call takes with these settings, on its slowest rank (CUDA: on the
                         ///< one that came last), for `tokens`
  std::string why{};     ///< in words
};

/// The settings in a file of `ferry plan --tuning` or `ferry bench --tune`. Throws
/// Error(invalid_argument) with the file and the line for what is no such file.
std::vector<TunedCall> load_tuning(const std::string& file);

}  // namespace ferry
