#include "host/collectives/compression.hpp"

#include <algorithm>
#include <cmath>

namespace ferry::host {

bool CodeTally::sensible() const {
  return std::isfinite(error) && std::isfinite(signal) && error >= 0 && signal >= 0;
}

double predicted_gain(std::uint64_t bytes, ReduceFormat format) {
  constexpr double kFixed = 64 << 10;  // what crosses while a message waits for its answer
  const auto exact = static_cast<double>(bytes);
  const auto coded = static_cast<double>(code_bytes(format, bytes / sizeof(float)));
  return 1 - (coded + kFixed) / (exact + kFixed);
}

FallBack judge(const CodeFormats& formats, ReduceFormat format, const CodeError& told) {
  if (told.nonfinite) return FallBack::nonfinite;
  if (told.overflow) return FallBack::overflow;
  const bool spikes = format == formats.measured && told.error > formats.bound * told.signal;
  return spikes && format != ReduceFormat::bf16 ? FallBack::spike : FallBack::none;
}

ReduceFormat format_after(const CodeFormats& formats, ReduceFormat format, FallBack why) {
  switch (why) {
    case FallBack::none: return format == formats.measured ? formats.sent : format;
    case FallBack::nonfinite: return ReduceFormat::exact;
    default: return format == ReduceFormat::bf16 ? ReduceFormat::exact : ReduceFormat::bf16;
  }
}

CodeFormats CompressionPolicy::formats(ReduceFormat asked, std::uint64_t bytes) const {
  CodeFormats formats{asked, asked, 0};
  if (asked == ReduceFormat::automatic) {
    const bool trusted = warm_ == kWarmUp && held_ == 0;
    formats.sent = trusted ? ReduceFormat::e4m3 : ReduceFormat::bf16;
    formats.measured = ReduceFormat::e4m3;
    if (predicted_gain(bytes, formats.sent) < kLeastGain) return {};
  }
  formats.bound = kSpike * mean(formats.measured);
  return formats;
}

void CompressionPolicy::learn(const CodeFormats& formats, const CodeTally& all_ranks) {
  if (!formats.codes()) return;
  if (all_ranks.sensible() && all_ranks.signal > 0) {
    // A spike counts for little, a lasting change within some calls.
    const auto format = static_cast<std::size_t>(formats.measured);
    double& mean = means_[format];
    mean += (std::min(all_ranks.error / all_ranks.signal, 4 * mean) - mean) / 8;
    mean = std::max(mean, kUsual[format]);
  }
  if (formats.measured != ReduceFormat::e4m3) return;
  warm_ = std::min(warm_ + 1, kWarmUp);
  if (all_ranks.fallbacks > 0) {
    held_ = kHold;
  } else if (held_ > 0) {
    --held_;
  }
}

}  // namespace ferry::host
