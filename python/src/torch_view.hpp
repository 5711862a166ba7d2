// Torch's tensors in CPU memory as Ferry reads them, without an object of Python in between.
#pragma once
#include <nanobind/nanobind.h>

#include <optional>

#include "ferry/tensor.hpp"

namespace ferry::python {

/// The elements of a torch tensor, one behind the other, if it is as plain as most are: dense, in
/// CPU memory, of a dtype of Ferry's, without gradient or lazy sign. None: ferry/tensors.py has to
/// look at it, as at those of a torch without DLPack's exchange table (before 2.10).
/// `writable`: autograd is told that the call writes over it.
std::optional<TensorView> plain_torch(nanobind::handle value, bool writable);

}  // namespace ferry::python
