// Any machine: what the compiler's default target gives (SSE2, NEON).
#include "host/kernels/prelude.hpp"

namespace ferry::host {
namespace {
constexpr std::size_t kVectorBytes = 16;
#include "host/kernels/kernels.inc"

#include "host/kernels/codec.inc"
void copy_plain(void* to, const void* from, std::size_t bytes) {
  std::memcpy(to, from, bytes);
}
void no_fence() {}
}  // namespace
const Kernels kBaselineKernels{"baseline",    &sum_rows,     &quantize,   &encode_logfmt,
                               &encode_codes, &decode_codes, &copy_plain, &no_fence};
}  // namespace ferry::host
