// Tensors as Ferry sees them: a pointer, a dtype, a shape, strides, a device, and maybe an owner.
#pragma once
#include <array>
#include <cstddef>
#include <cstdint>
#include <initializer_list>
#include <memory>
#include <span>
#include <string>
#include <utility>

#include "ferry/dtype.hpp"

namespace ferry {

enum class DeviceKind : std::uint8_t { cpu, cuda };

/// Where the memory of a tensor lies.
struct Device {
  DeviceKind kind = DeviceKind::cpu;
  int index = 0;
  friend bool operator==(const Device&, const Device&) = default;
};

/// Up to three extents (or strides), in elements, outermost first.
class Extents {
 public:
  static constexpr int kMaxDims = 3;
  constexpr Extents() = default;
  /// Throws Error(invalid_argument) for more than three values.
  Extents(std::initializer_list<std::int64_t> values);
  explicit Extents(std::span<const std::int64_t> values);

  constexpr int size() const { return size_; }
  constexpr std::int64_t operator[](int i) const { return values_[static_cast<std::size_t>(i)]; }
  constexpr std::int64_t& operator[](int i) { return values_[static_cast<std::size_t>(i)]; }
  const std::int64_t* begin() const { return values_.data(); }
  const std::int64_t* end() const { return values_.data() + size_; }
  /// Product of all extents; 1 for none.
  std::int64_t product() const;
  friend bool operator==(const Extents&, const Extents&) = default;

 private:
  std::array<std::int64_t, kMaxDims> values_{};
  int size_ = 0;
};

/// "[4, 128]".
std::string to_string(const Extents& extents);
/// Strides, in elements, of a dense row-major tensor of this shape.
Extents dense_strides(const Extents& shape);

/// A tensor that somebody else owns. `Pointer` is `void*` or `const void*`.
template <class Pointer>
struct BasicTensorView {
  Pointer data = nullptr;
  Dtype dtype = Dtype::f32;
  Extents shape{};
  Extents strides{};  ///< in elements
  Device device{};

  BasicTensorView() = default;
  /// A dense row-major tensor.
  BasicTensorView(Pointer pointer, Dtype type, Extents extents, Device where = {})
      : data(pointer),
        dtype(type),
        shape(extents),
        strides(dense_strides(extents)),
        device(where) {}
  /// A tensor with strides, in elements.
  BasicTensorView(Pointer pointer, Dtype type, Extents extents, Extents steps, Device where)
      : data(pointer), dtype(type), shape(extents), strides(steps), device(where) {}

  int dims() const { return shape.size(); }
  std::int64_t rows() const { return shape.size() > 0 ? shape[0] : 1; }
  /// Elements in the last dimension.
  std::int64_t columns() const { return shape.size() > 0 ? shape[shape.size() - 1] : 1; }
  std::size_t row_bytes() const { return static_cast<std::size_t>(columns()) * size_of(dtype); }
  std::size_t bytes() const { return static_cast<std::size_t>(shape.product()) * size_of(dtype); }
  /// Row-major without gaps; strides of extents below 2 say nothing.
  bool is_dense() const {
    if (shape.product() == 0) return true;
    if (strides.size() != shape.size()) return false;
    const Extents dense = dense_strides(shape);
    for (int i = 0; i < shape.size(); ++i) {
      if (shape[i] > 1 && strides[i] != dense[i]) return false;
    }
    return true;
  }
};

using TensorView = BasicTensorView<void*>;

/// A tensor that is only read. Converts from TensorView.
struct ConstTensorView : BasicTensorView<const void*> {
  using BasicTensorView::BasicTensorView;
  ConstTensorView(const TensorView& other)
      : BasicTensorView(other.data, other.dtype, other.shape, other.strides, other.device) {}
};

/// A tensor with shared ownership of its memory: registered memory goes back to the group's arena
/// when the last copy is dropped.
class Tensor {
 public:
  Tensor() = default;
  Tensor(TensorView view, std::shared_ptr<void> owner) : view_(view), owner_(std::move(owner)) {}

  const TensorView& view() const { return view_; }
  operator TensorView() const { return view_; }
  operator ConstTensorView() const { return view_; }
  void* data() const { return view_.data; }
  template <class T>
  T* as() const {
    return static_cast<T*>(view_.data);
  }
  Dtype dtype() const { return view_.dtype; }
  const Extents& shape() const { return view_.shape; }
  std::int64_t rows() const { return view_.rows(); }
  explicit operator bool() const { return owner_ != nullptr; }
  const std::shared_ptr<void>& owner() const { return owner_; }

 private:
  TensorView view_{};
  std::shared_ptr<void> owner_{};
};

}  // namespace ferry
