#include "host/kernels/kernels.hpp"

namespace ferry::host {

const Kernels& kernels() {
#if defined(__x86_64__)
  if (__builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
      __builtin_cpu_supports("avx512vl") && __builtin_cpu_supports("avx512dq")) {
    return kAvx512Kernels;
  }
  if (__builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma")) {
    return kAvx2Kernels;
  }
#endif
  return kBaselineKernels;
}

}  // namespace ferry::host
