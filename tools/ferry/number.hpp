// Checks of what is given on the command line. CLI11's own print a range of doubles.
#pragma once
#include <fmt/format.h>

#include <CLI/CLI.hpp>
#include <charconv>
#include <cmath>
#include <cstdint>
#include <string>
#include <system_error>

namespace ferry::cli {

/// A whole number from `low` to `high`: "--tokens: 0: must be at least 1".
inline CLI::Validator whole_number(std::int64_t low, std::int64_t high) {
  const auto check = [low, high](const std::string& text) -> std::string {
    std::int64_t value = 0;
    const char* const end = text.data() + text.size();
    const char* const begin = text.data() + (text.size() > 1 && text.front() == '+' ? 1 : 0);
    const auto [stop, error] = std::from_chars(begin, end, value);
    if (stop != end || error == std::errc::invalid_argument) {
      return fmt::format("'{}': must be a whole number", text.substr(0, 40));
    }
    const bool too_large = error == std::errc::result_out_of_range;
    const bool negative = text.front() == '-';
    if ((too_large && negative) || (!too_large && value < low)) {
      return fmt::format("{}: must be at least {}", text.substr(0, 40), low);
    }
    if (too_large || value > high) {
      return fmt::format("{}: must be at most {}", text.substr(0, 40), high);
    }
    return "";
  };
  return CLI::Validator(check, "", "whole number");
}

/// A number from `low` to `high`; CLI11's own range takes NaN.
inline CLI::Validator number_between(double low, double high, const std::string& what = "number") {
  const auto check = [low, high, what](const std::string& text) -> std::string {
    double value = 0;
    if (!CLI::detail::lexical_cast(text, value) || std::isnan(value)) {
      return fmt::format("'{}': must be a {}", text.substr(0, 40), what);
    }
    if (value < low) return fmt::format("{}: must be at least {}", text.substr(0, 40), low);
    if (value > high) return fmt::format("{}: must be at most {}", text.substr(0, 40), high);
    return "";
  };
  return CLI::Validator(check, "", what);
}

/// Seconds from 0 to `high`.
inline CLI::Validator seconds(double high) {
  return number_between(0, high, "number of seconds");
}

}  // namespace ferry::cli
