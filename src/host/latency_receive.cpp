// Latency dispatch, second half: waits for all sources and fans rows out to their experts.
#include <algorithm>
#include <cstring>
#include <string>

#include "core/check.hpp"
#include "core/number.hpp"
#include "host/latency_engine.hpp"

namespace ferry::host {

const SourceHeader& HostLatency::checked_header(const Exchange& exchange, int source) {
  const auto& header = *reinterpret_cast<const SourceHeader*>(
      segment_.data + header_offset(exchange.generation, source));
  const bool same =
      header.generation == exchange.generation &&
      header.format == static_cast<std::uint32_t>(exchange.options.format) &&
      header.scale_format == static_cast<std::uint32_t>(exchange.options.scale_format) &&
      header.rows >= 0 && header.rows <= config_.capacity;
  if (!same) {
    const std::string text = "rank " + std::to_string(engine_->rank()) + ": " + kLatencyDispatch +
                             ": rank " + std::to_string(source) +
                             " used another format or scale_format in this call";
    engine_->channel().fail(kLatencyDispatch, text, ErrorKind::mismatch);
    throw Error(ErrorKind::mismatch, text,
                {engine_->rank(), source, kLatencyDispatch, exchange.generation,
                 static_cast<std::uint64_t>(exchange.options.format), header.format});
  }
  return header;
}

void HostLatency::place_row(const Exchange& exchange, const std::byte* wire, std::int64_t expert,
                            std::int64_t row) {
  const LatencyReceived& result = exchange.result;
  const std::size_t row_bytes = result.x.view().row_bytes();
  const auto place = static_cast<std::size_t>(expert * output_rows() + row);
  std::memcpy(static_cast<std::byte*>(result.x.data()) + place * row_bytes, wire, row_bytes);
  if (exchange.options.format == WireFormat::as_is) return;
  const std::size_t scales = scale_count(static_cast<std::size_t>(config_.hidden));
  const auto* from = reinterpret_cast<const float*>(wire + layout_.scale_at);
  const Extents& strides = result.scales.view().strides;
  const std::int64_t base = expert * strides[0] + row * strides[1];
  if (exchange.options.scale_format != ScaleFormat::ue8m0_packed) {
    for (std::size_t c = 0; c < scales; ++c) {
      result.scales.as<float>()[base + static_cast<std::int64_t>(c) * strides[2]] = from[c];
    }
    return;
  }
  std::vector<std::uint32_t> words(ue8m0_word_count(scales));
  pack_ue8m0(from, scales, words.data());
  for (std::size_t c = 0; c < words.size(); ++c) {
    result.scales.as<std::uint32_t>()[base + static_cast<std::int64_t>(c) * strides[2]] = words[c];
  }
}

void HostLatency::receive_rows(Exchange& exchange) {
  const Generation g = exchange.generation;
  check_still_joined(kLatencyDispatch, g);
  exchange.came = await_sources({"latency dispatch: rows", flag_row(layout_.arrived), g},
                                unmasked(), exchange.options.waits);
  const std::int64_t experts = local_experts(), rows = output_rows();
  exchange.origins.resize(static_cast<std::size_t>(experts * rows));
  auto* counts = exchange.result.counts.as<std::int32_t>();
  auto* tokens = exchange.result.source_token.as<std::int32_t>();
  auto* ranges = exchange.result.ranges.as<std::int64_t>();
  std::fill_n(counts, experts, 0);
  for (int source = 0; source < ranks(); ++source) {
    const bool came = exchange.came[static_cast<std::size_t>(source)] != 0;
    const SourceHeader header = came ? checked_header(exchange, source) : SourceHeader{};
    std::vector<std::int32_t> first(counts, counts + experts);
    for (std::int32_t r = 0; r < header.rows; ++r) {
      const std::byte* wire = segment_.data + row_offset(g, source, r);
      const auto* meta =
          reinterpret_cast<const std::int32_t*>(segment_.data + meta_offset(g, source, r));
      for (int k = 0; k < config_.topk; ++k) {
        const std::int32_t expert = meta[1 + k];
        if (expert == -1) continue;
        if (expert < 0 || expert >= experts || counts[expert] >= rows || meta[0] < 0 ||
            meta[0] >= config_.capacity) {  // they decide where rows are written from here on
          engine_->channel().distrust("latency dispatch: rows", source,
                                      "sent token " + std::to_string(meta[0]) +
                                          " for local expert " + std::to_string(expert));
        }
        const std::int32_t place = counts[expert]++;
        place_row(exchange, wire, expert, place);
        const auto index = static_cast<std::size_t>(expert * rows + place);
        tokens[index] = meta[0];
        exchange.origins[index] = {source, meta[0], k};
      }
    }
    for (std::int64_t e = 0; e < experts; ++e) {
      ranges[e * ranks() + source] =
          (static_cast<std::int64_t>(first[static_cast<std::size_t>(e)]) << 32) |
          (counts[e] - first[static_cast<std::size_t>(e)]);
    }
  }
  exchange.counts.assign(counts, counts + experts);
  exchange.lease->mark_received();
  exchange.received.store(true, std::memory_order_release);
}

void ReceiveRows::receive() {
  if (called.exchange(true)) refuse_second_receive(kLatencyDispatch);
  engine->enter(kLatencyDispatch, nullptr, [this] { engine->receive_rows(*exchange); });
}

}  // namespace ferry::host
