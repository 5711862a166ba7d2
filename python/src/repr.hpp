// What objects look like in Python: <ferry.Plan: 4 tokens, top-2>.
#pragma once
#include <string>

#include "ferry/error.hpp"

namespace ferry::python {

/// `words()` says what to tell about the object. It may throw Error: a repr never fails.
template <class Words>
std::string repr_of(const std::string& name, Words&& words) {
  try {
    return "<ferry." + name + ": " + words() + ">";
  } catch (const Error&) {
    return "<ferry." + name + ", not usable>";
  }
}

}  // namespace ferry::python
