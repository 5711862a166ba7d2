// Tensors of torch and arrays of NumPy in CPU memory as Ferry reads them, without an object of
// Python in between.
#pragma once
#include <nanobind/nanobind.h>

#include <optional>

#include "ferry/tensor.hpp"

namespace ferry::python {

/// An array's elements, and the object that keeps their memory: of a torch tensor its storage,
/// whatever `set_`, `.data =` or `swap_tensors` do to the tensor meanwhile.
struct PlainArray {
  TensorView view;
  nanobind::object owner;
};

enum class TorchShape {
  flat,  // the elements, one behind the other
  own    // as torch has it, one to three dimensions
};

/// A torch tensor, if it is as plain as most are: dense, in CPU memory, of a dtype of Ferry's,
/// without gradient or lazy sign, in a storage that holds it. None: ferry/tensors.py has to look at
/// it, as at those of a torch without DLPack's exchange table (before 2.10).
/// `writable`: autograd is told that the call writes over it.
std::optional<PlainArray> plain_torch(nanobind::handle value, bool writable,
                                      TorchShape shape = TorchShape::flat);

/// The same, or a NumPy array of a dtype that both know, C-contiguous, and writable if asked.
std::optional<PlainArray> plain_array(nanobind::handle value, bool writable);

}  // namespace ferry::python
