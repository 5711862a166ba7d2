// Latency dispatch to and from other domains: a record for each token and rank, one write with all
// that belongs to it.
#include <cstring>

#include "host/latency_engine.hpp"

namespace ferry::host {

std::size_t HostLatency::send_record(const Exchange& exchange, WireToken& wire, int peer,
                                     std::int32_t row, std::int32_t rows) {
  const RecordLayout layout = record_layout(exchange);
  const std::size_t meta_bytes =
      (1 + 2 * static_cast<std::size_t>(config_.topk)) * sizeof(std::int32_t);
  if (!wire.recorded) {  // the same for all ranks, but for its head
    wire.record.assign(layout.bytes, std::byte{0});
    std::memcpy(wire.record.data() + layout.row, wire.row, row_bytes(exchange));
    if (quantized(exchange)) {
      std::memcpy(wire.record.data() + layout.scales, wire.scales.data(),
                  wire.scales.size() * sizeof(float));
    }
    wire.recorded = true;
  }
  const SourceHeader header = header_of(exchange, rows);
  std::memcpy(wire.record.data(), &header, sizeof header);
  std::memcpy(wire.record.data() + layout.meta, wire.meta.data(), meta_bytes);
  reach_.write(peer, at(record_offset(exchange, engine_->rank(), row)), wire.record.data(),
               layout.bytes, protocol::Credit<>::tag(exchange.generation));
  return layout.bytes;
}

std::size_t HostLatency::send_no_record(const Exchange& exchange, int peer) {
  const SourceHeader header = header_of(exchange, 0);
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
