// Dispatch: rows, scales, weights and routes, straight to their final places.
#include <cstring>
#include <vector>

#include "host/kernels/kernels.hpp"
#include "host/throughput/dispatch_job.hpp"

namespace ferry::host {

namespace {

/// Above this many bytes an exchange does not stay in the caches, so stores go past them.
constexpr std::size_t kStreamBytes = std::size_t{4} << 20;

}  // namespace

void DispatchJob::write(int peer, fabric::Address to, const void* from, std::size_t bytes) {
  if (bytes == 0) return;
  if (std::byte* target = channel().pointer(peer, to)) {
    std::memcpy(target, from, bytes);
  } else {
    channel().reach().write(peer, {to.segment, to.offset}, from, bytes, channel().delivery_tag());
    put_bytes_[static_cast<std::size_t>(peer)] += bytes;
  }
}

void DispatchJob::push() {
  put_bytes_.assign(static_cast<std::size_t>(engine_.size()), 0);
  if (row_.quantized) {
    made_scales_.resize(static_cast<std::size_t>(plan_->tokens * row_.scale_columns));
  }
  const bool stream = plan().lanes.size() * row_.bytes() > kStreamBytes;
  if (hierarchical()) return push_hierarchical(stream);
  push_rows(stream);
  for (int i = 0; i < engine_.size(); ++i) {
    const int peer = (engine_.rank() + i) % engine_.size();
    push_side(peer, channel().head(peer));
    channel().deliver(peer, put_bytes_[static_cast<std::size_t>(peer)]);
  }
}

/// A token's row as it crosses, in `codes` if it has to be made; its scales are made, too.
const std::byte* DispatchJob::encode(std::int64_t token, std::byte* codes) {
  const auto t = static_cast<std::size_t>(token);
  const std::byte* row = static_cast<const std::byte*>(x_.data) + t * x_.row_bytes();
  if (!row_.quantized) return row;
  QuantizeRow quantize;
  quantize.row = row;
  quantize.dtype = x_.dtype;
  quantize.columns = row_.columns;
  quantize.round_scale = row_.round_scale;
  quantize.codes = codes;
  quantize.scales = made_scales_.data() + t * static_cast<std::size_t>(row_.scale_columns);
  kernels().quantize_row(quantize);
  return codes;
}

ConstTensorView DispatchJob::scales() const {
  if (!row_.quantized) return *options_.scales;
  return {made_scales_.data(), Dtype::f32, {plan_->tokens, row_.scale_columns}};
}

/// To every rank; of a hierarchical dispatch, to those of the domain.
void DispatchJob::push_rows(bool stream) {
  const std::size_t row_bytes = row_.bytes();
  std::vector<std::byte> codes(row_.quantized ? row_bytes : 0);
  const auto ranks = static_cast<std::size_t>(engine_.size());
  std::vector<fabric::Address> target(ranks);
  std::vector<std::byte*> base(ranks);
  for (int peer = 0; peer < engine_.size(); ++peer) {
    const StepMessage theirs = channel().head(peer);
    const auto d = static_cast<std::size_t>(peer);
    const auto layout = receive_layout(theirs.rows);
    const std::uint64_t first = static_cast<std::uint64_t>(plan().peer_row[d]) * row_bytes;
    target[d] = {theirs.segment, theirs.offset + layout.rows + first};
    base[d] = channel().pointer(peer, target[d]);
  }
  const Kernels& run = kernels();
  for (std::int64_t token = 0; token < plan_->tokens; ++token) {
    const std::byte* row = encode(token, codes.data());
    const auto t = static_cast<std::size_t>(token);
    for (std::int64_t l = plan().lane_offset[t]; l < plan().lane_offset[t + 1]; ++l) {
      const Lane lane = plan().lanes[static_cast<std::size_t>(l)];
      const auto d = static_cast<std::size_t>(lane.rank);
      const std::uint64_t at = static_cast<std::uint64_t>(lane.row) * row_bytes;
      if (base[d] == nullptr) {
        if (!hierarchical())
          write(lane.rank, {target[d].segment, target[d].offset + at}, row, row_bytes);
      } else if (stream) {
        run.copy_stream(base[d] + at, row, row_bytes);
      } else {
        std::memcpy(base[d] + at, row, row_bytes);
      }
    }
  }
  if (stream) run.stream_fence();  // before any flag is published
}

void DispatchJob::push_side(int peer, const StepMessage& theirs) {
  const auto d = static_cast<std::size_t>(peer);
  const auto rows = static_cast<std::size_t>(plan().send_rows(peer));
  if (rows == 0) return;
  const auto topk = static_cast<std::size_t>(plan_->topk);
  const auto first = static_cast<std::size_t>(plan().peer_row[d]);
  const std::int32_t* tokens = plan().send_tokens.data() + plan().send_offset[d];
  const auto side = make_side_layout(theirs.rows, plan_->topk, carries_routes_, has_weights());
  const auto send = [&](std::uint32_t segment, std::uint64_t offset, const auto& values) {
    write(peer, {segment, offset}, values.data(), values.size() * sizeof(values[0]));
  };
  std::vector<std::int32_t> routes;
  if (carries_routes_ || has_weights()) {
    routes.resize(rows * topk);
    local_routes(plan(), peer, routes.data());
  }
  if (carries_routes_) {
    write(peer, {theirs.side_segment, theirs.side_offset + side.source_token + first * 4}, tokens,
          rows * sizeof(std::int32_t));
    send(theirs.side_segment, theirs.side_offset + side.topk_idx + first * topk * 4, routes);
  }
  if (has_weights()) {
    std::vector<float> weights(rows * topk);
    const auto* own = static_cast<const float*>(options_.topk_weights->data);
    for (std::size_t i = 0; i < rows; ++i) {
      const float* row = own + static_cast<std::size_t>(tokens[i]) * topk;
      for (std::size_t k = 0; k < topk; ++k) {
        weights[i * topk + k] = routes[i * topk + k] < 0 ? 0.0f : row[k];
      }
    }
    send(theirs.side_segment, theirs.side_offset + side.weights + first * topk * 4, weights);
  }
  if (row_.scale_columns > 0) {
    const ConstTensorView scales = this->scales();
    const auto columns = static_cast<std::size_t>(row_.scale_columns);
    std::vector<float> packed(rows * columns);
    const auto* own = static_cast<const float*>(scales.data);
    for (std::size_t i = 0; i < rows; ++i) {
      for (std::size_t c = 0; c < columns; ++c) {
        packed[i * columns + c] =
            own[tokens[i] * scales.strides[0] + static_cast<std::int64_t>(c) * scales.strides[1]];
      }
    }
    const auto layout = receive_layout(theirs.rows);
    send(theirs.segment, theirs.offset + layout.scales + first * columns * 4, packed);
  }
}

}  // namespace ferry::host
