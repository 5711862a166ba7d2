#pragma once
#include "ferry/plan.hpp"
#include "gil.hpp"

namespace ferry::python {

/// A Plan in Python.
using HeldPlan = Held<Plan>;

}  // namespace ferry::python
