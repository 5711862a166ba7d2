// x86-64 with AVX2.
#include "host/kernels/prelude.hpp"

#if defined(__x86_64__)
#if defined(__clang__)
#pragma clang attribute push(__attribute__((target("avx2,fma"))), apply_to = function)
#else
#pragma GCC push_options
#pragma GCC target("avx2,fma")
#endif

namespace ferry::host {
namespace {
constexpr std::size_t kVectorBytes = 32;
#include "host/kernels/kernels.inc"

#include "host/kernels/codec.inc"

void stream_vector(char* to, const char* from) {
  _mm256_stream_si256(reinterpret_cast<__m256i*>(to),
                      _mm256_loadu_si256(reinterpret_cast<const __m256i*>(from)));
}
#include "host/kernels/stream.inc"
}  // namespace
const Kernels kAvx2Kernels{"avx2",        &sum_rows,     &quantize,    &encode_logfmt,
                           &encode_codes, &decode_codes, &copy_stream, &stream_fence};
}  // namespace ferry::host

#if defined(__clang__)
#pragma clang attribute pop
#else
#pragma GCC pop_options
#endif
#endif
