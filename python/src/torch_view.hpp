// Torch's tensors in CPU memory as Ferry reads them, without an object of Python in between.
#pragma once
#include <nanobind/nanobind.h>

#include <optional>

#include "ferry/tensor.hpp"

namespace ferry::python {

enum class TorchShape {
  flat,  // the elements, one behind the other
  own    // as torch has it, one to three dimensions
};

/// A tensor's elements, and torch's storage that holds them: whoever keeps it keeps the memory,
/// whatever `set_`, `.data =` or `swap_tensors` do to the tensor meanwhile.
struct TorchMemory {
  TensorView view;
  nanobind::object storage;
};

/// A torch tensor, if it is as plain as most are: dense, in CPU memory, of a dtype of Ferry's,
/// without gradient or lazy sign, in a storage that holds it. None: ferry/tensors.py has to look at
/// it, as at those of a torch without DLPack's exchange table (before 2.10).
/// `writable`: autograd is told that the call writes over it.
std::optional<TorchMemory> plain_torch(nanobind::handle value, bool writable,
                                       TorchShape shape = TorchShape::flat);

}  // namespace ferry::python
