// For tests: errors and what they say.
#pragma once
#include <gtest/gtest.h>

#include <ferry/error.hpp>
#include <functional>
#include <optional>
#include <string>
#include <vector>

namespace ferry::test {

/// The error that the call throws, if it throws one.
inline std::optional<Error> error_of(const std::function<void()>& call) {
  try {
    call();
  } catch (const Error& error) {
    return error;
  }
  return std::nullopt;
}

/// Expects ferry::Error of `kind` whose message holds all of `words`.
inline void expect_error(ErrorKind kind, const std::vector<std::string>& words,
                         const std::function<void()>& call) {
  try {
    call();
  } catch (const Error& e) {
    EXPECT_EQ(e.kind(), kind) << e.what();
    for (const auto& word : words) {
      EXPECT_NE(std::string(e.what()).find(word), std::string::npos)
          << "\"" << e.what() << "\" does not say \"" << word << "\"";
    }
    return;
  }
  ADD_FAILURE() << "no error was thrown, expected one about " << (words.empty() ? "" : words[0]);
}

}  // namespace ferry::test
