// Plain arguments of Python calls.
#pragma once
#include <chrono>
#include <cmath>
#include <cstdio>
#include <string>

#include "ferry/error.hpp"

namespace ferry::python {

/// Seconds as Python gives them. Throws Error(invalid_argument) unless 0 < seconds <= 1e9.
inline std::chrono::nanoseconds to_nanoseconds(double seconds, const std::string& name) {
  if (!(seconds > 0.0) || seconds > 1e9) {
    char got[40];
    std::snprintf(got, sizeof got, "%.6g", seconds);
    throw Error(ErrorKind::invalid_argument,
                name + ": got " + got + " seconds; expected more than 0 and at most 1e9");
  }
  return std::chrono::nanoseconds(std::llround(seconds * 1e9));
}

}  // namespace ferry::python
