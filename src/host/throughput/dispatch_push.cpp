// Dispatch: rows, scales, weights and routes, straight to their final places.
#include "host/throughput/dispatch_call.hpp"

#include <cstring>

#include "host/kernels/kernels.hpp"

namespace ferry::host {

void DispatchPush::write(int peer, fabric::Address to, const void* from, std::size_t bytes) {
  if (bytes == 0) return;
  if (std::byte* target = channel_.pointer(peer, to)) {
    std::memcpy(target, from, bytes);
  } else {
    channel_.reach().write(peer, {to.segment, to.offset}, from, bytes, channel_.delivery_tag());
    put_bytes_[static_cast<std::size_t>(peer)] += bytes;
  }
}

DispatchPush::DispatchPush(const DispatchCall& call)
    : call_(call),
      stream_(call.exchange().destinations.size() * call.row.bytes() > kStreamBytes),
      made_scales_(call.row.quantized
                       ? static_cast<std::size_t>(call.plan->tokens * call.row.scale_columns)
                       : 0),
      put_bytes_(static_cast<std::size_t>(call.engine.size())) {
  if (!call.row.quantized) return;
  const std::size_t rows = call.hierarchical() ? index(call.plan->tokens) : 1;
  codes_ = std::make_unique_for_overwrite<std::byte[]>(rows * call.row.bytes());
  if (call.hierarchical()) stays_.resize(rows);
}

void DispatchPush::direct() {
  rows();
  for (int i = 0; i < call_.engine.size(); ++i) {
    const int peer = (call_.engine.rank() + i) % call_.engine.size();
    if (!channel_.has(peer)) continue;
    side(peer);
    channel_.deliver(peer, put_bytes_[static_cast<std::size_t>(peer)]);
  }
}

const std::byte* DispatchPush::encode(std::int64_t token) {
  const auto t = static_cast<std::size_t>(token);
  const std::byte* row = static_cast<const std::byte*>(call_.x.data) + t * call_.x.row_bytes();
  if (!call_.row.quantized) return row;
  std::byte* codes = codes_.get();
  if (!stays_.empty()) {
    codes += t * call_.row.bytes();
    if (stays_[t]) return codes;
    stays_[t] = true;
  }
  QuantizeRow quantize;
  quantize.row = row;
  quantize.dtype = call_.x.dtype;
  quantize.columns = call_.row.columns;
  quantize.round_scale = call_.row.round_scale;
  quantize.codes = codes;
  quantize.scales = made_scales_.data() + t * static_cast<std::size_t>(call_.row.scale_columns);
  kernels().quantize_row(quantize);
  return codes;
}

ConstTensorView DispatchPush::scales() const {
  if (!call_.row.quantized) return *call_.options.scales;
  return {made_scales_.data(), Dtype::f32, {call_.plan->tokens, call_.row.scale_columns}};
}

/// To every rank; of a hierarchical dispatch, to those of the domain.
void DispatchPush::rows() {
  const std::size_t row_bytes = call_.row.bytes();
  const auto ranks = static_cast<std::size_t>(call_.engine.size());
  std::vector<fabric::Address> target(ranks);
  std::vector<std::byte*> base(ranks);
  for (const int peer : channel_.ranks()) {
    const StepMessage theirs = channel_.head(peer);
    const auto d = static_cast<std::size_t>(peer);
    const auto layout = call_.receive_layout(theirs.rows);
    const std::uint64_t first = static_cast<std::uint64_t>(plan_.peer_row[d]) * row_bytes;
    target[d] = {theirs.segment, theirs.offset + layout.rows + first};
    base[d] = channel_.pointer(peer, target[d]);
  }
  const Kernels& run = kernels();
  for (std::int64_t token = 0; token < call_.plan->tokens; ++token) {
    const std::byte* row = encode(token);
    const auto t = static_cast<std::size_t>(token);
    for (std::int64_t l = plan_.destination_offset[t]; l < plan_.destination_offset[t + 1]; ++l) {
      const Destination destination = plan_.destinations[static_cast<std::size_t>(l)];
      const auto d = static_cast<std::size_t>(destination.rank);
      const std::uint64_t at = static_cast<std::uint64_t>(destination.row) * row_bytes;
      if (base[d] == nullptr) {
        if (!call_.hierarchical())
          write(destination.rank, {target[d].segment, target[d].offset + at}, row, row_bytes);
      } else if (stream_) {
        run.copy_stream(base[d] + at, row, row_bytes);
      } else {
        std::memcpy(base[d] + at, row, row_bytes);
      }
    }
  }
  if (stream_) run.stream_fence();  // before any flag is published
}

void DispatchPush::side(int peer) {
  const StepMessage theirs = channel_.head(peer);
  const auto d = static_cast<std::size_t>(peer);
  const auto rows = static_cast<std::size_t>(plan_.send_rows(peer));
  if (rows == 0) return;
  const auto topk = static_cast<std::size_t>(call_.plan->topk);
  const auto first = static_cast<std::size_t>(plan_.peer_row[d]);
  const std::int32_t* tokens = plan_.send_tokens.data() + plan_.send_offset[d];
  const auto side = call_.side_layout(theirs.rows);
  const auto send = [&](std::uint32_t segment, std::uint64_t offset, const auto& values) {
    write(peer, {segment, offset}, values.data(), values.size() * sizeof(values[0]));
  };
  std::vector<std::int32_t> routes;
  if (call_.carries_routes || call_.has_weights()) {
    routes.resize(rows * topk);
    local_routes(plan_, peer, routes.data());
  }
  if (call_.carries_routes) {
    write(peer, {theirs.side_segment, theirs.side_offset + side.source_token + first * 4}, tokens,
          rows * sizeof(std::int32_t));
    const std::uint64_t place = theirs.side_offset + side.topk_idx + first * topk * 4;
    if (const auto form = call_.packed_routes(channel_.rank(), peer)) {
      std::vector<std::byte> packed(rows * form->row_bytes());
      form->pack(routes.data(), rows, packed.data());
      send(theirs.side_segment, place, packed);
    } else {
      send(theirs.side_segment, place, routes);
    }
  }
  if (call_.has_weights()) {
    std::vector<float> weights(rows * topk);
    const auto* own = static_cast<const float*>(call_.options.topk_weights->data);
    for (std::size_t i = 0; i < rows; ++i) {
      const float* row = own + static_cast<std::size_t>(tokens[i]) * topk;
      for (std::size_t k = 0; k < topk; ++k) {
        weights[i * topk + k] = routes[i * topk + k] < 0 ? 0.0f : row[k];
      }
    }
    send(theirs.side_segment, theirs.side_offset + side.weights + first * topk * 4, weights);
  }
  if (call_.row.scale_columns > 0) {
    const ConstTensorView scales = this->scales();
    const auto columns = static_cast<std::size_t>(call_.row.scale_columns);
    std::vector<float> packed(rows * columns);
    const auto* own = static_cast<const float*>(scales.data);
    for (std::size_t i = 0; i < rows; ++i) {
      for (std::size_t c = 0; c < columns; ++c) {
        packed[i * columns + c] =
            own[tokens[i] * scales.strides[0] + static_cast<std::int64_t>(c) * scales.strides[1]];
      }
    }
    const auto layout = call_.receive_layout(theirs.rows);
    send(theirs.segment, theirs.offset + layout.scales + first * columns * 4, packed);
  }
}

}  // namespace ferry::host
