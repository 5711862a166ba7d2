// Helpers of the bootstrap tests: run ranks as threads, bounded, and keep what each one threw.
#pragma once
#include <gtest/gtest.h>

#include <ferry/bootstrap.hpp>
#include <ferry/error.hpp>

#include <functional>
#include <optional>
#include <string>
#include <string_view>
#include <thread>
#include <vector>

namespace ferry::bootstrap {

using Parts = std::vector<std::vector<std::byte>>;

inline std::vector<std::byte> bytes_of(std::string_view text) {
  const auto* p = reinterpret_cast<const std::byte*>(text.data());
  return {p, p + text.size()};
}

inline std::string text_of(const std::vector<std::byte>& bytes) {
  return {reinterpret_cast<const char*>(bytes.data()), bytes.size()};
}

/// Runs `body(rank)` on one thread a rank; element r is the ferry::Error that rank r threw.
inline std::vector<std::optional<Error>> run_ranks(int ranks,
                                                   const std::function<void(int)>& body) {
  std::vector<std::optional<Error>> errors(static_cast<std::size_t>(ranks));
  std::vector<std::thread> threads;
  for (int r = 0; r < ranks; ++r) {
    threads.emplace_back([&, r] {
      try {
        body(r);
      } catch (const Error& e) {
        errors[std::size_t(r)] = e;
      }
    });
  }
  for (std::thread& t : threads) t.join();
  return errors;
}

/// The same where no rank may throw one.
inline void run_ranks_well(int ranks, const std::function<void(int)>& body) {
  for (const auto& error : run_ranks(ranks, body)) EXPECT_FALSE(error) << error->what();
}

/// What `body` threw; a default-looking error of kind `destroyed` if it threw nothing.
inline Error error_from(const std::function<void()>& body) {
  try {
    body();
  } catch (const Error& e) {
    return e;
  }
  return Error(ErrorKind::destroyed, "(no error was thrown)");
}

inline bool contains(const Error& error, std::string_view text) {
  return std::string_view(error.what()).find(text) != std::string_view::npos;
}

}  // namespace ferry::bootstrap
