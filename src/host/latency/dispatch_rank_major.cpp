// Latency dispatch without fan-out: rows stay where their sources wrote them; those of other
// domains are copied beside them.
#include <algorithm>
#include <cstring>

#include "host/latency/engine.hpp"

namespace ferry::host {

void HostLatency::make_rank_major(Exchange& exchange) {
  const std::int64_t capacity = config_.capacity, topk = config_.topk;
  LatencyReceived& result = exchange.result;
  std::byte* rows = segment_.data + rows_offset(exchange.generation);
  const Dtype dtype = quantized(exchange) ? Dtype::e4m3 : config_.dtype;
  const auto source_bytes =
      static_cast<std::int64_t>(row_offset(exchange, 1, 0) - row_offset(exchange, 0, 0));
  result.x = {
      TensorView(rows, dtype, {ranks(), capacity, config_.hidden},
                 {source_bytes / static_cast<std::int64_t>(size_of(dtype)), config_.hidden, 1}, {}),
      std::shared_ptr<void>(exchange.lease, rows)};
  result.counts = heap_tensor({ranks()}, Dtype::i32);
  result.source_token = heap_tensor({ranks(), capacity}, Dtype::i32);
  result.topk_idx = heap_tensor({ranks(), capacity, topk}, Dtype::i32);
  if (exchange.options.topk_weights) {
    result.topk_weights = heap_tensor({ranks(), capacity, topk}, Dtype::f32);
  }
  if (quantized(exchange)) result.scales = scales_tensor(exchange, ranks(), capacity);
}

void HostLatency::receive_rank_major(Exchange& exchange) {
  const LatencyReceived& result = exchange.result;
  const auto topk = static_cast<std::size_t>(config_.topk);
  auto* ids = result.topk_idx.as<std::int32_t>();
  std::fill_n(ids, result.topk_idx.shape().product(), -1);
  float* weights = result.topk_weights ? result.topk_weights.as<float>() : nullptr;
  if (weights != nullptr) std::fill_n(weights, result.topk_weights.shape().product(), 0.0f);
  for (int source = 0; source < ranks(); ++source) {
    const SourceHeader header = checked_header(exchange, source);
    for (std::int32_t row = 0; row < header.rows; ++row) {
      const Arrival& arrival = note_arrival(exchange, source, row);
      const std::size_t at = slot(0, source, row);
      result.source_token.as<std::int32_t>()[at] = arrival.token;
      const std::int32_t* meta = meta_from(exchange, source, row);
      std::memcpy(ids + at * topk, meta + 1, topk * sizeof(std::int32_t));
      for (std::size_t k = 0; weights != nullptr && k < topk; ++k) {
        if (meta[1 + k] >= 0) std::memcpy(weights + at * topk + k, meta + 1 + topk + k, 4);
      }
      if (quantized(exchange)) place_scales(exchange, source, row, source, row);
      if (crosses(source)) {
        std::memcpy(segment_.data + row_offset(exchange, source, row),
                    row_from(exchange, source, row), row_bytes(exchange));
      }
    }
    result.counts.as<std::int32_t>()[source] = header.rows;
  }
}

}  // namespace ferry::host
