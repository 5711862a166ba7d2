// Latency dispatch to and from other domains: a record for each token and rank, one write with all
// that belongs to it.
#include <array>

#include "host/latency/engine.hpp"

namespace ferry::host {

std::size_t HostLatency::send_record(const Exchange& exchange, const WireToken& wire, int peer,
                                     std::int32_t row, std::int32_t rows) {
  constexpr std::array<std::byte, 16> kPadding{};
  const RecordLayout layout = record_layout(exchange);
  const SourceHeader header = header_of(exchange, peer, rows);
  const std::size_t words = 1 + 2 * static_cast<std::size_t>(config_.topk);
  const std::size_t scale_bytes = quantized(exchange) ? wire.scales.size() * sizeof(float) : 0;
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
  add(wire.row, row_bytes(exchange), layout.scales);
  if (scale_bytes > 0) add(wire.scales.data(), scale_bytes, layout.bytes);
  reach_.write_pieces(peer, at(record_offset(exchange, engine_->rank(), row)),
                      {pieces.data(), count}, protocol::Credit<>::tag(exchange.generation));
  return bytes;
}

std::size_t HostLatency::send_no_record(const Exchange& exchange, int peer) {
  const SourceHeader header = header_of(exchange, peer, 0);
  reach_.write(peer, at(record_offset(exchange, engine_->rank(), 0)), &header, sizeof header,
               protocol::Credit<>::tag(exchange.generation));
  return sizeof header;
}

const SourceHeader& HostLatency::header_from(const Exchange& exchange, int source) const {
  const std::size_t offset = crosses(source) ? record_offset(exchange, source, 0)
                                             : header_offset(exchange.generation, source);
  return *reinterpret_cast<const SourceHeader*>(segment_.data + offset);
}

const std::int32_t* HostLatency::meta_from(const Exchange& exchange, int source,
                                           std::int64_t row) const {
  const std::size_t offset =
      crosses(source) ? record_offset(exchange, source, row) + record_layout(exchange).meta
                      : meta_offset(exchange.generation, source, row);
  return reinterpret_cast<const std::int32_t*>(segment_.data + offset);
}

const std::byte* HostLatency::row_from(const Exchange& exchange, int source,
                                       std::int64_t row) const {
  return segment_.data + (crosses(source)
                              ? record_offset(exchange, source, row) + record_layout(exchange).row
                              : row_offset(exchange, source, row));
}

const float* HostLatency::scales_from(const Exchange& exchange, int source,
                                      std::int64_t row) const {
  const std::size_t offset =
      crosses(source) ? record_offset(exchange, source, row) + record_layout(exchange).scales
                      : scales_offset(exchange, source, row);
  return reinterpret_cast<const float*>(segment_.data + offset);
}

}  // namespace ferry::host
