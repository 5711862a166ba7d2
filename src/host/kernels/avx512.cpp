// x86-64 with AVX512.
#include "host/kernels/prelude.hpp"

#if defined(__x86_64__)
#if defined(__clang__)
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

void copy_stream(void* to, const void* from, std::size_t bytes) {
  auto* target = static_cast<char*>(to);
  const auto* source = static_cast<const char*>(from);
  const std::size_t head = (0 - reinterpret_cast<std::uintptr_t>(target)) % 64;
  std::size_t at = head < bytes ? head : bytes;
  std::memcpy(target, source, at);
  for (; at + 64 <= bytes; at += 64) {
    _mm512_stream_si512(reinterpret_cast<__m512i*>(target + at),
                        _mm512_loadu_si512(reinterpret_cast<const __m512i*>(source + at)));
  }
  std::memcpy(target + at, source + at, bytes - at);
}
void stream_fence() {
  _mm_sfence();
}
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
