#include "host/kernels/kernels.hpp"

#if defined(__x86_64__)
#include <cpuid.h>
#endif

namespace ferry::host {
#if defined(__x86_64__)
namespace {

/// What the processor has and the system keeps when it changes threads. Not by
/// __builtin_cpu_supports: not every clang brings the library behind it.
struct Cpu {
  bool avx2 = false;
  bool avx512 = false;

  Cpu() {
    constexpr unsigned kFma = 1u << 12, kOsXsave = 1u << 27, kAvx2 = 1u << 5;
    constexpr unsigned kAvx512 = 1u << 16 | 1u << 17 | 1u << 30 | 1u << 31;  // f, dq, bw, vl
    constexpr unsigned kYmm = 0x6, kZmm = 0xe6;                              // bits of XCR0
    unsigned a = 0, b = 0, c = 0, d = 0;
    if (__get_cpuid(1, &a, &b, &c, &d) == 0 || (c & kOsXsave) == 0) return;
    const bool fma = (c & kFma) != 0;
    unsigned kept = 0;
    [[maybe_unused]] unsigned high = 0;
    asm volatile("xgetbv" : "=a"(kept), "=d"(high) : "c"(0));
    if (__get_cpuid_count(7, 0, &a, &b, &c, &d) == 0) return;
    avx2 = fma && (b & kAvx2) != 0 && (kept & kYmm) == kYmm;
    avx512 = avx2 && (b & kAvx512) == kAvx512 && (kept & kZmm) == kZmm;
  }
};

}  // namespace
#endif

const Kernels& kernels() {
#if defined(__x86_64__)
  static const Cpu cpu;
  if (cpu.avx512) return kAvx512Kernels;
  if (cpu.avx2) return kAvx2Kernels;
#endif
  return kBaselineKernels;
}

}  // namespace ferry::host
