// Number formats with exact semantics, the same bits on host and device.
//
//   number/formats.hpp   Bf16, Fp16, E4m3, E5m2: storage types, to_float, from_float
//   number/quantize.hpp  fp8 with one fp32 scale for each 128 channels
//   number/logfmt.hpp    10 bits: a sign and a logarithm between the extremes of 128 channels
//   number/nvfp4.hpp     e2m1, two a byte, with one e4m3 scale for each 16 channels
//   number/ue8m0.hpp     power-of-two scales as biased exponents, four a word
//
// What all of it relies on, host and device: IEEE-754 binary32 `float`, the default rounding
// direction (nearest, ties to even), IEEE division, no fast-math. Nothing depends on whether
// the processor flushes subnormals (FTZ, DAZ): no step takes or makes a subnormal that matters to
// its result.
#pragma once

#include "core/number/formats.hpp"
#include "core/number/logfmt.hpp"
#include "core/number/nvfp4.hpp"
#include "core/number/quantize.hpp"
#include "core/number/ue8m0.hpp"
