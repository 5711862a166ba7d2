#include "ferry/dtype.hpp"

#include <nanobind/nanobind.h>

#include "bind.hpp"

namespace nb = nanobind;

namespace ferry::python {

void bind_dtype(nb::module_& m) {
  nb::enum_<Dtype>(m, "Dtype", "The type of one element of a tensor.")
      .value("f32", Dtype::f32)
      .value("bf16", Dtype::bf16)
      .value("f16", Dtype::f16)
      .value("e4m3", Dtype::e4m3)
      .value("e5m2", Dtype::e5m2)
      .value("i32", Dtype::i32)
      .value("i64", Dtype::i64)
      .value("u8", Dtype::u8);
}

}  // namespace ferry::python
