// The dispatch that quantises bf16 rows on the way, in `ferry bench --backend cuda`.
#include <bit>
#include <cmath>

#include "bench/gpu_rank.hpp"

namespace ferry::cli {

void GpuExchange::make_unquantized() {
  std::vector<std::uint16_t> rows;  // bf16
  for (std::int64_t t = 0; t < s_.tokens; ++t) {
    for (std::int64_t h = 0; h < s_.hidden; ++h) {
      const auto number = static_cast<float>(value(group_.rank(), t, h));
      rows.push_back(static_cast<std::uint16_t>(std::bit_cast<std::uint32_t>(number) >> 16));
    }
  }
  unquantized_ = std::make_unique<GpuBuffer>(rows.size() * 2);
  stream_.upload(unquantized_->data(), rows.data(), rows.size() * 2);
}

/// Of the rows that are to be quantised.
int GpuExchange::value(int rank, std::int64_t token, std::int64_t column) const {
  return static_cast<int>((token * 131 + column * 7 + rank * 1009) % 31) - 15;
}

Received GpuExchange::dispatch_quantized(int num_sms) {
  DispatchOptions options;
  options.format = WireFormat::e4m3;
  options.stream = &*stream_.stream;
  options.num_sms = num_sms;
  return group_.dispatch({unquantized_->data(), Dtype::bf16, {s_.tokens, s_.hidden}, device_},
                         plan_, options);
}

/// Each value within the rounding of three bits of mantissa.
void GpuExchange::check_quantized(const Received& received) {
  float of_code[256];
  for (int code = 0; code < 256; ++code) {
    const int exponent = code >> 3 & 15, mantissa = code & 7;
    const float magnitude = exponent == 0
                                ? std::ldexp(static_cast<float>(mantissa), -9)
                                : std::ldexp(static_cast<float>(8 + mantissa), exponent - 10);
    of_code[code] = (code & 0x80) != 0 ? -magnitude : magnitude;
  }
  const auto columns = static_cast<std::size_t>(s_.hidden);
  const auto per_row = static_cast<std::size_t>(s_.scales());
  const auto codes = stream_.get<std::uint8_t>(
      {TensorView(received.x.data(), Dtype::u8, received.x.shape(), device_), nullptr});
  const auto scales = stream_.get<float>(received.scales);
  const auto tokens = stream_.get<std::int32_t>(received.source_token);
  for (std::size_t row = 0; row < source_of_row_.size(); ++row) {
    bool good = true;
    for (std::size_t h = 0; h < columns; ++h) {
      const float got = of_code[codes[row * columns + h]] * scales[row * per_row + h / 128];
      const auto sent =
          static_cast<float>(value(source_of_row_[row], tokens[row], static_cast<std::int64_t>(h)));
      good = good && std::fabs(got - sent) <= std::fabs(sent) / 15;
    }
    need_equal(good, "dispatch, bf16 to e4m3", static_cast<std::int64_t>(row));
  }
}

}  // namespace ferry::cli
