// Latency dispatch, first half: checks, encoding, one copy of a token for each rank.
#include <algorithm>
#include <cstring>
#include <string>
#include <utility>

#include "core/check.hpp"
#include "core/number.hpp"
#include "host/kernels/kernels.hpp"
#include "host/latency_engine.hpp"

namespace ferry::host {

void HostLatency::check_expert_capacity(const std::vector<std::int32_t>& routes) const {
  // Duplicate ids in a route take a row each, so one expert can get more rows than there are
  // tokens; with at most `capacity` from each rank its block always holds them.
  std::vector<std::int64_t> slots(static_cast<std::size_t>(engine_->placement().experts), 0);
  for (std::int32_t id : routes) {
    if (id >= 0 && ++slots[static_cast<std::size_t>(id)] > config_.capacity) {
      refuse(kLatencyDispatch, "topk_idx",
             "more than " + std::to_string(config_.capacity) + " slots for expert " +
                 std::to_string(id),
             "at most the capacity for one expert");
    }
  }
}

std::shared_ptr<Exchange> HostLatency::begin(const ConstTensorView& x,
                                             const ConstTensorView& topk_idx,
                                             const LatencyDispatchOptions& options) {
  check_latency_dispatch(x, topk_idx, config_, options);
  check_waits(kLatencyDispatch, options.waits, ranks());
  auto exchange = std::make_shared<Exchange>();
  exchange->routes = checked_routes(kLatencyDispatch, topk_idx, engine_->placement().experts);
  check_expert_capacity(exchange->routes);
  exchange->options = options;
  exchange->tokens = x.rows();
  exchange->topk = static_cast<int>(topk_idx.shape[1]);
  std::scoped_lock lock(mutex_);
  const Generation next = generation_ + 1;
  if (alive_[buffer(next)]) {
    throw Error(ErrorKind::exhausted,
                std::string(kLatencyDispatch) +
                    ": the result of the dispatch before the last is still alive, and the two "
                    "buffers are used in turn; drop it (LatencyReceived, its tensors and its "
                    "LatencyCombined) before this dispatch",
                {engine_->rank(), engine_->rank(), kLatencyDispatch, generation_, 0, 0});
  }
  exchange->generation = next;
  make_tensors(*exchange);
  // Nothing fails any more: from here on the peers count on this generation.
  exchange->lease->take();
  generation_ = next;
  alive_[buffer(next)] = true;
  return exchange;
}

void HostLatency::make_tensors(Exchange& exchange) {
  const std::int64_t experts = local_experts(), rows = output_rows(), hidden = config_.hidden;
  const bool quantized = exchange.options.format == WireFormat::e4m3;
  LatencyReceived& result = exchange.result;
  exchange.lease = std::make_shared<BufferLease>(shared_from_this(), exchange.generation);
  std::byte* output =
      segment_.data + layout_.outputs + buffer(exchange.generation) * layout_.output_bytes;
  result.x = {TensorView(output, quantized ? Dtype::e4m3 : config_.dtype, {experts, rows, hidden}),
              std::shared_ptr<void>(exchange.lease, output)};
  result.counts = heap_tensor({experts}, Dtype::i32);
  result.source_token = heap_tensor({experts, rows}, Dtype::i32);
  result.ranges = heap_tensor({experts, ranks()}, Dtype::i64);
  if (quantized) {
    const auto scales = static_cast<std::int64_t>(scale_count(static_cast<std::size_t>(hidden)));
    const bool packed = exchange.options.scale_format == ScaleFormat::ue8m0_packed;
    const std::int64_t columns = packed ? (scales + 3) / 4 : scales;
    const Tensor stored = heap_tensor({experts, columns, rows}, packed ? Dtype::i32 : Dtype::f32);
    result.scales = {TensorView(stored.data(), stored.dtype(), {experts, rows, columns},
                                {columns * rows, 1, rows}, {}),
                     stored.owner()};
  }
}

LatencyReceived HostLatency::dispatch(const ConstTensorView& x, const ConstTensorView& topk_idx,
                                      const LatencyDispatchOptions& options) {
  HostEngine::Call call(*engine_, kLatencyDispatch, asks());
  masks_.check_left_behind(kLatencyDispatch);
  const std::shared_ptr<Exchange> exchange = begin(x, topk_idx, options);
  auto state = std::make_shared<ReceiveRows>();
  state->engine = shared_from_this();
  state->exchange = exchange;
  LatencyReceived result = exchange->result;
  result.state = state;
  result.event = enter(
      kLatencyDispatch, options.stream,
      [self = shared_from_this(), exchange, x, hook = options.hook] {
        self->masks_.check_left_behind(kLatencyDispatch);
        self->settle_unreceived();
        self->send_as_credits_come(*exchange, x);
        if (!hook) self->receive_rows(*exchange);
      },
      &call);
  if (!options.hook) state->called = true;
  return result;
}

void HostLatency::settle_unreceived() {
  std::vector<Generation> dropped;
  {
    std::scoped_lock lock(mutex_);
    dropped.swap(unreceived_);
  }
  std::sort(dropped.begin(), dropped.end());
  RankBytes senders(static_cast<std::size_t>(ranks()), 1);
  if (masks_.on()) {
    // What is written late spoils only what its writer sends; but on a network it may come after
    // what its writer sends next.
    senders = unmasked();
    for (int peer = 0; peer < ranks(); ++peer) {
      if (engine_->channel().pointer(peer, {segment_.id, 0}) != nullptr) {
        senders[static_cast<std::size_t>(peer)] = 0;
      }
    }
  }
  for (const Generation generation : dropped) {
    await_sources(
        {"latency dispatch: rows of a dropped result", flag_row(layout_.arrived), generation},
        senders, std::nullopt);
    drop(generation, true);
  }
}

void HostLatency::await_credits(Generation generation) {
  if (generation <= 2) return;
  const protocol::FlagRow row{segment_.data + layout_.released, kLineBytes, ranks()};
  for (int peer = 0; peer < ranks(); ++peer) {
    engine_->channel().await(
        "latency dispatch: credit", {row, generation - 2, peer},
        [&](GroupWatch& watch) { return credit_.await_credit(peer, generation, watch); });
  }
}

std::size_t HostLatency::encode(const Exchange& exchange, const std::byte* row,
                                std::byte* wire) const {
  if (exchange.options.format == WireFormat::as_is) {
    std::memcpy(wire, row, plain_bytes());
    return plain_bytes();
  }
  QuantizeRow quantize;
  quantize.row = row;
  quantize.dtype = config_.dtype;
  quantize.columns = config_.hidden;
  quantize.round_scale = exchange.options.scale_format != ScaleFormat::f32;
  quantize.codes = wire;
  quantize.scales = reinterpret_cast<float*>(wire + layout_.scale_at);
  kernels().quantize_row(quantize);
  return layout_.scale_at + scale_count(static_cast<std::size_t>(config_.hidden)) * sizeof(float);
}

void HostLatency::send_rows(const Exchange& exchange, const ConstTensorView& x,
                            const RankBytes& to) {
  const Generation g = exchange.generation;
  const Placement& placement = engine_->placement();
  const std::uint64_t tag = protocol::Credit<>::tag(g);
  const auto topk = static_cast<std::size_t>(exchange.topk);
  std::vector<std::byte> wire(layout_.row_slot);
  std::vector<std::int32_t> meta(layout_.meta_slot / sizeof(std::int32_t), -1);
  std::vector<std::int32_t> sent(static_cast<std::size_t>(ranks()), 0);
  std::vector<std::uint64_t> bytes(static_cast<std::size_t>(ranks()), 0);
  const auto* rows = static_cast<const std::byte*>(x.data);
  for (std::int64_t token = 0; token < exchange.tokens; ++token) {
    const std::int32_t* route = exchange.routes.data() + static_cast<std::size_t>(token) * topk;
    const std::size_t row_bytes =
        encode(exchange, rows + static_cast<std::size_t>(token) * plain_bytes(), wire.data());
    for (int peer = 0; peer < ranks(); ++peer) {
      if (to[static_cast<std::size_t>(peer)] == 0) continue;
      const auto first = static_cast<std::int32_t>(placement.first_expert(peer));
      const auto end = static_cast<std::int32_t>(placement.first_expert(peer + 1));
      bool goes = false;
      meta[0] = static_cast<std::int32_t>(token);
      for (std::size_t k = 0; k < topk; ++k) {
        const bool local = route[k] >= first && route[k] < end;
        meta[1 + k] = local ? route[k] - first : -1;
        goes |= local;
      }
      if (!goes) continue;
      const auto d = static_cast<std::size_t>(peer);
      const std::int32_t row = sent[d]++;
      reach_.write(peer, at(row_offset(g, engine_->rank(), row)), wire.data(), row_bytes, tag);
      reach_.write(peer, at(meta_offset(g, engine_->rank(), row)), meta.data(), layout_.meta_slot,
                   tag);
      bytes[d] += row_bytes + layout_.meta_slot;
    }
  }
  for (int i = 0; i < ranks(); ++i) {
    const int peer = (engine_->rank() + i) % ranks();
    const auto d = static_cast<std::size_t>(peer);
    if (to[d] == 0) continue;
    const SourceHeader header{g, sent[d], static_cast<std::uint32_t>(exchange.options.format),
                              static_cast<std::uint32_t>(exchange.options.scale_format), 0};
    reach_.write(peer, at(header_offset(g, engine_->rank())), &header, sizeof(header), tag);
    credit_.announce(reach_, peer, g, bytes[d] + sizeof(header));
  }
}

}  // namespace ferry::host
