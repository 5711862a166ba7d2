// Tensors that cross between Python and Ferry without a copy.
#pragma once
#include <nanobind/nanobind.h>
#include <nanobind/ndarray.h>

#include <optional>
#include <string>

#include "ferry/tensor.hpp"
#include "gil.hpp"

namespace ferry::python {

/// What DLPack says about the elements, as a Ferry dtype. DLPack 1.1 numbers the fp8 formats.
std::optional<Dtype> natural_dtype(nb::dlpack::dtype type);

/// A caller's array: what Ferry sees of it, and the reference that keeps its memory alive. Copies
/// share the reference and may be made and dropped only while holding the GIL.
class View {
 public:
  /// `array`: anything with `__dlpack__` or the buffer protocol, on the CPU or a GPU, or a capsule
  /// of `__dlpack__`. `name` is the argument in messages. `dtype`: what the elements are when the
  /// array's own dtype cannot say it (uint8 and uint16 carry fp8, bf16 and fp16). `expected`: the
  /// dtypes that the argument takes, for messages; empty: all.
  View(nb::handle array, const std::string& name, std::optional<Dtype> dtype, bool writable,
       const std::string& expected = "");
  /// Memory of `owner` on a GPU, as it says itself. `ordered`: the owner's memory goes back in the
  /// order of the stream that the call runs on, so that nobody has to keep it until then.
  View(nb::object owner, const std::string& name, const ConstTensorView& view, bool ordered);

  const ConstTensorView& read() const { return view_; }
  /// Of a view that was made writable.
  TensorView write() const;
  Dtype dtype() const { return view_.dtype; }
  bool ordered() const { return ordered_; }

 private:
  nb::ndarray<nb::ro> array_{};
  nb::object owner_{};
  ConstTensorView view_{nullptr, Dtype::u8, Extents{}};
  bool ordered_ = false;
};

/// A ferry::Tensor in Python. Its memory lives as long as this object or an array made from it.
using HeldTensor = Held<Tensor>;

/// None for a tensor that is not there.
std::optional<HeldTensor> to_python(const Tensor& tensor);
/// For optional arguments: null is none.
std::optional<ConstTensorView> optional_read(const View* view);
std::optional<TensorView> optional_write(const View* view);

}  // namespace ferry::python
