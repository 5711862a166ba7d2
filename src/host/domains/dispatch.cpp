// Dispatch over several domains, hierarchical: one copy of a token for each of them, in chunks, to
// the rank on the same rail, while what has come here is spread.
#include <algorithm>
#include <vector>

#include "host/domains/forwarder.hpp"
#include "host/throughput/dispatch_job.hpp"

namespace ferry::host {
namespace {

std::size_t index(std::int64_t value) {
  return static_cast<std::size_t>(value);
}

/// Rows of `width` values, gathered for these tokens.
template <class T, class Of>
std::vector<T> gathered(std::span<const std::int32_t> tokens, std::size_t width, Of&& of) {
  std::vector<T> values(tokens.size() * width);
  for (std::size_t i = 0; i < tokens.size(); ++i) {
    for (std::size_t k = 0; k < width; ++k) values[i * width + k] = of(index(tokens[i]), k);
  }
  return values;
}

}  // namespace

void DispatchJob::resolve_crossing() {
  crossing_ = options_.crossing;
  if (crossing_ == Crossing::automatic) crossing_ = plan_->crossing.chosen;
  if (engine_.domains() == 1) crossing_ = Crossing::direct;
  carries_forwards_ = hierarchical() && !plan_->forwards_known;
}

StageShape DispatchJob::stage_shape(int rank) const {
  return {plan_->crossing.stage_rows(rank),
          row_.bytes(),
          row_.scale_columns,
          plan_->topk,
          carries_routes_,
          carries_forwards_,
          has_weights()};
}

bool DispatchJob::allocate_stage() {
  if (!hierarchical() || stage_.data != nullptr) return true;
  const auto taken = regions_.take({make_stage_layout(stage_shape(engine_.rank())).bytes});
  if (taken) stage_ = taken->front();
  return taken.has_value();
}

void DispatchJob::check_stages() {
  const Domains& domains = engine_.topology();
  for (int domain = 0; domain < domains.count(); ++domain) {
    if (domain == domains.of(engine_.rank())) continue;
    const int rail = domains.rail(engine_.rank(), domain);
    const StepMessage theirs = channel().head(rail);
    channel().checked("dispatch: grants", rail, {theirs.stage_segment, theirs.stage_offset},
                      make_stage_layout(stage_shape(rail)).bytes);
  }
}

void DispatchJob::push_hierarchical(bool stream) {
  const Domains& domains = engine_.topology();
  const int own = domains.of(engine_.rank());
  const std::vector<std::int64_t>& offset = plan_->crossing.offset;
  Forwarder forwarder(engine_, *plan_, stage_shape(engine_.rank()), stage_.data, stream);
  const std::int64_t chunk = chunk_rows(row_.bytes());
  bool more = true;
  for (std::int64_t first = 0; more; first += chunk) {
    more = false;
    for (int i = 1; i < domains.count(); ++i) {  // each starts elsewhere
      const int domain = (own + i) % domains.count();
      const std::int64_t rows = offset[index(domain + 1)] - offset[index(domain)];
      if (first >= rows) continue;
      send_chunk(domain, first, std::min(rows, first + chunk));
      more = true;
    }
    forwarder.poll();
  }
  push_rows(stream);  // while the network carries
  for (const int member : domains.members(own)) push_side(member, channel().head(member));
  forwarder.finish();
  for (std::size_t i = 0; i < domains.members(own).size(); ++i) {
    const auto next = (index(domains.index(engine_.rank())) + i) % domains.members(own).size();
    channel().deliver(domains.members(own)[next], 0);
  }
}

void DispatchJob::send_chunk(int domain, std::int64_t first, std::int64_t end) {
  const int rail = engine_.topology().rail(engine_.rank(), domain);
  const StepMessage theirs = channel().head(rail);
  const StageShape shape = stage_shape(rail);
  const StageLayout layout = make_stage_layout(shape);
  const std::span<const std::int32_t> tokens(
      plan_->crossing.tokens.data() + plan_->crossing.offset[index(domain)] + first,
      index(end - first));
  const std::size_t row = index(plan_->crossing.first_stage_row(rail, engine_.rank()) + first);
  std::uint64_t bytes = 0;
  const auto send = [&](std::size_t at, std::size_t width, const auto& values) {
    const std::size_t size = values.size() * sizeof(values[0]);
    channel().reach().write(rail, {theirs.stage_segment, theirs.stage_offset + at + row * width},
                            values.data(), size, channel().chunk_tag(rail));
    bytes += size;
  };
  std::vector<std::byte> codes(row_.quantized ? tokens.size() * shape.row_bytes : 0);
  std::vector<fabric::Piece> rows;
  for (std::size_t i = 0; i < tokens.size(); ++i) {
    std::byte* to = row_.quantized ? codes.data() + i * shape.row_bytes : nullptr;
    rows.push_back({encode(tokens[i], to), shape.row_bytes});
  }
  channel().reach().write_pieces(
      rail, {theirs.stage_segment, theirs.stage_offset + layout.rows_at + row * shape.row_bytes},
      rows, channel().chunk_tag(rail));
  bytes += rows.size() * shape.row_bytes;
  const auto topk = index(plan_->topk);
  if (shape.scale_columns > 0) {
    const ConstTensorView all = scales();
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
    const std::int32_t* ids = plan().own.topk_idx.data();
    send(layout.topk_idx, topk * sizeof(std::int32_t),
         gathered<std::int32_t>(tokens, topk, [&](std::size_t token, std::size_t k) {
           return ids[token * topk + k];
         }));
  }
  if (shape.weights) {
    const auto* own = static_cast<const float*>(options_.topk_weights->data);
    send(layout.weights, topk * sizeof(float),
         gathered<float>(tokens, topk,
                         [&](std::size_t token, std::size_t k) { return own[token * topk + k]; }));
  }
  channel().send_chunk(rail, bytes);
}

void DispatchJob::await_domain() {
  const Domains& domains = engine_.topology();
  for (const int member : domains.members(domains.of(engine_.rank()))) {
    channel().await_delivered("dispatch: rows", member);
  }
}

}  // namespace ferry::host
