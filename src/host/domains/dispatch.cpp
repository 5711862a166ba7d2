// Dispatch over several domains, hierarchical: one copy of a token for each of them, in chunks, to
// the rank on the same rail, while what has come here is spread.
#include <algorithm>
#include <vector>

#include "host/domains/forwarder.hpp"
#include "host/throughput/dispatch_call.hpp"

namespace ferry::host {
namespace {

/// Rows of `width` values, gathered for these tokens.
template <class T, class Of>
std::vector<T> gathered(std::span<const std::int32_t> tokens, std::size_t width, Of&& of) {
  std::vector<T> values(tokens.size() * width);
  for (std::size_t i = 0; i < tokens.size(); ++i) {
    for (std::size_t k = 0; k < width; ++k) values[i * width + k] = of(index(tokens[i]), k);
  }
  return values;
}

void send_chunk(const DispatchCall& call, DispatchPush& push, int domain, std::int64_t first,
                std::int64_t end) {
  const int rail = call.engine.topology().rail(call.engine.rank(), domain);
  const StepMessage theirs = call.channel().head(rail);
  const StagingShape shape = call.staging_shape(rail);
  const StagingLayout layout = make_staging_layout(shape);
  const std::span<const std::int32_t> tokens(
      call.plan->crossing.tokens.data() + call.plan->crossing.offset[index(domain)] + first,
      index(end - first));
  const std::size_t row = index(call.plan->crossing.rail_row[index(domain)] + first);
  std::uint64_t bytes = 0;
  const auto send = [&](std::size_t at, std::size_t width, const auto& values) {
    const std::size_t size = values.size() * sizeof(values[0]);
    call.channel().reach().write(rail,
                                 {theirs.staging_segment, theirs.staging_offset + at + row * width},
                                 values.data(), size, call.channel().chunk_tag(rail));
    bytes += size;
  };
  std::vector<fabric::Piece> rows;
  for (const std::int32_t token : tokens) rows.push_back({push.encode(token), shape.row_bytes});
  call.channel().reach().write_pieces(
      rail,
      {theirs.staging_segment, theirs.staging_offset + layout.rows_at + row * shape.row_bytes},
      rows, call.channel().chunk_tag(rail));
  bytes += rows.size() * shape.row_bytes;
  const auto topk = index(call.plan->topk);
  if (shape.scale_columns > 0) {
    const ConstTensorView all = push.scales();
    const auto* own = static_cast<const float*>(all.data);
    const auto columns = index(shape.scale_columns);
    send(layout.scales, columns * sizeof(float),
         gathered<float>(tokens, columns, [&](std::size_t token, std::size_t c) {
           return own[static_cast<std::int64_t>(token) * all.strides[0] +
                      static_cast<std::int64_t>(c) * all.strides[1]];
         }));
  }
  if (shape.tokens) send(layout.source_token, sizeof(std::int32_t), tokens);
  if (shape.routes) {
    const std::int32_t* ids = call.exchange().own.topk_idx.data();
    std::vector<std::byte> packed(tokens.size() * shape.route_bytes);
    for (std::size_t i = 0; i < tokens.size(); ++i) {
      call.packed_routes().pack(ids + index(tokens[i]) * topk, 1,
                                packed.data() + i * shape.route_bytes);
    }
    send(layout.topk_idx, shape.route_bytes, packed);
  }
  if (shape.weights) {
    const auto* own = static_cast<const float*>(call.options.topk_weights->data);
    send(layout.weights, topk * sizeof(float),
         gathered<float>(tokens, topk,
                         [&](std::size_t token, std::size_t k) { return own[token * topk + k]; }));
  }
  call.channel().send_chunk(rail, bytes);
}

}  // namespace

void push_hierarchical(const DispatchCall& call, DispatchPush& push, const std::byte* stage) {
  const Domains& domains = call.engine.topology();
  const int own = domains.of(call.engine.rank());
  const std::vector<std::int64_t>& offset = call.plan->crossing.offset;
  const std::int64_t chunk = chunk_rows(call.row.bytes(), call.chunk_bytes);
  Forwarder forwarder(call.engine, *call.plan, call.staging_shape(call.engine.rank()), stage,
                      push.stream(), chunk);
  bool more = true;
  for (std::int64_t first = 0; more; first += chunk) {
    more = false;
    for (int i = 1; i < domains.count(); ++i) {  // each starts elsewhere
      const int domain = (own + i) % domains.count();
      const std::int64_t rows = offset[index(domain + 1)] - offset[index(domain)];
      if (first >= rows) continue;
      send_chunk(call, push, domain, first, std::min(rows, first + chunk));
      more = true;
    }
    forwarder.poll();
  }
  push.rows();  // while the network carries
  for (const int member : domains.members(own)) push.side(member);
  forwarder.finish();
  for (std::size_t i = 0; i < domains.members(own).size(); ++i) {
    const auto next = (index(domains.index(call.engine.rank())) + i) % domains.members(own).size();
    call.channel().deliver(domains.members(own)[next], 0);
  }
}

}  // namespace ferry::host
