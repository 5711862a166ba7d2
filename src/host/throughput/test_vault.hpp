// For tests of vaults: what a rank has, puts and gets.
#pragma once
#include <algorithm>
#include <cstdint>
#include <numeric>
#include <vector>

#include "engine/test_groups.hpp"

namespace ferry::host::test {

/// What a rank has: weights and a moment of the expert that has its number.
struct Expert {
  std::vector<float> weights = std::vector<float>(100);
  std::vector<double> moment = std::vector<double>(7);

  Expert() = default;
  Expert(int expert, std::uint64_t step) {
    std::iota(weights.begin(), weights.end(), static_cast<float>(1000 * expert) + float(step));
    std::fill(moment.begin(), moment.end(), expert + 0.5 * double(step));
  }
  std::vector<VaultPart> parts(std::int64_t key) const {
    return {{key, {weights.data(), Dtype::f32, {10, 10}}},
            {key, {moment.data(), Dtype::u8, {56}}, "float64[7]"}};
  }
  std::vector<VaultTarget> targets() {
    return {{{weights.data(), Dtype::f32, {10, 10}}},
            {{moment.data(), Dtype::u8, {56}}, "float64[7]"}};
  }
  friend bool operator==(const Expert&, const Expert&) = default;
};

inline std::size_t bytes_of_one() {
  return Vault::bytes_of(Expert().parts(0));
}

inline Expert got(const Vault& vault, std::int64_t key) {
  Expert expert;
  vault.get(key, expert.targets());
  return expert;
}

inline void put_own(Vault& vault, Group& group, std::uint64_t step) {
  vault.put(step, Expert(group.rank(), step).parts(group.rank()));
}

}  // namespace ferry::host::test
