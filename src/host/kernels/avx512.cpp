// x86-64 with AVX512.
#include "host/kernels/prelude.hpp"

#if defined(__x86_64__)
#if defined(__clang__) && __clang_major__ >= 18 && __clang_major__ <= 21
// These ask for registers of 512 bits by name where all features are named, as zig does.
#pragma clang attribute push(                                                       \
    __attribute__((target("avx512f,avx512bw,avx512vl,avx512dq,avx2,fma,evex512"))), \
    apply_to = function)
#elif defined(__clang__)
#pragma clang attribute push( \
    __attribute__((target("avx512f,avx512bw,avx512vl,avx512dq,avx2,fma"))), apply_to = function)
#else
#pragma GCC push_options
#pragma GCC target("avx512f,avx512bw,avx512vl,avx512dq,avx2,fma")
#endif

namespace ferry::host {
namespace {
constexpr std::size_t kVectorBytes = 64;
#include "host/kernels/kernels.inc"

#include "host/kernels/codec.inc"

void stream_vector(char* to, const char* from) {
  _mm512_stream_si512(reinterpret_cast<__m512i*>(to),
                      _mm512_loadu_si512(reinterpret_cast<const __m512i*>(from)));
}
#include "host/kernels/stream.inc"
}  // namespace
const Kernels kAvx512Kernels{"avx512",      &sum_rows,     &quantize,    &encode_logfmt,
                             &encode_codes, &decode_codes, &copy_stream, &stream_fence};
}  // namespace ferry::host

#if defined(__clang__)
#pragma clang attribute pop
#else
#pragma GCC pop_options
#endif
#endif
