// The inner loops of the host engine, compiled once for each instruction set and chosen at run
// time. Every variant gives the same bits.
#pragma once
#include <cstddef>
#include <cstdint>
#include <optional>

#include "core/layout.hpp"
#include "ferry/dtype.hpp"
#include "ferry/latency.hpp"
#include "host/kernels/codec.hpp"

namespace ferry::host {

/// What `sum_rows` adds up: `count` rows, then the biases that are not null.
struct SumRows {
  const void* const* rows = nullptr;
  const float* weights = nullptr;  ///< [count]: acc = fma(w, x, acc); null: acc = acc + x
  std::int64_t count = 0;
  /// The rows of the next sum, fetched into the caches meanwhile: they lie far apart, and the
  /// machine's own prefetching starts anew with every row.
  const void* const* next_rows = nullptr;
  std::int64_t next_count = 0;
  const void* bias0 = nullptr;
  const void* bias1 = nullptr;
  float divisor = 1;  ///< of the sum, before it is rounded
  /// Here and in the places below the sum may take the place of a row.
  void* out = nullptr;
  void* const* copy_to = nullptr;  ///< [copies]: where else the sum is written
  std::int64_t copies = 0;
  std::int64_t columns = 0;
  Dtype dtype = Dtype::f32;  ///< f32, bf16 or f16, of rows, biases and out
  /// Of `out`, where it differs: f32 from narrower rows, or narrower from rows of f32.
  std::optional<Dtype> out_dtype{};
  /// Of the rows, where they are as they crossed; `in_flight` says how such a row lies.
  CombineFormat format = CombineFormat::as_is;
  CombineRowLayout in_flight{};
};

/// Quantises one row, to e4m3 with one scale for each 128 channels, or to NVFP4.
struct QuantizeRow {
  const void* row = nullptr;
  Dtype dtype = Dtype::bf16;  ///< f32, bf16 or f16
  std::int64_t columns = 0;
  bool round_scale = false;
  void* codes = nullptr;   ///< [columns] e4m3, or columns / 2 bytes
  void* scales = nullptr;  ///< f32 [ceil(columns / 128)], or e4m3 [columns / 16]
  float global_scale = 0;  ///< not 0: NVFP4
};

/// Writes one row as LogFMT-10 codes and ranges.
struct EncodeLogfmt {
  const void* row = nullptr;
  Dtype dtype = Dtype::bf16;  ///< f32, bf16 or f16
  std::int64_t columns = 0;
  void* out = nullptr;
  CombineRowLayout in_flight{};
};

/// Above this many bytes an exchange does not stay in the caches, so stores go past them.
inline constexpr std::size_t kStreamBytes = std::size_t{4} << 20;

struct Kernels {
  const char* name;  ///< "avx512", "avx2", "baseline"
  /// Sums in fp32 from +0 in the order given, rounds once to nearest even.
  void (*sum_rows)(const SumRows& sum);
  void (*quantize_row)(const QuantizeRow& quantize);
  void (*encode_logfmt)(const EncodeLogfmt& encode);
  /// Stops at a value that the format cannot hold: then the codes are of no use.
  CodeError (*encode_codes)(const EncodeValues& encode);
  void (*decode_codes)(const DecodeValues& decode);
  /// Copies past the caches where the machine can; `stream_fence` must follow before a flag is
  /// published, because such stores are not ordered by a release store.
  void (*copy_stream)(void* to, const void* from, std::size_t bytes);
  void (*stream_fence)();
};

/// The best variant for this machine.
const Kernels& kernels();

extern const Kernels kBaselineKernels;
#if defined(__x86_64__)
extern const Kernels kAvx2Kernels;
extern const Kernels kAvx512Kernels;
#endif

}  // namespace ferry::host
