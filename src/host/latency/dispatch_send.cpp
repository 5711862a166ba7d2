// Latency dispatch, sending: encoding, one copy of a token for each rank; to other domains as
// records, one write with all that belongs to a token.
#include <array>
#include <cstring>
#include <utility>

#include "host/kernels/kernels.hpp"
#include "host/latency/memory.hpp"

namespace ferry::host {
namespace {

SourceHeader header_of(const Exchange& exchange, int peer, std::int32_t rows) {
  SourceHeader header;
  header.generation = exchange.generation;
  header.first_sum = exchange.sums_here[static_cast<std::size_t>(peer)];
  header.rows = rows;
  header.format = static_cast<std::uint8_t>(exchange.options.format);
  header.scale_format = static_cast<std::uint8_t>(exchange.options.scale_format);
  header.weights = exchange.options.topk_weights ? 1 : 0;
  header.global_scale = exchange.options.global_scale;
  return header;
}

void encode(const LatencyMemory& memory, const Exchange& exchange, const std::byte* row,
            WireToken& wire) {
  if (!memory.quantized(exchange)) {
    wire.row = row;
    return;
  }
  QuantizeRow quantize;
  quantize.row = row;
  quantize.dtype = memory.config.dtype;
  quantize.columns = memory.config.hidden;
  quantize.round_scale = exchange.options.scale_format != ScaleFormat::f32;
  if (memory.nvfp4(exchange)) quantize.global_scale = exchange.options.global_scale;
  quantize.codes = wire.codes.data();
  quantize.scales = wire.scales.data();
  kernels().quantize_row(quantize);
  wire.row = wire.codes.data();
}

/// Whether the token goes to `peer`, and what stands beside it there.
bool route_to(const LatencyMemory& memory, const Exchange& exchange, std::int64_t token, int peer,
              std::int32_t* meta) {
  const Placement& placement = memory.engine.placement();
  const auto first = static_cast<std::int32_t>(placement.first_expert(peer));
  const auto end = static_cast<std::int32_t>(placement.first_expert(peer + 1));
  const auto topk = static_cast<std::size_t>(exchange.topk);
  const auto at = static_cast<std::size_t>(token) * topk;
  auto* weights = meta + 1 + memory.config.topk;
  bool goes = false;
  meta[0] = static_cast<std::int32_t>(token);
  for (std::size_t k = 0; k < topk; ++k) {
    const std::int32_t id = exchange.routes[at + k];
    const bool local = id >= first && id < end;
    meta[1 + k] = local ? id - first : -1;
    const float weight = local && !exchange.weights.empty() ? exchange.weights[at + k] : 0.0f;
    std::memcpy(weights + k, &weight, sizeof(weight));
    goes |= local;
  }
  return goes;
}

std::size_t send_row(LatencyMemory& memory, const Exchange& exchange, const WireToken& wire,
                     int peer, std::int32_t row) {
  const std::uint64_t tag = protocol::Credit<>::tag(exchange.generation);
  const int self = memory.engine.rank();
  std::size_t bytes = memory.row_bytes(exchange);
  memory.reach.write(peer, memory.at(memory.row_offset(exchange, self, row)), wire.row, bytes, tag);
  if (memory.quantized(exchange)) {
    memory.reach.write(peer, memory.at(memory.scales_offset(exchange, self, row)),
                       wire.scales.data(), wire.scales.size(), tag);
    bytes += wire.scales.size();
  }
  const std::size_t words = 1 + static_cast<std::size_t>(memory.config.topk) *
                                    (exchange.weights.empty() ? std::size_t{1} : std::size_t{2});
  const std::size_t meta_bytes = words * sizeof(std::int32_t);
  memory.reach.write(peer, memory.at(memory.meta_offset(exchange.generation, self, row)),
                     wire.meta.data(), meta_bytes, tag);
  return bytes + meta_bytes;
}

/// To another domain: the same write for row, scales, route and count; returns its bytes.
std::size_t send_record(LatencyMemory& memory, const Exchange& exchange, const WireToken& wire,
                        int peer, std::int32_t row, std::int32_t rows) {
  constexpr std::array<std::byte, 16> kPadding{};
  const RecordLayout layout = memory.record_layout(exchange);
  const SourceHeader header = header_of(exchange, peer, rows);
  const std::size_t words = 1 + 2 * static_cast<std::size_t>(memory.config.topk);
  std::size_t bytes = 0;
  std::array<fabric::Piece, 7> pieces{};
  std::size_t count = 0;
  const auto add = [&](const void* data, std::size_t size, std::size_t next) {
    pieces[count++] = {data, size};
    bytes += size;
    if (bytes < next) pieces[count++] = {kPadding.data(), next - bytes};
    bytes = next;
  };
  add(&header, sizeof header, layout.meta);
  add(wire.meta.data(), words * sizeof(std::int32_t), layout.row);
  add(wire.row, memory.row_bytes(exchange), layout.scales);
  if (!wire.scales.empty()) add(wire.scales.data(), wire.scales.size(), layout.bytes);
  memory.reach.write_pieces(peer,
                            memory.at(memory.record_offset(exchange, memory.engine.rank(), row)),
                            {pieces.data(), count}, protocol::Credit<>::tag(exchange.generation));
  return bytes;
}

/// Without records: to a rank of the domain, or where there are no rows.
std::size_t send_header(LatencyMemory& memory, const Exchange& exchange, int peer,
                        std::int32_t rows) {
  const Generation g = exchange.generation;
  const SourceHeader header = header_of(exchange, peer, rows);
  memory.reach.write(peer, memory.at(memory.header_offset(g, memory.engine.rank())), &header,
                     sizeof header, protocol::Credit<>::tag(g));
  return sizeof header;
}

/// How many tokens go to each rank, [R].
std::vector<std::int32_t> rows_to_ranks(const LatencyMemory& memory, const Exchange& exchange) {
  std::vector<std::int32_t> rows(static_cast<std::size_t>(memory.ranks()), 0);
  std::vector<std::int64_t> last(rows.size(), -1);  // token that went there
  const auto topk = static_cast<std::size_t>(exchange.topk);
  for (std::size_t i = 0; i < exchange.routes.size(); ++i) {
    if (exchange.routes[i] < 0) continue;
    const auto d = static_cast<std::size_t>(memory.engine.placement().rank_of(exchange.routes[i]));
    const auto token = static_cast<std::int64_t>(i / topk);
    if (std::exchange(last[d], token) != token) ++rows[d];
  }
  return rows;
}

}  // namespace

void send_rows(LatencyMemory& memory, const protocol::Credit<>& credit, const Exchange& exchange,
               const ConstTensorView& x, const RankBytes& to) {
  const Generation g = exchange.generation;
  WireToken wire;
  if (memory.quantized(exchange)) wire.codes.resize(memory.row_bytes(exchange));
  wire.scales.resize(memory.scale_bytes(exchange));
  wire.meta.assign(memory.layout.meta_slot / sizeof(std::int32_t), -1);
  const std::vector<std::int32_t> all = rows_to_ranks(memory, exchange);
  std::vector<std::int32_t> sent(static_cast<std::size_t>(memory.ranks()), 0);
  std::vector<std::uint64_t> bytes(static_cast<std::size_t>(memory.ranks()), 0);
  const auto* rows = static_cast<const std::byte*>(x.data);
  for (std::int64_t token = 0; token < exchange.tokens; ++token) {
    encode(memory, exchange, rows + static_cast<std::size_t>(token) * memory.plain_bytes(), wire);
    for (int peer = 0; peer < memory.ranks(); ++peer) {
      if (to[static_cast<std::size_t>(peer)] == 0) continue;
      if (!route_to(memory, exchange, token, peer, wire.meta.data())) continue;
      const auto d = static_cast<std::size_t>(peer);
      bytes[d] += memory.crosses(peer) ? send_record(memory, exchange, wire, peer, sent[d], all[d])
                                       : send_row(memory, exchange, wire, peer, sent[d]);
      ++sent[d];
    }
  }
  for (int i = 0; i < memory.ranks(); ++i) {
    const int peer = (memory.engine.rank() + i) % memory.ranks();
    const auto d = static_cast<std::size_t>(peer);
    if (to[d] == 0) continue;
    if (all[d] == 0 || !memory.crosses(peer)) {
      bytes[d] += send_header(memory, exchange, peer, all[d]);
    }
    credit.announce(memory.reach, peer, g, bytes[d]);
  }
}

}  // namespace ferry::host
