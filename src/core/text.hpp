// Words for messages: times, and text that came from somebody else.
#pragma once
#include <chrono>
#include <cstddef>
#include <string>
#include <string_view>

namespace ferry {

/// "1.5 s": exact, so that two times are equal when their words are.
std::string exact_seconds(std::chrono::nanoseconds time);

/// Text from another rank, fit for a message: one line of at most `most` bytes, without control
/// characters, cut between characters.
std::string printable(std::string_view text, std::size_t most);

}  // namespace ferry
