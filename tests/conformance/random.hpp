// Seeds and numbers that are the same on every machine.
#pragma once
#include <cstdint>

namespace ferry::conformance {

/// SplitMix64 (Steele, Lea and Flood, 2014).
class Random {
 public:
  explicit Random(std::uint64_t seed) : state_(seed) {}
  std::uint64_t next() {
    std::uint64_t z = (state_ += 0x9e3779b97f4a7c15ULL);
    z = (z ^ (z >> 30)) * 0xbf58476d1ce4e5b9ULL;
    z = (z ^ (z >> 27)) * 0x94d049bb133111ebULL;
    return z ^ (z >> 31);
  }
  /// 0 … count − 1.
  std::int64_t below(std::int64_t count) {
    return static_cast<std::int64_t>(next() % static_cast<std::uint64_t>(count));
  }
  bool one_in(std::int64_t count) { return below(count) == 0; }

 private:
  std::uint64_t state_;
};

/// A seed for one thing out of a seed for all of them.
inline std::uint64_t mix(std::uint64_t seed, std::uint64_t a, std::uint64_t b = 0,
                         std::uint64_t c = 0) {
  Random random(seed ^ (a * 0x9e3779b97f4a7c15ULL) ^ (b * 0xc2b2ae3d27d4eb4fULL) ^
                (c * 0x165667b19e3779f9ULL));
  random.next();
  return random.next();
}

/// FERRY_TEST_SEED, or the fixed seed of the project's own runs.
std::uint64_t base_seed();

}  // namespace ferry::conformance
