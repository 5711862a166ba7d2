// Routes and rows for `ferry bench`: made from the seed, the same everywhere, checkable bit by bit.
#pragma once
#include <cstddef>
#include <cstdint>
#include <set>
#include <vector>

#include "bench/settings.hpp"
#include "ferry/dtype.hpp"

namespace ferry::cli {

/// splitmix64 (Steele, Lea, Flood 2014): the standard library's distributions differ between
/// implementations.
class Random {
 public:
  explicit Random(std::uint64_t seed) : state_(seed) {}
  std::uint64_t next();
  /// In [0, 1).
  double uniform() { return static_cast<double>(next() >> 11) * 0x1p-53; }
  std::uint64_t below(std::uint64_t bound) { return next() % bound; }

 private:
  std::uint64_t state_;
};

/// i64 [tokens, topk]: expert ids of one rank's tokens, distinct inside a route.
std::vector<std::int64_t> make_routes(const BenchSettings& settings, std::int64_t tokens, int rank);

/// The rank that holds an expert: contiguous blocks, the first experts mod ranks hold one more.
int rank_of_expert(std::int64_t expert, std::int64_t experts, int ranks);

/// The ranks to which a token goes.
std::set<int> destinations(const BenchSettings& settings, const std::vector<std::int64_t>& routes,
                           std::int64_t token);

/// Rows that one rank sends.
struct BenchRows {
  std::int64_t rows = 0;  ///< (token, destination rank) pairs
  std::int64_t rows_to_self = 0;
  std::int64_t slots = 0;  ///< (token, slot) pairs: rows of a latency combine
  std::int64_t slots_to_self = 0;
};
BenchRows count_rows(const BenchSettings& settings, const std::vector<std::int64_t>& routes,
                     std::int64_t tokens, int rank);

/// The bits of an integer in a float type; exact for |value| ≤ 16 (e4m3) or ≤ 256 (the others).
/// Throws std::invalid_argument for a dtype that is no float.
std::uint32_t encode_integer(Dtype dtype, int value);
/// An OCP E4M3 code as a number (NaN codes give NaN).
float decode_e4m3(std::uint8_t code);

/// Rows of small integers (−3 … 3). Every (rank, token) has its own window of one random sequence,
/// so a row is checked with one memory comparison.
class RowPattern {
 public:
  /// Rows of `hidden` elements; every element times `factor` (|3 · factor| must be exact).
  RowPattern(std::uint64_t seed, std::int64_t hidden, Dtype dtype, int factor = 1);

  /// The row of a token: `row_bytes()` bytes.
  const std::byte* row(int rank, std::int64_t token) const;
  std::size_t row_bytes() const { return row_bytes_; }
  /// One element of a row, before the factor.
  int value(int rank, std::int64_t token, std::int64_t column) const;
  bool matches(const void* data, int rank, std::int64_t token) const;
  /// Writes the rows of tokens 0 … tokens − 1 of a rank.
  void fill(void* data, int rank, std::int64_t tokens) const;

 private:
  std::size_t start_of(int rank, std::int64_t token) const;

  std::uint64_t seed_;
  std::size_t element_bytes_;
  std::size_t row_bytes_;
  std::vector<signed char> values_;
  std::vector<std::byte> bytes_;
};

}  // namespace ferry::cli
