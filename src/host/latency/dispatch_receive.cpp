// Latency dispatch, receiving: the result's tensors, and what has come becomes them, fanned out to
// its experts or not.
#include <algorithm>
#include <cstring>
#include <string>

#include "core/number.hpp"
#include "host/latency/memory.hpp"

namespace ferry::host {
namespace {

/// Of NVFP4's scales, 128 rows by four.
constexpr std::int64_t kTileBytes = 512;

Tensor scales_tensor(const LatencyMemory& memory, const Exchange& exchange, std::int64_t blocks,
                     std::int64_t rows) {
  const std::size_t scales = memory.scales(exchange);
  if (memory.nvfp4(exchange)) {
    const auto tiles = static_cast<std::int64_t>((scales + 3) / 4);
    return heap_tensor({blocks, (rows + 127) / 128, tiles * kTileBytes}, Dtype::e4m3);
  }
  const bool packed = exchange.options.scale_format == ScaleFormat::ue8m0_packed;
  const std::size_t count = packed ? ue8m0_word_count(scales) : scales;
  const auto columns = static_cast<std::int64_t>(count);
  const Tensor stored = heap_tensor({blocks, columns, rows}, packed ? Dtype::i32 : Dtype::f32);
  return {TensorView(stored.data(), stored.dtype(), {blocks, rows, columns},
                     {columns * rows, 1, rows}, {}),
          stored.owner()};
}

void make_expert_major(const LatencyMemory& memory, Exchange& exchange) {
  const std::int64_t experts = memory.local_experts(), rows = memory.output_rows();
  LatencyReceived& result = exchange.result;
  std::byte* output = memory.segment.data + memory.layout.outputs +
                      memory.buffer(exchange.generation) * memory.layout.output_bytes;
  result.x = {TensorView(output, memory.row_dtype(exchange),
                         {experts, rows, memory.row_elements(exchange)}),
              std::shared_ptr<void>(exchange.lease, output)};
  result.counts = heap_tensor({experts}, Dtype::i32);
  result.source_token = heap_tensor({experts, rows}, Dtype::i32);
  result.ranges = heap_tensor({experts, memory.ranks()}, Dtype::i64);
  if (memory.quantized(exchange)) result.scales = scales_tensor(memory, exchange, experts, rows);
}

/// Rows stay where their sources wrote them.
void make_rank_major(const LatencyMemory& memory, Exchange& exchange) {
  const std::int64_t capacity = memory.config.capacity, topk = memory.config.topk;
  LatencyReceived& result = exchange.result;
  std::byte* rows = memory.segment.data + memory.rows_offset(exchange.generation);
  const Dtype dtype = memory.row_dtype(exchange);
  const std::int64_t elements = memory.row_elements(exchange);
  const auto source_bytes = static_cast<std::int64_t>(memory.row_offset(exchange, 1, 0) -
                                                      memory.row_offset(exchange, 0, 0));
  result.x = {
      TensorView(rows, dtype, {memory.ranks(), capacity, elements},
                 {source_bytes / static_cast<std::int64_t>(size_of(dtype)), elements, 1}, {}),
      std::shared_ptr<void>(exchange.lease, rows)};
  result.counts = heap_tensor({memory.ranks()}, Dtype::i32);
  result.source_token = heap_tensor({memory.ranks(), capacity}, Dtype::i32);
  result.topk_idx = heap_tensor({memory.ranks(), capacity, topk}, Dtype::i32);
  if (exchange.options.topk_weights) {
    result.topk_weights = heap_tensor({memory.ranks(), capacity, topk}, Dtype::f32);
  }
  if (memory.quantized(exchange))
    result.scales = scales_tensor(memory, exchange, memory.ranks(), capacity);
}

SourceHeader checked_header(const LatencyMemory& memory, Exchange& exchange, int source) {
  if (exchange.came[static_cast<std::size_t>(source)] == 0) return {};  // masked: no rows
  const SourceHeader& header = memory.header_from(exchange, source);
  const bool same =
      header.generation == exchange.generation &&
      header.format == static_cast<std::uint8_t>(exchange.options.format) &&
      header.scale_format == static_cast<std::uint8_t>(exchange.options.scale_format) &&
      header.rows >= 0 && header.rows <= memory.config.capacity;
  if (!same) {
    disagree(memory.engine, kLatencyDispatch, source, "format or scale_format",
             exchange.generation);
  }
  if (header.global_scale != exchange.options.global_scale) {
    disagree(memory.engine, kLatencyDispatch, source, "global_scale", exchange.generation);
  }
  if (header.weights != (exchange.options.topk_weights ? 1u : 0u)) {
    disagree(memory.engine, kLatencyDispatch, source, "choice of topk_weights (all ranks or none)",
             exchange.generation);
  }
  exchange.sums_there[static_cast<std::size_t>(source)] = header.first_sum;
  return header;
}

const Arrival& note_arrival(const LatencyMemory& memory, Exchange& exchange, int source,
                            std::int32_t row) {
  const std::int32_t* meta = memory.meta_from(exchange, source, row);
  const std::int32_t token = meta[0];
  bool any = false;
  // They decide where rows are written from here on.
  bool good = token >= 0 && token < memory.config.capacity;
  for (int k = 0; k < memory.config.topk; ++k) {
    const std::int32_t expert = meta[1 + k];
    good = good && expert >= -1 && expert < memory.local_experts();
    any = any || expert != -1;
  }
  if (!good || !any) {
    memory.engine.channel().throw_violation(
        "latency dispatch: rows", source,
        "sent token " + std::to_string(token) +
            " with slots for experts that this rank does not hold");
  }
  if (exchange.options.topk_weights) {
    const std::size_t at = exchange.slot_weights.size();
    const auto topk = static_cast<std::size_t>(memory.config.topk);
    exchange.slot_weights.resize(at + topk);
    std::memcpy(exchange.slot_weights.data() + at, meta + 1 + topk, topk * sizeof(float));
  }
  return exchange.arrivals.emplace_back(Arrival{source, row, token});
}

/// Into the tile of the row; four of a row lie together.
void place_nvfp4_scales(const LatencyMemory& memory, const Exchange& exchange,
                        const std::byte* from, std::int64_t block, std::int64_t place) {
  const TensorView& to = exchange.result.scales.view();
  const std::size_t count = memory.scales(exchange);
  std::byte* at = exchange.result.scales.as<std::byte>() + block * to.strides[0] +
                  place / 128 * to.strides[1] + place % 32 * 16 + place % 128 / 32 * 4;
  for (std::size_t j = 0; j < count; j += 4, at += kTileBytes) {
    std::byte four[4] = {};
    std::memcpy(four, from + j, std::min<std::size_t>(4, count - j));
    std::memcpy(at, four, sizeof four);
  }
}

void place_scales(const LatencyMemory& memory, const Exchange& exchange, int source,
                  std::int64_t row, std::int64_t block, std::int64_t place) {
  const std::byte* sent = memory.scales_from(exchange, source, row);
  if (memory.nvfp4(exchange)) return place_nvfp4_scales(memory, exchange, sent, block, place);
  const auto* from = reinterpret_cast<const float*>(sent);
  const std::size_t count = memory.scales(exchange);
  const Tensor& to = exchange.result.scales;
  const Extents& strides = to.view().strides;
  const std::int64_t base = block * strides[0] + place * strides[1];
  if (exchange.options.scale_format != ScaleFormat::ue8m0_packed) {
    for (std::size_t c = 0; c < count; ++c) {
      to.as<float>()[base + static_cast<std::int64_t>(c) * strides[2]] = from[c];
    }
    return;
  }
  std::vector<std::uint32_t> words(ue8m0_word_count(count));
  pack_ue8m0(from, count, words.data());
  for (std::size_t c = 0; c < words.size(); ++c) {
    to.as<std::uint32_t>()[base + static_cast<std::int64_t>(c) * strides[2]] = words[c];
  }
}

void fan_out(const LatencyMemory& memory, Exchange& exchange, const Arrival& arrival,
             std::int32_t* counts) {
  const std::int64_t rows = memory.output_rows();
  const std::size_t bytes = memory.row_bytes(exchange);
  const std::byte* wire = memory.row_from(exchange, arrival.source, arrival.row);
  const std::int32_t* meta = memory.meta_from(exchange, arrival.source, arrival.row);
  for (int k = 0; k < memory.config.topk; ++k) {
    const std::int32_t expert = meta[1 + k];
    std::int32_t place = -1;
    if (expert >= 0) {
      if (counts[expert] >= rows) {
        memory.engine.channel().throw_violation(
            "latency dispatch: rows", arrival.source,
            "sent more than the capacity for local expert " + std::to_string(expert));
      }
      const std::int64_t at = expert * rows + counts[expert];
      std::memcpy(exchange.result.x.as<std::byte>() + static_cast<std::size_t>(at) * bytes, wire,
                  bytes);
      if (memory.quantized(exchange)) {
        place_scales(memory, exchange, arrival.source, arrival.row, expert, counts[expert]);
      }
      exchange.result.source_token.as<std::int32_t>()[at] = arrival.token;
      ++counts[expert];
      place = static_cast<std::int32_t>(at);
    }
    exchange.slot_rows.push_back(place);
  }
}

void receive_expert_major(const LatencyMemory& memory, Exchange& exchange) {
  const std::int64_t experts = memory.local_experts();
  auto* ranges = exchange.result.ranges.as<std::int64_t>();
  // The caller may write into its tensor.
  std::vector<std::int32_t> counts(static_cast<std::size_t>(experts), 0), first = counts;
  for (int source = 0; source < memory.ranks(); ++source) {
    const SourceHeader header = checked_header(memory, exchange, source);
    first = counts;
    for (std::int32_t row = 0; row < header.rows; ++row) {
      fan_out(memory, exchange, note_arrival(memory, exchange, source, row), counts.data());
    }
    for (std::size_t e = 0; e < counts.size(); ++e) {
      ranges[e * static_cast<std::size_t>(memory.ranks()) + static_cast<std::size_t>(source)] =
          (static_cast<std::int64_t>(first[e]) << 32) | (counts[e] - first[e]);
    }
  }
  std::copy(counts.begin(), counts.end(), exchange.result.counts.as<std::int32_t>());
}

/// Without fan-out: rows of other domains are copied beside the others.
void receive_rank_major(const LatencyMemory& memory, Exchange& exchange) {
  const LatencyReceived& result = exchange.result;
  const auto topk = static_cast<std::size_t>(memory.config.topk);
  auto* ids = result.topk_idx.as<std::int32_t>();
  std::fill_n(ids, result.topk_idx.shape().product(), -1);
  float* weights = result.topk_weights ? result.topk_weights.as<float>() : nullptr;
  if (weights != nullptr) std::fill_n(weights, result.topk_weights.shape().product(), 0.0f);
  for (int source = 0; source < memory.ranks(); ++source) {
    const SourceHeader header = checked_header(memory, exchange, source);
    for (std::int32_t row = 0; row < header.rows; ++row) {
      const Arrival& arrival = note_arrival(memory, exchange, source, row);
      const std::size_t at = memory.slot(0, source, row);
      result.source_token.as<std::int32_t>()[at] = arrival.token;
      const std::int32_t* meta = memory.meta_from(exchange, source, row);
      std::memcpy(ids + at * topk, meta + 1, topk * sizeof(std::int32_t));
      for (std::size_t k = 0; weights != nullptr && k < topk; ++k) {
        if (meta[1 + k] >= 0) std::memcpy(weights + at * topk + k, meta + 1 + topk + k, 4);
      }
      if (memory.quantized(exchange)) place_scales(memory, exchange, source, row, source, row);
      if (memory.crosses(source)) {
        std::memcpy(memory.segment.data + memory.row_offset(exchange, source, row),
                    memory.row_from(exchange, source, row), memory.row_bytes(exchange));
      }
    }
    result.counts.as<std::int32_t>()[source] = header.rows;
  }
}

}  // namespace

void make_result(LatencyMemory& memory, Exchange& exchange) {
  const bool by_rank = exchange.options.order == RowOrder::rank_major;
  by_rank ? make_rank_major(memory, exchange) : make_expert_major(memory, exchange);
}

void receive_result(LatencyMemory& memory, Exchange& exchange) {
  exchange.arrivals.clear();  // of a receive that failed
  exchange.slot_rows.clear();
  exchange.slot_weights.clear();
  const bool by_rank = exchange.options.order == RowOrder::rank_major;
  by_rank ? receive_rank_major(memory, exchange) : receive_expert_major(memory, exchange);
}

}  // namespace ferry::host
