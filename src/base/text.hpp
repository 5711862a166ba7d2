// Words for messages: times, ranks, and text that came from somebody else.
#pragma once
#include <chrono>
#include <cstddef>
#include <optional>
#include <span>
#include <string>
#include <string_view>

namespace ferry {

/// "1.5 s": exact, so that two times are equal when their words are.
std::string exact_seconds(std::chrono::nanoseconds time);

/// "rank 3", "ranks 1, 2 and 5", "ranks 0-7, 9 and 20 more": ascending ranks, of which eight single
/// ones or runs are named. `total` counts ranks beyond those listed; 0: the list is complete.
std::string spell_ranks(std::span<const int> ranks, std::size_t total = 0);

/// "0,2,5".
std::string spell_numbers(std::span<const int> numbers);

/// Text from another rank, fit for a message: one line of at most `most` bytes, without control
/// characters, cut between characters.
std::string printable(std::string_view text, std::size_t most);

/// The finite number that `text` begins with, taken off it; the locale does not matter. Not by
/// std::from_chars, which in libc++ brings 110 kB of tables into every wheel.
std::optional<double> take_number(std::string_view& text);

}  // namespace ferry
