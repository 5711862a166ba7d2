// Latency dispatch, second half: waits for all sources and fans rows out to their experts.
#include <algorithm>
#include <cstring>
#include <string>

#include "base/claim.hpp"
#include "core/check.hpp"
#include "core/number.hpp"
#include "host/latency/engine.hpp"

namespace ferry::host {

SourceHeader HostLatency::checked_header(Exchange& exchange, int source) {
  if (exchange.came[static_cast<std::size_t>(source)] == 0) return {};  // masked: no rows
  const SourceHeader& header = header_from(exchange, source);
  const bool same =
      header.generation == exchange.generation &&
      header.format == static_cast<std::uint8_t>(exchange.options.format) &&
      header.scale_format == static_cast<std::uint8_t>(exchange.options.scale_format) &&
      header.rows >= 0 && header.rows <= config_.capacity;
  if (!same) {
    disagree(*engine_, kLatencyDispatch, source, "format or scale_format", exchange.generation);
  }
  if (header.weights != (exchange.options.topk_weights ? 1u : 0u)) {
    disagree(*engine_, kLatencyDispatch, source, "choice of topk_weights (all ranks or none)",
             exchange.generation);
  }
  exchange.sums_there[static_cast<std::size_t>(source)] = header.first_sum;
  return header;
}

const Arrival& HostLatency::note_arrival(Exchange& exchange, int source, std::int32_t row) {
  const std::int32_t* meta = meta_from(exchange, source, row);
  const std::int32_t token = meta[0];
  bool any = false;
  // They decide where rows are written from here on.
  bool good = token >= 0 && token < config_.capacity;
  for (int k = 0; k < config_.topk; ++k) {
    const std::int32_t expert = meta[1 + k];
    good = good && expert >= -1 && expert < local_experts();
    any = any || expert != -1;
  }
  if (!good || !any) {
    engine_->channel().throw_violation("latency dispatch: rows", source,
                                       "sent token " + std::to_string(token) +
                                           " with slots for experts that this rank does not hold");
  }
  if (exchange.options.topk_weights) {
    const std::size_t at = exchange.slot_weights.size();
    const auto topk = static_cast<std::size_t>(config_.topk);
    exchange.slot_weights.resize(at + topk);
    std::memcpy(exchange.slot_weights.data() + at, meta + 1 + topk, topk * sizeof(float));
  }
  return exchange.arrivals.emplace_back(Arrival{source, row, token});
}

void HostLatency::place_scales(const Exchange& exchange, int source, std::int64_t row,
                               std::int64_t block, std::int64_t place) {
  const float* from = scales_from(exchange, source, row);
  const Tensor& to = exchange.result.scales;
  const Extents& strides = to.view().strides;
  const std::int64_t base = block * strides[0] + place * strides[1];
  if (exchange.options.scale_format != ScaleFormat::ue8m0_packed) {
    for (std::size_t c = 0; c < scales(); ++c) {
      to.as<float>()[base + static_cast<std::int64_t>(c) * strides[2]] = from[c];
    }
    return;
  }
  std::vector<std::uint32_t> words(ue8m0_word_count(scales()));
  pack_ue8m0(from, scales(), words.data());
  for (std::size_t c = 0; c < words.size(); ++c) {
    to.as<std::uint32_t>()[base + static_cast<std::int64_t>(c) * strides[2]] = words[c];
  }
}

void HostLatency::fan_out(Exchange& exchange, const Arrival& arrival, std::int32_t* counts) {
  const std::int64_t rows = output_rows();
  const std::size_t bytes = row_bytes(exchange);
  const std::byte* wire = row_from(exchange, arrival.source, arrival.row);
  const std::int32_t* meta = meta_from(exchange, arrival.source, arrival.row);
  for (int k = 0; k < config_.topk; ++k) {
    const std::int32_t expert = meta[1 + k];
    std::int32_t place = -1;
    if (expert >= 0) {
      if (counts[expert] >= rows) {
        engine_->channel().throw_violation(
            "latency dispatch: rows", arrival.source,
            "sent more than the capacity for local expert " + std::to_string(expert));
      }
      const std::int64_t at = expert * rows + counts[expert];
      std::memcpy(exchange.result.x.as<std::byte>() + static_cast<std::size_t>(at) * bytes, wire,
                  bytes);
      if (quantized(exchange)) {
        place_scales(exchange, arrival.source, arrival.row, expert, counts[expert]);
      }
      exchange.result.source_token.as<std::int32_t>()[at] = arrival.token;
      ++counts[expert];
      place = static_cast<std::int32_t>(at);
    }
    exchange.slot_rows.push_back(place);
  }
}

void HostLatency::receive_expert_major(Exchange& exchange) {
  const std::int64_t experts = local_experts();
  auto* ranges = exchange.result.ranges.as<std::int64_t>();
  // The caller may write into its tensor.
  std::vector<std::int32_t> counts(static_cast<std::size_t>(experts), 0), first = counts;
  for (int source = 0; source < ranks(); ++source) {
    const SourceHeader header = checked_header(exchange, source);
    first = counts;
    for (std::int32_t row = 0; row < header.rows; ++row) {
      fan_out(exchange, note_arrival(exchange, source, row), counts.data());
    }
    for (std::size_t e = 0; e < counts.size(); ++e) {
      ranges[e * static_cast<std::size_t>(ranks()) + static_cast<std::size_t>(source)] =
          (static_cast<std::int64_t>(first[e]) << 32) | (counts[e] - first[e]);
    }
  }
  std::copy(counts.begin(), counts.end(), exchange.result.counts.as<std::int32_t>());
}

void HostLatency::receive_rows(Exchange& exchange) {
  const Generation g = exchange.generation;
  check_still_joined(kLatencyDispatch, g);
  exchange.came = await_sources({"latency dispatch: rows", flag_row(layout_.arrived), g},
                                unmasked(), exchange.options.waits);
  if (masks_.on()) leave_out_unsent(exchange);
  exchange.arrivals.clear();  // of a receive that failed
  exchange.slot_rows.clear();
  exchange.slot_weights.clear();
  const bool by_rank = exchange.options.order == RowOrder::rank_major;
  by_rank ? receive_rank_major(exchange) : receive_expert_major(exchange);
  exchange.lease->mark_received();
  exchange.received.store(true, std::memory_order_release);
}

void ReceiveRows::receive() {
  Claim claim(called);
  if (!claim) refuse_second_receive(kLatencyDispatch);
  engine->enter(kLatencyDispatch, nullptr, [this] { engine->receive_rows(*exchange); });
  claim.keep();
}

}  // namespace ferry::host
