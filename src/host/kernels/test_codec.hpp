// What codes give back and lose, by their definition in codec.hpp, an element at a time.
#pragma once
#include <algorithm>
#include <cmath>
#include <cstddef>
#include <type_traits>
#include <vector>

#include "core/number.hpp"
#include "host/kernels/codec.hpp"

namespace ferry::host::test {

struct Known {
  std::vector<float> values{};
  CodeError told{};
};

/// What comes back, by the definition in codec.hpp.
template <class T>
Known by_definition(const std::vector<float>& values) {
  Known known;
  for (std::size_t at = 0; at < values.size(); at += kScaleBlock) {
    const std::size_t end = std::min(values.size(), at + kScaleBlock);
    float largest = 0;
    for (std::size_t i = at; i < end; ++i) largest = std::max(largest, std::fabs(values[i]));
    const float amax = std::max(largest, 0x1p-100f);
    constexpr float kTop = std::is_same_v<T, E5m2> ? 57344.0f : 448.0f;
    const float scale = amax / kTop, inv = kTop / amax;
    for (std::size_t i = at; i < end; ++i) {
      float back;
      if constexpr (sizeof(T) == 1) {
        back = to_float(from_float<T>(values[i] * inv)) * scale;
      } else {
        back = to_float(from_float<T>(values[i]));
      }
      known.values.push_back(back);
      if (std::fabs(values[i]) == largest) continue;
      known.told.error += std::pow(double(back) - double(values[i]), 2);
      known.told.signal += std::pow(double(values[i]), 2);
    }
  }
  return known;
}

inline Known known_of(ReduceFormat format, const std::vector<float>& values) {
  if (format == ReduceFormat::bf16) return by_definition<Bf16>(values);
  if (format == ReduceFormat::f16) return by_definition<Fp16>(values);
  if (format == ReduceFormat::e5m2) return by_definition<E5m2>(values);
  return by_definition<E4m3>(values);
}

}  // namespace ferry::host::test
