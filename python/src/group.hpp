#pragma once
#include "ferry/group.hpp"
#include "gil.hpp"

namespace ferry::python {

/// A Group in Python. Dropping it leaves the group, without the GIL.
using HeldGroup = Held<Group>;

}  // namespace ferry::python
