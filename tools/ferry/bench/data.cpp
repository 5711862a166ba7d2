#include "bench/data.hpp"

#include <algorithm>
#include <bit>
#include <cmath>
#include <cstring>
#include <limits>
#include <stdexcept>

namespace ferry::cli {
namespace {

constexpr std::size_t kWindows = 997;  // a prime: neighbours do not repeat soon
constexpr int kLargest = 3;

// Sign, exponent and the highest mantissa bits of a binary32 that the format holds exactly.
std::uint32_t narrow(float value, int mantissa_bits, int exponent_bits, int bias) {
  const auto bits = std::bit_cast<std::uint32_t>(value);
  const std::uint32_t sign = bits >> 31 << (exponent_bits + mantissa_bits);
  if (value == 0) return sign;
  const std::uint32_t exponent = (bits >> 23 & 0xff) - 127 + static_cast<std::uint32_t>(bias);
  return sign | exponent << mantissa_bits | (bits & 0x7fffff) >> (23 - mantissa_bits);
}

// Cumulative weights of the experts, ending in 1.
std::vector<double> cumulative_weights(const BenchSettings& settings) {
  std::vector<double> sums;
  double sum = 0;
  for (std::int64_t e = 0; e < settings.experts; ++e) {
    sum += settings.routes == RouteShape::zipf ? 1.0 / static_cast<double>(e + 1) : 1.0;
    sums.push_back(sum);
  }
  for (double& value : sums) value /= sum;
  return sums;
}

}  // namespace

std::uint64_t Random::next() {
  state_ += 0x9e3779b97f4a7c15u;
  std::uint64_t z = state_;
  z = (z ^ (z >> 30)) * 0xbf58476d1ce4e5b9u;
  z = (z ^ (z >> 27)) * 0x94d049bb133111ebu;
  return z ^ (z >> 31);
}

std::vector<std::int64_t> make_routes(const BenchSettings& settings, std::int64_t tokens,
                                      int rank) {
  const std::vector<double> sums = cumulative_weights(settings);
  Random random(settings.seed * 1000003 + static_cast<std::uint64_t>(rank));
  std::vector<std::int64_t> routes;
  for (std::int64_t t = 0; t < tokens; ++t) {
    const auto first = static_cast<std::ptrdiff_t>(routes.size());
    for (int k = 0; k < settings.topk; ++k) {
      const auto at = std::upper_bound(sums.begin(), sums.end(), random.uniform());
      std::int64_t expert = std::min<std::int64_t>(at - sums.begin(), settings.experts - 1);
      // Taken already: the next free one, so that many slots of few experts end, too.
      while (std::find(routes.begin() + first, routes.end(), expert) != routes.end()) {
        expert = (expert + 1) % settings.experts;
      }
      routes.push_back(expert);
    }
  }
  return routes;
}

int rank_of_expert(std::int64_t expert, std::int64_t experts, int ranks) {
  const std::int64_t each = experts / ranks;
  const std::int64_t more = experts % ranks;
  const std::int64_t in_larger = more * (each + 1);
  return static_cast<int>(expert < in_larger ? expert / (each + 1)
                                             : more + (expert - in_larger) / each);
}

std::set<int> destinations(const BenchSettings& s, const std::vector<std::int64_t>& routes,
                           std::int64_t token) {
  std::set<int> ranks;
  for (int k = 0; k < s.topk; ++k) {
    const std::int64_t expert = routes[static_cast<std::size_t>(token * s.topk + k)];
    ranks.insert(rank_of_expert(expert, s.experts, s.ranks));
  }
  return ranks;
}

BenchRows count_rows(const BenchSettings& s, const std::vector<std::int64_t>& routes,
                     std::int64_t tokens, int rank) {
  BenchRows rows;
  rows.slots = tokens * s.topk;
  for (std::int64_t t = 0; t < tokens; ++t) {
    const std::set<int> ranks = destinations(s, routes, t);
    rows.rows += static_cast<std::int64_t>(ranks.size());
    rows.rows_to_self += static_cast<std::int64_t>(ranks.count(rank));
  }
  for (const std::int64_t expert : routes) {
    rows.slots_to_self += rank_of_expert(expert, s.experts, s.ranks) == rank ? 1 : 0;
  }
  return rows;
}

std::uint32_t encode_integer(Dtype dtype, int value) {
  const auto number = static_cast<float>(value);
  switch (dtype) {
    case Dtype::f32: return std::bit_cast<std::uint32_t>(number);
    case Dtype::bf16: return narrow(number, 7, 8, 127);
    case Dtype::f16: return narrow(number, 10, 5, 15);
    case Dtype::e4m3: return narrow(number, 3, 4, 7);
    default: throw std::invalid_argument("encode_integer: not a float type that bench uses");
  }
}

float decode_e4m3(std::uint8_t code) {
  const int exponent = code >> 3 & 15;
  const int mantissa = code & 7;
  if (exponent == 15 && mantissa == 7) return std::numeric_limits<float>::quiet_NaN();
  const float magnitude = exponent == 0
                              ? std::ldexp(static_cast<float>(mantissa), -9)
                              : std::ldexp(static_cast<float>(8 + mantissa), exponent - 10);
  return code >> 7 != 0 ? -magnitude : magnitude;
}

RowPattern::RowPattern(std::uint64_t seed, std::int64_t hidden, Dtype dtype, int factor)
    : seed_(seed),
      element_bytes_(size_of(dtype)),
      row_bytes_(static_cast<std::size_t>(hidden) * size_of(dtype)) {
  Random random(seed);
  const std::size_t count = static_cast<std::size_t>(hidden) + kWindows;
  bytes_.resize(count * element_bytes_);
  for (std::size_t i = 0; i < count; ++i) {
    const int value = static_cast<int>(random.below(2 * kLargest + 1)) - kLargest;
    values_.push_back(static_cast<signed char>(value));
    // Little-endian, as every machine that Ferry runs on.
    const std::uint32_t code = encode_integer(dtype, value * factor);
    std::memcpy(bytes_.data() + i * element_bytes_, &code, element_bytes_);
  }
}

std::size_t RowPattern::start_of(int rank, std::int64_t token) const {
  Random random(seed_ ^ (static_cast<std::uint64_t>(rank) << 40) ^
                static_cast<std::uint64_t>(token));
  return random.below(kWindows);
}

const std::byte* RowPattern::row(int rank, std::int64_t token) const {
  return bytes_.data() + start_of(rank, token) * element_bytes_;
}

int RowPattern::value(int rank, std::int64_t token, std::int64_t column) const {
  return values_[start_of(rank, token) + static_cast<std::size_t>(column)];
}

bool RowPattern::matches(const void* data, int rank, std::int64_t token) const {
  return std::memcmp(data, row(rank, token), row_bytes_) == 0;
}

void RowPattern::fill(void* data, int rank, std::int64_t tokens) const {
  auto* at = static_cast<std::byte*>(data);
  for (std::int64_t t = 0; t < tokens; ++t, at += row_bytes_) {
    std::memcpy(at, row(rank, t), row_bytes_);
  }
}

}  // namespace ferry::cli
