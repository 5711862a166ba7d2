#pragma once
#include <memory>

#include "ferry/bootstrap.hpp"
#include "gil.hpp"

namespace ferry::python {

/// A Bootstrap in Python.
using HeldBootstrap = Held<std::shared_ptr<Bootstrap>>;

}  // namespace ferry::python
