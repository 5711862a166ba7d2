// What the ranks of a case bring: drawn from its seed, the same on every rank.
#pragma once
#include <cstdint>

#include "case.hpp"
#include "reference.hpp"

namespace ferry::conformance {

/// `round` changes values and weights but not the routes.
World make_world(const Case& c, std::uint64_t round = 0);

/// One row of values that belong to `seed`. Floating-point rows span about ten binades; with
/// `special` now and then a large value, a subnormal, −0, an infinity or a NaN.
void fill_row(std::uint64_t seed, Dtype dtype, bool special, std::int64_t columns, std::byte* out);
Bytes make_rows(std::uint64_t seed, Dtype dtype, bool special, std::int64_t rows,
                std::int64_t columns);
/// Between −2 and 2, sometimes 0.
float make_weight(std::uint64_t seed);

/// The routes of one rank, [tokens, topk]. With `limit` > 0 no expert is named more often: further
/// slots are unused.
std::vector<std::int64_t> make_routes(const Case& c, int rank, std::int64_t tokens,
                                      std::int64_t limit);

}  // namespace ferry::conformance
