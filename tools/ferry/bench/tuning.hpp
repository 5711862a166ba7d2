// Settings that a tuned group has found, as a file for FERRY_TUNING and as words.
#pragma once
#include <string>
#include <vector>

#include "ferry/tuning.hpp"

namespace ferry::cli {

/// Throws when the file cannot be written.
void write_tuning(const std::string& file, const std::vector<TunedCall>& calls);
/// Of such a file: a line for each kind of calls.
std::string tuning_table(const std::string& file);

}  // namespace ferry::cli
