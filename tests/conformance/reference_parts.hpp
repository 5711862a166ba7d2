// What the parts of the reference share.
#pragma once
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <vector>

#include "reference.hpp"

namespace ferry::conformance {

inline std::size_t index(std::int64_t value) {
  return static_cast<std::size_t>(value);
}

/// The local id of a slot at `rank`, −1 if it is elsewhere or unused.
inline std::int64_t local_id(const World& world, int rank, const Arrival& arrival, int slot) {
  const std::int64_t id = world.id(arrival.source, arrival.token, slot);
  return id >= 0 && world.rank_of(id) == rank ? id - world.first_expert(rank) : -1;
}

/// Σ in fp32 from +0.
struct Sum {
  explicit Sum(std::int64_t hidden) : acc(index(hidden), 0.0f) {}
  void add(const std::vector<float>& values) {
    for (std::size_t i = 0; i < acc.size(); ++i) acc[i] = acc[i] + values[i];
  }
  void add_weighted(float weight, const std::vector<float>& values) {
    for (std::size_t i = 0; i < acc.size(); ++i) acc[i] = std::fma(weight, values[i], acc[i]);
  }
  void add(const std::byte* row, Dtype dtype) {
    for (std::size_t i = 0; i < acc.size(); ++i) {
      acc[i] = acc[i] + load(row, dtype, static_cast<std::int64_t>(i));
    }
  }
  void add_weighted(float weight, const std::byte* row, Dtype dtype) {
    for (std::size_t i = 0; i < acc.size(); ++i) {
      acc[i] = std::fma(weight, load(row, dtype, static_cast<std::int64_t>(i)), acc[i]);
    }
  }
  void round(std::byte* out, Dtype dtype) const {
    for (std::size_t i = 0; i < acc.size(); ++i) {
      store(out, dtype, static_cast<std::int64_t>(i), acc[i]);
    }
  }
  std::vector<float> acc;
};

}  // namespace ferry::conformance
