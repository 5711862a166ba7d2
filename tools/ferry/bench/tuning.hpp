// Settings that a tuned group has found, as a file for FERRY_TUNING and as words; and what all
// settings take, which says what those lose.
#pragma once
#include <cstdint>
#include <map>
#include <string>
#include <vector>

#include "ferry/tuning.hpp"

namespace ferry::cli {

/// What cached calls take with one setting, each time that it was measured.
struct SettingTimes {
  std::string call{};
  Crossing crossing{};
  std::int64_t chunk_bytes = 0;
  std::vector<double> seconds{};   ///< of each round
  std::vector<double> calls_us{};  ///< one by one, of all rounds

  double middle() const;
  /// By how much the middle half of the times differs, of the middle one.
  double spread() const;
};

/// Settings that calls keep to: for a tuner to start from.
std::vector<TunedCall> kept_settings(Dtype dispatch, Dtype combine, Crossing crossing,
                                     std::int64_t chunk_bytes);
/// Adds what calls of such a group took: in the middle, and by name of the call one by one.
void add_times(std::vector<SettingTimes>& all, const std::vector<TunedCall>& tuned,
               const std::map<std::string, std::vector<double>>& calls_us);

/// Throws when the file cannot be written. `times`: empty: all settings were not measured.
void write_tuning(const std::string& file, const std::vector<TunedCall>& calls,
                  const std::vector<SettingTimes>& times);
/// Of such a file: a line for each kind of calls.
std::string tuning_table(const std::string& file);

}  // namespace ferry::cli
