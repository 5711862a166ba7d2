// Includes of the kernel files. They come before the target is chosen, so that nothing defined in
// a header is compiled for an instruction set that the machine may lack.
#pragma once
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <type_traits>

#if defined(__x86_64__)
#include <immintrin.h>
#endif

#include "core/number.hpp"
#include "host/kernels/kernels.hpp"
#include "platform/fma.hpp"
