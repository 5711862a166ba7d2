// The registered memory of a latency exchange: where everything lies, here and at the peers.
#pragma once
#include <cstddef>
#include <cstdint>

#include "core/layout.hpp"
#include "core/number/nvfp4.hpp"
#include "core/number/quantize.hpp"
#include "engine/reach.hpp"
#include "host/latency/exchange.hpp"
#include "host/throughput/engine.hpp"
#include "protocol/credit.hpp"

namespace ferry::host {

struct LatencyMemory {
  HostEngine& engine;
  const LatencyConfig config;
  const fabric::Segment segment;
  const LatencyLayout layout;
  FabricReach reach;
  const CombineRowLayout combine_row =
      make_combine_row_layout(static_cast<std::size_t>(config.hidden));

  int ranks() const { return engine.size(); }
  std::int64_t local_experts() const { return engine.placement().local_experts(engine.rank()); }
  std::int64_t output_rows() const { return ranks() * config.capacity; }
  std::size_t plain_bytes() const {
    return static_cast<std::size_t>(config.hidden) * size_of(config.dtype);
  }
  protocol::Place at(std::size_t offset) const { return {segment.id, offset}; }
  std::size_t buffer(Generation generation) const { return generation % 2; }
  bool quantized(const Exchange& exchange) const {
    return exchange.options.format != WireFormat::as_is;
  }
  bool nvfp4(const Exchange& exchange) const {
    return exchange.options.format == WireFormat::nvfp4;
  }
  /// What arrives, and how many of them are a row.
  Dtype row_dtype(const Exchange& exchange) const {
    switch (exchange.options.format) {
      case WireFormat::e4m3: return Dtype::e4m3;
      case WireFormat::nvfp4: return Dtype::u8;
      default: return config.dtype;
    }
  }
  std::int64_t row_elements(const Exchange& exchange) const {
    return nvfp4(exchange) ? config.hidden / 2 : config.hidden;
  }
  /// Bytes of a row in flight, scales apart: rows of all sources lie close together, so that they
  /// are one tensor.
  std::size_t row_bytes(const Exchange& exchange) const {
    return static_cast<std::size_t>(row_elements(exchange)) * size_of(row_dtype(exchange));
  }
  std::size_t rows_offset(Generation generation) const {
    return layout.rows + slot(generation, 0, 0) * layout.row_slot;
  }
  /// With masks each source has the same place whatever the format: what a masked one writes late
  /// must not touch the rows of others.
  std::size_t source_offset(Generation generation, int source) const {
    return rows_offset(generation) + slot(0, source, 0) * layout.row_slot;
  }
  std::size_t row_offset(const Exchange& exchange, int source, std::int64_t row) const {
    if (config.masks) {
      return source_offset(exchange.generation, source) +
             static_cast<std::size_t>(row) * row_bytes(exchange);
    }
    return rows_offset(exchange.generation) + slot(0, source, row) * row_bytes(exchange);
  }
  /// Right behind the codes: then codes and scales take no more room than rows as they are.
  std::size_t scales_offset(const Exchange& exchange, int source, std::int64_t row) const {
    if (config.masks) {
      const std::size_t own = slot(0, 0, config.capacity) * row_bytes(exchange);
      return source_offset(exchange.generation, source) + own +
             slot(0, 0, row) * scale_bytes(exchange);
    }
    const std::size_t codes = slot(0, ranks(), 0) * row_bytes(exchange);
    return rows_offset(exchange.generation) + codes + slot(0, source, row) * scale_bytes(exchange);
  }
  /// Of a row.
  std::size_t scales(const Exchange& exchange) const {
    const auto hidden = static_cast<std::size_t>(config.hidden);
    return nvfp4(exchange) ? hidden / kNvfp4Block : scale_count(hidden);
  }
  std::size_t scale_bytes(const Exchange& exchange) const {
    if (!quantized(exchange)) return 0;
    return scales(exchange) * (nvfp4(exchange) ? sizeof(E4m3) : sizeof(float));
  }
  std::size_t meta_offset(Generation generation, int source, std::int64_t row) const {
    return layout.metas + slot(generation, source, row) * layout.meta_slot;
  }
  std::size_t weights_offset(Generation generation, int source, std::int64_t token) const {
    return layout.weights +
           slot(generation, source, token) * static_cast<std::size_t>(config.topk) * sizeof(float);
  }
  std::size_t slot(Generation generation, int source, std::int64_t row) const {
    return (buffer(generation) * static_cast<std::size_t>(ranks()) +
            static_cast<std::size_t>(source)) *
               static_cast<std::size_t>(config.capacity) +
           static_cast<std::size_t>(row);
  }
  /// Of what a source says, or of its flag, that is there twice.
  std::size_t source_place(std::size_t first, Generation generation, int source) const {
    return first + static_cast<std::size_t>(source) * kSourceBytes +
           buffer(generation) * kFlagBlock;
  }
  std::size_t header_offset(Generation generation, int source) const {
    return source_place(layout.counts, generation, source);
  }
  /// Where, in the memory of the tokens' owner, the rows to be summed begin that lie from place
  /// `first` on: those of a rank one behind the other, in the order in which it sends them, so that
  /// they cross in few writes.
  std::size_t sums_offset(Generation generation, std::uint64_t first) const {
    return layout.sums + (buffer(generation) * sum_places() + first) * layout.sum_slot;
  }
  std::size_t sum_places() const {
    return static_cast<std::size_t>(config.capacity) * layout.sum_rows;
  }
  /// Of one of them.
  std::size_t sum_bytes(CombineFormat format) const {
    switch (format) {
      case CombineFormat::e4m3: return combine_row.e4m3_bytes;
      case CombineFormat::logfmt10: return combine_row.logfmt_bytes;
      default: return plain_bytes();
    }
  }
  protocol::FlagArray flag_array(std::size_t offset) const {
    return {segment.data + offset, kSourceBytes, ranks()};
  }

  /// Whether what goes to or comes from `peer` crosses to another domain: as records then.
  bool crosses(int peer) const { return engine.domain_of(engine.rank()) != engine.domain_of(peer); }
  RecordLayout record_layout(const Exchange& exchange) const {
    return make_record_layout(config.topk, row_bytes(exchange), scale_bytes(exchange));
  }
  std::size_t record_offset(const Exchange& exchange, int source, std::int64_t row) const {
    return layout.records + slot(exchange.generation, source, 0) * layout.record_slot +
           static_cast<std::size_t>(row) * record_layout(exchange).bytes;
  }
  // Where what came from a source lies, by whichever way it came.
  /// A source that crosses with no rows writes no record.
  const SourceHeader& header_from(const Exchange& exchange, int source) const {
    const auto at = [this](std::size_t offset) -> const SourceHeader& {
      return *reinterpret_cast<const SourceHeader*>(segment.data + offset);
    };
    const SourceHeader& alone = at(header_offset(exchange.generation, source));
    if (!crosses(source) || alone.generation == exchange.generation) return alone;
    return at(record_offset(exchange, source, 0));
  }
  const std::int32_t* meta_from(const Exchange& exchange, int source, std::int64_t row) const {
    const std::size_t offset =
        crosses(source) ? record_offset(exchange, source, row) + record_layout(exchange).meta
                        : meta_offset(exchange.generation, source, row);
    return reinterpret_cast<const std::int32_t*>(segment.data + offset);
  }
  const std::byte* row_from(const Exchange& exchange, int source, std::int64_t row) const {
    return segment.data + (crosses(source)
                               ? record_offset(exchange, source, row) + record_layout(exchange).row
                               : row_offset(exchange, source, row));
  }
  const std::byte* scales_from(const Exchange& exchange, int source, std::int64_t row) const {
    return segment.data +
           (crosses(source) ? record_offset(exchange, source, row) + record_layout(exchange).scales
                            : scales_offset(exchange, source, row));
  }
};

/// Sends tokens to the ranks in `to`, and tells them.
void send_rows(LatencyMemory& memory, const protocol::Credit<>& credit, const Exchange& exchange,
               const ConstTensorView& x, const RankBytes& to);

/// The result's tensors, without what will come.
void make_result(LatencyMemory& memory, Exchange& exchange);
/// All rows are here: fills them.
void receive_result(LatencyMemory& memory, Exchange& exchange);

/// Room for rows that are made on their way to the owner of their tokens.
struct SumRoom {
  std::vector<std::byte> rows{};  ///< as many as are written at once
  std::vector<std::byte> one{};   ///< before it is encoded
};
/// To one owner; returns the bytes.
std::size_t send_sums_to(LatencyMemory& memory, SumRoom& room, const Exchange& exchange,
                         const LatencyCombineCall& call, const ConstTensorView& rows, int owner);

/// The ranks disagree about a call: fails the group and throws Error(mismatch).
[[noreturn]] void disagree(HostEngine& engine, const char* call, int peer, const char* what,
                           Generation generation);

}  // namespace ferry::host
