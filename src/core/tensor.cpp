#include "ferry/tensor.hpp"

#include <algorithm>

#include "ferry/error.hpp"

namespace ferry {

Extents::Extents(std::initializer_list<std::int64_t> values)
    : Extents(std::span<const std::int64_t>(values.begin(), values.size())) {}

Extents::Extents(std::span<const std::int64_t> values) {
  if (values.size() > kMaxDims) {
    throw Error(ErrorKind::invalid_argument,
                "a tensor has at most 3 dimensions, got " + std::to_string(values.size()));
  }
  std::copy(values.begin(), values.end(), values_.begin());
  size_ = static_cast<int>(values.size());
}

std::int64_t Extents::product() const {
  std::int64_t result = 1;
  for (std::int64_t extent : *this) result *= extent;
  return result;
}

std::string to_string(const Extents& extents) {
  std::string text = "[";
  for (int i = 0; i < extents.size(); ++i) {
    if (i > 0) text += ", ";
    text += std::to_string(extents[i]);
  }
  return text + "]";
}

Extents dense_strides(const Extents& shape) {
  Extents strides = shape;
  std::int64_t step = 1;
  for (int i = shape.size(); i-- > 0;) {
    strides[i] = step;
    step *= shape[i];
  }
  return strides;
}

}  // namespace ferry
