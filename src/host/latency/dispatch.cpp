// Latency dispatch, first half: checks, encoding, one copy of a token for each rank.
#include <algorithm>
#include <cstring>
#include <string>
#include <utility>

#include "core/check.hpp"
#include "core/number.hpp"
#include "core/sum_places.hpp"
#include "host/kernels/kernels.hpp"
#include "host/latency/engine.hpp"

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
  exchange->sent.assign(static_cast<std::size_t>(ranks()), 0);
  exchange->came.assign(static_cast<std::size_t>(ranks()), 0);
  exchange->topk = static_cast<int>(topk_idx.shape[1]);
  exchange->sums_here = config_.masks ? fixed_sum_places(config_.capacity, ranks())
                                      : first_sum_places(exchange->routes, engine_->placement());
  exchange->sums_there.assign(static_cast<std::size_t>(ranks()), 0);
  if (options.topk_weights) {
    const auto* weights = static_cast<const float*>(options.topk_weights->data);
    exchange->weights.assign(weights, weights + options.topk_weights->shape.product());
  }
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
  exchange->lease = std::make_shared<BufferLease>(shared_from_this(), next);
  const bool by_rank = options.order == RowOrder::rank_major;
  by_rank ? make_rank_major(*exchange) : make_expert_major(*exchange);
  // Nothing fails any more: from here on the peers count on this generation.
  exchange->lease->take();
  generation_ = next;
  alive_[buffer(next)] = true;
  return exchange;
}

void HostLatency::make_expert_major(Exchange& exchange) {
  const std::int64_t experts = local_experts(), rows = output_rows(), hidden = config_.hidden;
  LatencyReceived& result = exchange.result;
  std::byte* output =
      segment_.data + layout_.outputs + buffer(exchange.generation) * layout_.output_bytes;
  const Dtype dtype = quantized(exchange) ? Dtype::e4m3 : config_.dtype;
  result.x = {TensorView(output, dtype, {experts, rows, hidden}),
              std::shared_ptr<void>(exchange.lease, output)};
  result.counts = heap_tensor({experts}, Dtype::i32);
  result.source_token = heap_tensor({experts, rows}, Dtype::i32);
  result.ranges = heap_tensor({experts, ranks()}, Dtype::i64);
  if (quantized(exchange)) result.scales = scales_tensor(exchange, experts, rows);
}

Tensor HostLatency::scales_tensor(const Exchange& exchange, std::int64_t blocks,
                                  std::int64_t rows) const {
  const bool packed = exchange.options.scale_format == ScaleFormat::ue8m0_packed;
  const std::size_t count = packed ? ue8m0_word_count(scales()) : scales();
  const auto columns = static_cast<std::int64_t>(count);
  const Tensor stored = heap_tensor({blocks, columns, rows}, packed ? Dtype::i32 : Dtype::f32);
  return {TensorView(stored.data(), stored.dtype(), {blocks, rows, columns},
                     {columns * rows, 1, rows}, {}),
          stored.owner()};
}

LatencyReceived HostLatency::dispatch(const ConstTensorView& x, const ConstTensorView& topk_idx,
                                      const LatencyDispatchOptions& options) {
  HostEngine::Call call(*engine_, kLatencyDispatch, asks());
  masks_.check_evicted(kLatencyDispatch);
  const std::shared_ptr<Exchange> exchange = begin(x, topk_idx, options);
  auto state = std::make_shared<ReceiveRows>();
  state->engine = shared_from_this();
  state->exchange = exchange;
  LatencyReceived result = exchange->result;
  result.state = state;
  result.event = enter(
      kLatencyDispatch, options.stream,
      [self = shared_from_this(), exchange, x, hook = options.hook] {
        self->masks_.check_evicted(kLatencyDispatch);
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
      if (masks_.reads(peer)) senders[static_cast<std::size_t>(peer)] = 0;
    }
  }
  for (const Generation generation : dropped) {
    // Ranks that masked each other in that dispatch sent each other nothing. Each would wait here
    // for the next flag of the other, which comes behind this wait.
    RankBytes awaited = senders;
    const RankBytes& sent = sent_[buffer(generation)];
    for (std::size_t r = 0; r < awaited.size(); ++r) awaited[r] &= sent[r];
    await_sources(
        {"latency dispatch: rows of a dropped result", flag_row(layout_.arrived), generation},
        awaited);
    // Not `drop`: a later generation may be alive in this buffer by now.
    std::scoped_lock lock(mutex_);
    release(generation);
  }
}

void HostLatency::await_credits(Generation generation) {
  if (generation <= 2) return;
  const protocol::FlagRow row{segment_.data + layout_.released, kLineBytes, ranks()};
  engine_->channel().await("latency dispatch: credit", {row, generation - 2},
                           [&](GroupWatch& watch) {
                             protocol::Status status;
                             for (int peer = 0; peer < ranks() && status.ok(); ++peer) {
                               status = credit_.await_credit(peer, generation, watch);
                             }
                             return status;
                           });
}

void HostLatency::encode(const Exchange& exchange, const std::byte* row, WireToken& wire) const {
  if (!quantized(exchange)) {
    wire.row = row;
    return;
  }
  QuantizeRow quantize;
  quantize.row = row;
  quantize.dtype = config_.dtype;
  quantize.columns = config_.hidden;
  quantize.round_scale = exchange.options.scale_format != ScaleFormat::f32;
  quantize.codes = wire.codes.data();
  quantize.scales = wire.scales.data();
  kernels().quantize_row(quantize);
  wire.row = wire.codes.data();
}

bool HostLatency::route_to(const Exchange& exchange, std::int64_t token, int peer,
                           std::int32_t* meta) const {
  const Placement& placement = engine_->placement();
  const auto first = static_cast<std::int32_t>(placement.first_expert(peer));
  const auto end = static_cast<std::int32_t>(placement.first_expert(peer + 1));
  const auto topk = static_cast<std::size_t>(exchange.topk);
  const auto at = static_cast<std::size_t>(token) * topk;
  auto* weights = meta + 1 + config_.topk;
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

std::size_t HostLatency::send_row(const Exchange& exchange, const WireToken& wire, int peer,
                                  std::int32_t row) {
  const std::uint64_t tag = protocol::Credit<>::tag(exchange.generation);
  const int self = engine_->rank();
  std::size_t bytes = row_bytes(exchange);
  reach_.write(peer, at(row_offset(exchange, self, row)), wire.row, bytes, tag);
  if (quantized(exchange)) {
    const std::size_t scale_bytes = wire.scales.size() * sizeof(float);
    reach_.write(peer, at(scales_offset(exchange, self, row)), wire.scales.data(), scale_bytes,
                 tag);
    bytes += scale_bytes;
  }
  const std::size_t words = 1 + static_cast<std::size_t>(config_.topk) *
                                    (exchange.weights.empty() ? std::size_t{1} : std::size_t{2});
  const std::size_t meta_bytes = words * sizeof(std::int32_t);
  reach_.write(peer, at(meta_offset(exchange.generation, self, row)), wire.meta.data(), meta_bytes,
               tag);
  return bytes + meta_bytes;
}

void HostLatency::send_rows(const Exchange& exchange, const ConstTensorView& x,
                            const RankBytes& to) {
  const Generation g = exchange.generation;
  WireToken wire;
  if (quantized(exchange)) {
    wire.codes.resize(static_cast<std::size_t>(config_.hidden));
    wire.scales.resize(scales());
  }
  wire.meta.assign(layout_.meta_slot / sizeof(std::int32_t), -1);
  const std::vector<std::int32_t> all = rows_to_ranks(exchange);
  std::vector<std::int32_t> sent(static_cast<std::size_t>(ranks()), 0);
  std::vector<std::uint64_t> bytes(static_cast<std::size_t>(ranks()), 0);
  const auto* rows = static_cast<const std::byte*>(x.data);
  for (std::int64_t token = 0; token < exchange.tokens; ++token) {
    encode(exchange, rows + static_cast<std::size_t>(token) * plain_bytes(), wire);
    for (int peer = 0; peer < ranks(); ++peer) {
      if (to[static_cast<std::size_t>(peer)] == 0) continue;
      if (!route_to(exchange, token, peer, wire.meta.data())) continue;
      const auto d = static_cast<std::size_t>(peer);
      bytes[d] += crosses(peer) ? send_record(exchange, wire, peer, sent[d], all[d])
                                : send_row(exchange, wire, peer, sent[d]);
      ++sent[d];
    }
  }
  for (int i = 0; i < ranks(); ++i) {
    const int peer = (engine_->rank() + i) % ranks();
    const auto d = static_cast<std::size_t>(peer);
    if (to[d] == 0) continue;
    if (!crosses(peer)) {
      const SourceHeader header = header_of(exchange, peer, all[d]);
      reach_.write(peer, at(header_offset(g, engine_->rank())), &header, sizeof(header),
                   protocol::Credit<>::tag(g));
      bytes[d] += sizeof(header);
    } else if (all[d] == 0) {
      bytes[d] += send_no_record(exchange, peer);
    }
    credit_.announce(reach_, peer, g, bytes[d]);
  }
}

SourceHeader HostLatency::header_of(const Exchange& exchange, int peer, std::int32_t rows) const {
  SourceHeader header;
  header.generation = exchange.generation;
  header.first_sum = exchange.sums_here[static_cast<std::size_t>(peer)];
  header.rows = rows;
  header.format = static_cast<std::uint8_t>(exchange.options.format);
  header.scale_format = static_cast<std::uint8_t>(exchange.options.scale_format);
  header.weights = exchange.options.topk_weights ? 1 : 0;
  return header;
}

std::vector<std::int32_t> HostLatency::rows_to_ranks(const Exchange& exchange) const {
  std::vector<std::int32_t> rows(static_cast<std::size_t>(ranks()), 0);
  std::vector<std::int64_t> last(rows.size(), -1);  // token that went there
  const auto topk = static_cast<std::size_t>(exchange.topk);
  for (std::size_t i = 0; i < exchange.routes.size(); ++i) {
    if (exchange.routes[i] < 0) continue;
    const auto d = static_cast<std::size_t>(engine_->placement().rank_of(exchange.routes[i]));
    const auto token = static_cast<std::int64_t>(i / topk);
    if (std::exchange(last[d], token) != token) ++rows[d];
  }
  return rows;
}

}  // namespace ferry::host
