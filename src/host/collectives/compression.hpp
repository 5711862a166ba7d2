// Which format the sums of a call cross in, and which a single chunk: decided from what earlier
// calls lost. Pure: no memory of peers, no clock.
#pragma once
#include <array>
#include <cstdint>
#include <type_traits>

#include "ferry/collectives.hpp"
#include "host/kernels/codec.hpp"

namespace ferry::host {

/// What a rank lost in a call. It rides in the message of its next coded call; the sums over all
/// ranks, in ascending order, are what every rank learns from.
struct CodeTally {
  double error = 0;             ///< Σe² in the measured format, of finite chunks
  double signal = 0;            ///< Σg² of the same
  std::uint64_t fallbacks = 0;  ///< chunks that crossed in a wider format than the call's

  /// What a message says is not to be believed: nothing of it is used where it cannot be.
  bool sensible() const;
};
static_assert(std::is_trivially_copyable_v<CodeTally>);

/// The share of its time that a call of so many bytes, crossing between `domains`, saves by
/// `format`. By bytes alone: 1 - (coded + fixed) / (exact + fixed), where `fixed` stands for what
/// does not depend on the size.
double predicted_gain(std::uint64_t bytes, ReduceFormat format);

/// In which formats the chunks of a call are encoded.
struct CodeFormats {
  ReduceFormat measured = ReduceFormat::exact;  ///< whose error is taken; exact: no codes at all
  ReduceFormat sent = ReduceFormat::exact;      ///< in which a chunk crosses, unless it falls back
  double bound = 0;                             ///< a chunk falls back where error > bound * signal

  bool codes() const { return measured != ReduceFormat::exact; }
};

/// Why a chunk crosses in another format than the call's.
enum class FallBack : std::uint8_t { none, nonfinite, overflow, spike };

/// Of a chunk that was encoded in `format` with this result.
FallBack judge(const CodeFormats& formats, ReduceFormat format, const CodeError& told);
/// The format in which such a chunk crosses; not `format` again unless it may.
ReduceFormat format_after(const CodeFormats& formats, ReduceFormat format, FallBack why);

/// The same on all ranks, because all learn the same. The error of a format is a mean square,
/// Σe² / Σg²; its running mean begins at ulp² / 24, that of numbers which are spread evenly over
/// their binades, and is not less: values that the format holds exactly, zeros or what was rounded
/// to it before, must not make the rounding of others a spike.
class CompressionPolicy {
 public:
  static constexpr double kSpike = 3;          ///< times the mean
  static constexpr double kLeastGain = 0.1;    ///< else `automatic` is exact
  static constexpr std::uint64_t kWarmUp = 4;  ///< calls of `automatic` in bf16, e4m3 measured
  static constexpr std::uint64_t kHold = 16;   ///< calls without fall back before e4m3 comes back

  CodeFormats formats(ReduceFormat asked, std::uint64_t bytes) const;
  /// What all ranks lost in the last call, which `codes`.
  void learn(const CodeFormats& formats, const CodeTally& all_ranks);
  /// Σe² / Σg² that is usual for a format.
  double mean(ReduceFormat format) const { return means_[static_cast<std::size_t>(format)]; }

 private:
  /// By format: ulp² / 24.
  static constexpr std::array<double, 6> kUsual{0,           0x1p-14 / 24, 0x1p-20 / 24,
                                                0x1p-6 / 24, 0x1p-4 / 24,  0};

  std::array<double, 6> means_ = kUsual;
  std::uint64_t warm_ = 0;  // calls in which e4m3 was measured, up to kWarmUp
  std::uint64_t held_ = 0;  // calls for which `automatic` is bf16 still
};

}  // namespace ferry::host
