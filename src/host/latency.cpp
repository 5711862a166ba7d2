#include "host/latency.hpp"

#include <algorithm>
#include <array>
#include <atomic>
#include <cstring>
#include <mutex>
#include <utility>
#include <vector>

#include "core/check.hpp"
#include "core/number.hpp"
#include "host/engine.hpp"
#include "host/kernels/kernels.hpp"
#include "protocol/credit.hpp"

namespace ferry::host {
namespace {

constexpr const char* kDispatchCall = "latency dispatch";
constexpr const char* kCombineCall = "latency combine";

/// What a source says about the rows that it sent.
struct SourceHeader {
  std::uint64_t generation = 0;
  std::int32_t rows = 0;
  std::uint32_t format = 0;
  std::uint32_t scale_format = 0;
  std::uint32_t unused = 0;
};
static_assert(sizeof(SourceHeader) <= kLineBytes);

/// Where an expert-major row came from.
struct Origin {
  std::int32_t source = 0;
  std::int32_t token = 0;
  std::int32_t slot = 0;
};

class HostLatency;

/// Keeps one of the two buffers in use; gives it back to the senders when dropped.
class BufferLease {
 public:
  BufferLease(std::shared_ptr<HostLatency> engine, Generation generation)
      : engine_(std::move(engine)), generation_(generation) {}
  ~BufferLease();
  void take() { taken_ = true; }
  BufferLease(const BufferLease&) = delete;
  BufferLease& operator=(const BufferLease&) = delete;

 private:
  std::shared_ptr<HostLatency> engine_;
  Generation generation_;
  bool taken_ = false;
};

/// One generation, from its dispatch to its combine.
struct Exchange {
  Generation generation = 0;
  std::shared_ptr<BufferLease> lease{};
  LatencyDispatchOptions options{};
  std::int64_t tokens = 0;
  int topk = 0;
  std::vector<std::int32_t> routes{};  // own, [T, K]
  // Filled by the receive, [local experts, ranks · capacity]; valid are the first counts[e].
  std::vector<Origin> origins{};
  std::atomic<bool> received{false};
  std::atomic<bool> combined{false};
  LatencyReceived result{};  // the tensors alone, without owner of this state
};

class HostLatency final : public LatencyEngine, public std::enable_shared_from_this<HostLatency> {
 public:
  HostLatency(std::shared_ptr<HostEngine> engine, const LatencyConfig& config,
              const AddedSegments& segments, const LatencyLayout& layout);

  const LatencyConfig& config() const override { return config_; }
  LatencyReceived dispatch(const ConstTensorView& x, const ConstTensorView& topk_idx,
                           const LatencyDispatchOptions& options) override;
  LatencyCombined combine(const ConstTensorView& rows, const LatencyReceived& received,
                          const ConstTensorView& topk_weights,
                          const LatencyCombineOptions& options) override;

  void drop(Generation generation);
  void receive_rows(Exchange& exchange);
  void sum_rows(const Exchange& exchange, const std::vector<float>& weights, const Tensor& out);
  Event enter(const char* call, Stream* stream, std::function<void()> work,
              HostEngine::Call* inside = nullptr) {
    return engine_->enter(call, stream, std::move(work), inside);
  }

 private:
  int ranks() const { return engine_->size(); }
  std::int64_t local_experts() const { return engine_->placement().local_experts(engine_->rank()); }
  std::int64_t output_rows() const { return ranks() * config_.capacity; }
  std::size_t plain_bytes() const {
    return static_cast<std::size_t>(config_.hidden) * size_of(config_.dtype);
  }
  protocol::Place at(std::size_t offset) const { return {segment_.id, offset}; }
  std::size_t buffer(Generation generation) const { return generation % 2; }
  std::size_t row_offset(Generation generation, int source, std::int64_t row) const {
    return layout_.rows + slot(generation, source, row) * layout_.row_slot;
  }
  std::size_t meta_offset(Generation generation, int source, std::int64_t row) const {
    return layout_.metas + slot(generation, source, row) * layout_.meta_slot;
  }
  std::size_t slot(Generation generation, int source, std::int64_t row) const {
    return (buffer(generation) * static_cast<std::size_t>(ranks()) +
            static_cast<std::size_t>(source)) *
               static_cast<std::size_t>(config_.capacity) +
           static_cast<std::size_t>(row);
  }
  std::size_t header_offset(Generation generation, int source) const {
    return layout_.counts + (buffer(generation) * static_cast<std::size_t>(ranks()) +
                             static_cast<std::size_t>(source)) *
                                kLineBytes;
  }
  std::size_t partial_offset(Generation generation, std::int64_t token, int k) const {
    const auto capacity = static_cast<std::size_t>(config_.capacity);
    return layout_.partials + ((buffer(generation) * capacity + static_cast<std::size_t>(token)) *
                                   static_cast<std::size_t>(config_.topk) +
                               static_cast<std::size_t>(k)) *
                                  plain_bytes();
  }

  void check_expert_capacity(const std::vector<std::int32_t>& routes) const;
  std::shared_ptr<Exchange> begin(const ConstTensorView& x, const ConstTensorView& topk_idx,
                                  const LatencyDispatchOptions& options);
  void make_tensors(Exchange& exchange);
  void await_credits(Generation generation);
  void send_rows(const Exchange& exchange, const ConstTensorView& x);
  std::size_t encode(const Exchange& exchange, const std::byte* row, std::byte* wire) const;
  const SourceHeader& checked_header(const Exchange& exchange, int source);
  void place_row(const Exchange& exchange, const std::byte* wire, std::int64_t expert,
                 std::int64_t row);
  void send_results(const Exchange& exchange, const ConstTensorView& rows);

  std::shared_ptr<HostEngine> engine_;
  LatencyConfig config_;
  fabric::Segment segment_;
  LatencyLayout layout_;
  FabricReach reach_;
  protocol::Credit<> credit_;
  std::array<protocol::Delivery<>, 2> combined_;

  std::mutex mutex_;  // of what follows: results are dropped on any thread
  Generation generation_ = 0;
  std::array<bool, 2> alive_{};
  protocol::DropOrder<> drops_{};
  Generation released_ = 0;
};

/// The second half of a dispatch.
struct ReceiveRows final : LatencyState {
  std::shared_ptr<HostLatency> engine;
  std::shared_ptr<Exchange> exchange;
  Stream* stream = nullptr;
  std::atomic<bool> called{false};
  void receive() override;
};

/// The second half of a combine.
struct SumRowsLater final : LatencyState {
  std::shared_ptr<HostLatency> engine;
  std::shared_ptr<Exchange> exchange;
  std::vector<float> weights{};
  Tensor out{};
  std::atomic<bool> called{false};
  void receive() override;
};

protocol::FlagLayout flags(int ranks, fabric::SegmentId segment, std::size_t offset) {
  return {ranks, {segment, offset}, kLineBytes};
}

HostLatency::HostLatency(std::shared_ptr<HostEngine> engine, const LatencyConfig& config,
                         const AddedSegments& segments, const LatencyLayout& layout)
    : engine_(std::move(engine)),
      config_(config),
      segment_(segments.mine),
      layout_(layout),
      reach_(*engine_->shared_memory()->fabric, engine_->next_tag_space(), segments.ids),
      credit_({flags(engine_->size(), segment_.id, layout.arrived),
               flags(engine_->size(), segment_.id, layout.released)},
              engine_->rank(), segment_.data + layout.arrived, segment_.data + layout.released),
      combined_{protocol::Delivery<>(flags(engine_->size(), segment_.id, layout.combined),
                                     engine_->rank(), segment_.data + layout.combined),
                protocol::Delivery<>(
                    flags(engine_->size(), segment_.id,
                          layout.combined + static_cast<std::size_t>(engine_->size()) * kLineBytes),
                    engine_->rank(),
                    segment_.data + layout.combined +
                        static_cast<std::size_t>(engine_->size()) * kLineBytes)} {}

BufferLease::~BufferLease() {
  if (taken_) engine_->drop(generation_);
}

void HostLatency::drop(Generation generation) {
  std::scoped_lock lock(mutex_);
  alive_[buffer(generation)] = false;
  const Generation upto = drops_.drop(generation);
  if (upto > released_ && !engine_->destroyed()) {
    released_ = upto;
    credit_.release(reach_, upto);
  }
}

void HostLatency::check_expert_capacity(const std::vector<std::int32_t>& routes) const {
  // Duplicate ids in a route take a row each, so one expert can get more rows than there are
  // tokens; with at most `capacity` from each rank its block always holds them.
  std::vector<std::int64_t> slots(static_cast<std::size_t>(engine_->placement().experts), 0);
  for (std::int32_t id : routes) {
    if (id >= 0 && ++slots[static_cast<std::size_t>(id)] > config_.capacity) {
      refuse(kDispatchCall, "topk_idx",
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
  auto exchange = std::make_shared<Exchange>();
  exchange->routes = checked_routes(kDispatchCall, topk_idx, engine_->placement().experts);
  check_expert_capacity(exchange->routes);
  exchange->options = options;
  exchange->tokens = x.rows();
  exchange->topk = static_cast<int>(topk_idx.shape[1]);
  std::scoped_lock lock(mutex_);
  const Generation next = generation_ + 1;
  if (alive_[buffer(next)]) {
    throw Error(ErrorKind::exhausted,
                std::string(kDispatchCall) +
                    ": two results are alive already; drop the older one (LatencyReceived, its "
                    "tensors and its LatencyCombined) before a third dispatch",
                {engine_->rank(), engine_->rank(), kDispatchCall, generation_, 0, 0});
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
  HostEngine::Call call(*engine_, kDispatchCall);
  const std::shared_ptr<Exchange> exchange = begin(x, topk_idx, options);
  auto state = std::make_shared<ReceiveRows>();
  state->engine = shared_from_this();
  state->exchange = exchange;
  LatencyReceived result = exchange->result;
  result.state = state;
  result.event = enter(
      kDispatchCall, options.stream,
      [self = shared_from_this(), exchange, x, hook = options.hook] {
        self->await_credits(exchange->generation);
        self->send_rows(*exchange, x);
        if (!hook) self->receive_rows(*exchange);
      },
      &call);
  if (!options.hook) state->called = true;
  return result;
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

void HostLatency::send_rows(const Exchange& exchange, const ConstTensorView& x) {
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
    const SourceHeader header{g, sent[d], static_cast<std::uint32_t>(exchange.options.format),
                              static_cast<std::uint32_t>(exchange.options.scale_format), 0};
    reach_.write(peer, at(header_offset(g, engine_->rank())), &header, sizeof(header), tag);
    credit_.announce(reach_, peer, g, bytes[d] + sizeof(header));
  }
}

const SourceHeader& HostLatency::checked_header(const Exchange& exchange, int source) {
  const auto& header = *reinterpret_cast<const SourceHeader*>(
      segment_.data + header_offset(exchange.generation, source));
  const bool same =
      header.generation == exchange.generation &&
      header.format == static_cast<std::uint32_t>(exchange.options.format) &&
      header.scale_format == static_cast<std::uint32_t>(exchange.options.scale_format) &&
      header.rows >= 0 && header.rows <= config_.capacity;
  if (!same) {
    const std::string text = "rank " + std::to_string(engine_->rank()) + ": " + kDispatchCall +
                             ": rank " + std::to_string(source) +
                             " used another format or scale_format in this call";
    engine_->channel().fail(kDispatchCall, text, ErrorKind::mismatch);
    throw Error(ErrorKind::mismatch, text,
                {engine_->rank(), source, kDispatchCall, exchange.generation,
                 static_cast<std::uint64_t>(exchange.options.format), header.format});
  }
  return header;
}

void HostLatency::place_row(const Exchange& exchange, const std::byte* wire, std::int64_t expert,
                            std::int64_t row) {
  const LatencyReceived& result = exchange.result;
  const std::size_t row_bytes = result.x.view().row_bytes();
  const auto place = static_cast<std::size_t>(expert * output_rows() + row);
  std::memcpy(static_cast<std::byte*>(result.x.data()) + place * row_bytes, wire, row_bytes);
  if (exchange.options.format == WireFormat::as_is) return;
  const std::size_t scales = scale_count(static_cast<std::size_t>(config_.hidden));
  const auto* from = reinterpret_cast<const float*>(wire + layout_.scale_at);
  const Extents& strides = result.scales.view().strides;
  const std::int64_t base = expert * strides[0] + row * strides[1];
  if (exchange.options.scale_format != ScaleFormat::ue8m0_packed) {
    for (std::size_t c = 0; c < scales; ++c) {
      result.scales.as<float>()[base + static_cast<std::int64_t>(c) * strides[2]] = from[c];
    }
    return;
  }
  std::vector<std::uint32_t> words(ue8m0_word_count(scales));
  pack_ue8m0(from, scales, words.data());
  for (std::size_t c = 0; c < words.size(); ++c) {
    result.scales.as<std::uint32_t>()[base + static_cast<std::int64_t>(c) * strides[2]] = words[c];
  }
}

void HostLatency::receive_rows(Exchange& exchange) {
  const Generation g = exchange.generation;
  const protocol::FlagRow row{segment_.data + layout_.arrived, kLineBytes, ranks()};
  engine_->channel().await("latency dispatch: rows", {row, g},
                           [&](GroupWatch& watch) { return credit_.await_arrivals(g, watch); });
  const std::int64_t experts = local_experts(), rows = output_rows();
  exchange.origins.resize(static_cast<std::size_t>(experts * rows));
  auto* counts = exchange.result.counts.as<std::int32_t>();
  auto* tokens = exchange.result.source_token.as<std::int32_t>();
  auto* ranges = exchange.result.ranges.as<std::int64_t>();
  std::fill_n(counts, experts, 0);
  for (int source = 0; source < ranks(); ++source) {
    const SourceHeader& header = checked_header(exchange, source);
    std::vector<std::int32_t> first(counts, counts + experts);
    for (std::int32_t r = 0; r < header.rows; ++r) {
      const std::byte* wire = segment_.data + row_offset(g, source, r);
      const auto* meta =
          reinterpret_cast<const std::int32_t*>(segment_.data + meta_offset(g, source, r));
      for (int k = 0; k < config_.topk; ++k) {
        const std::int32_t expert = meta[1 + k];
        if (expert == -1) continue;
        if (expert < 0 || expert >= experts || counts[expert] >= rows || meta[0] < 0 ||
            meta[0] >= config_.capacity) {  // they decide where rows are written from here on
          engine_->channel().distrust("latency dispatch: rows", source,
                                      "sent token " + std::to_string(meta[0]) +
                                          " for local expert " + std::to_string(expert));
        }
        const std::int32_t place = counts[expert]++;
        place_row(exchange, wire, expert, place);
        const auto index = static_cast<std::size_t>(expert * rows + place);
        tokens[index] = meta[0];
        exchange.origins[index] = {source, meta[0], k};
      }
    }
    for (std::int64_t e = 0; e < experts; ++e) {
      ranges[e * ranks() + source] =
          (static_cast<std::int64_t>(first[static_cast<std::size_t>(e)]) << 32) |
          (counts[e] - first[static_cast<std::size_t>(e)]);
    }
  }
  exchange.received.store(true, std::memory_order_release);
}

LatencyCombined HostLatency::combine(const ConstTensorView& rows, const LatencyReceived& received,
                                     const ConstTensorView& topk_weights,
                                     const LatencyCombineOptions& options) {
  HostEngine::Call call(*engine_, kCombineCall);
  const auto* state = dynamic_cast<const ReceiveRows*>(received.state.get());
  if (state == nullptr || state->engine.get() != this) {
    refuse(kCombineCall, "received", "a result of another exchange, or none",
           "what dispatch of this latency exchange returned");
  }
  const std::shared_ptr<Exchange> exchange = state->exchange;
  if (!state->called.load()) {
    refuse(kCombineCall, "received", "a result whose hook was not called",
           "receive() before combine");
  }
  check_exact(kCombineCall, "rows", rows, config_.dtype,
              {local_experts(), output_rows(), config_.hidden});
  check_exact(kCombineCall, "topk_weights", topk_weights, Dtype::f32,
              {exchange->tokens, exchange->topk});
  if (options.out) {
    check_exact(kCombineCall, "out", *options.out, config_.dtype,
                {exchange->tokens, config_.hidden});
  }
  if (exchange->combined.exchange(true)) {
    refuse(kCombineCall, "received", "a result that was combined already", "one not combined yet");
  }
  auto later = std::make_shared<SumRowsLater>();
  later->engine = shared_from_this();
  later->exchange = exchange;
  const auto* weights = static_cast<const float*>(topk_weights.data);
  later->weights.assign(weights, weights + topk_weights.shape.product());
  const Extents own{exchange->tokens, config_.hidden};
  later->out = options.out
                   ? Tensor{*options.out, std::shared_ptr<void>(options.out->data, [](void*) {})}
                   : heap_tensor(own, config_.dtype);
  LatencyCombined result;
  result.x = later->out;
  result.state = later;
  result.event = enter(
      kCombineCall, options.stream,
      [self = shared_from_this(), later, rows, hook = options.hook] {
        self->send_results(*later->exchange, rows);
        if (hook) return;
        self->sum_rows(*later->exchange, later->weights, later->out);
        later->exchange.reset();  // the buffer may go back now
      },
      &call);
  if (!options.hook) later->called = true;
  return result;
}

void HostLatency::send_results(const Exchange& exchange, const ConstTensorView& rows) {
  const Generation g = exchange.generation;
  const auto* from = static_cast<const std::byte*>(rows.data);
  const auto* counts = exchange.result.counts.as<std::int32_t>();
  std::vector<std::uint64_t> bytes(static_cast<std::size_t>(ranks()), 0);
  for (std::int64_t e = 0; e < local_experts(); ++e) {
    for (std::int32_t r = 0; r < counts[e]; ++r) {
      const auto index = static_cast<std::size_t>(e * output_rows() + r);
      const Origin& origin = exchange.origins[index];
      reach_.write(origin.source, at(partial_offset(g, origin.token, origin.slot)),
                   from + index * plain_bytes(), plain_bytes(), protocol::Delivery<>::tag(g));
      bytes[static_cast<std::size_t>(origin.source)] += plain_bytes();
    }
  }
  for (int i = 0; i < ranks(); ++i) {
    const int peer = (engine_->rank() + i) % ranks();
    combined_[buffer(g)].deliver(reach_, peer, g, bytes[static_cast<std::size_t>(peer)]);
  }
}

void HostLatency::sum_rows(const Exchange& exchange, const std::vector<float>& weights,
                           const Tensor& out) {
  const Generation g = exchange.generation;
  const protocol::FlagRow row{
      segment_.data + layout_.combined + buffer(g) * static_cast<std::size_t>(ranks()) * kLineBytes,
      kLineBytes, ranks()};
  engine_->channel().await("latency combine: rows", {row, g},
                           [&](GroupWatch& watch) { return combined_[buffer(g)].await(g, watch); });
  const auto topk = static_cast<std::size_t>(exchange.topk);
  std::array<const void*, kMaxTopk> rows{};
  std::array<float, kMaxTopk> factors{};
  SumRows sum;
  sum.rows = rows.data();
  sum.weights = factors.data();
  sum.columns = config_.hidden;
  sum.dtype = config_.dtype;
  for (std::int64_t token = 0; token < exchange.tokens; ++token) {
    const auto t = static_cast<std::size_t>(token);
    sum.count = 0;
    for (std::size_t k = 0; k < topk; ++k) {
      if (exchange.routes[t * topk + k] < 0) continue;
      const auto n = static_cast<std::size_t>(sum.count++);
      rows[n] = segment_.data + partial_offset(g, token, static_cast<int>(k));
      factors[n] = weights[t * topk + k];
    }
    sum.out = static_cast<std::byte*>(out.data()) + t * plain_bytes();
    kernels().sum_rows(sum);
  }
}

void refuse_second_call(const char* call) {
  refuse(call, "hook", "a second receive(), or one without hook = true", "one receive()");
}

void ReceiveRows::receive() {
  if (called.exchange(true)) refuse_second_call(kDispatchCall);
  engine->enter(kDispatchCall, nullptr, [this] { engine->receive_rows(*exchange); });
}

void SumRowsLater::receive() {
  if (called.exchange(true)) refuse_second_call(kCombineCall);
  engine->enter(kCombineCall, nullptr, [this] { engine->sum_rows(*exchange, weights, out); });
  exchange.reset();  // the buffer may go back now
}

}  // namespace

LatencyLayout latency_layout(const LatencyConfig& config, std::int64_t experts, int ranks) {
  check_size(config, Placement{experts, ranks}.local_experts(0), ranks);
  LatencyShape shape;
  shape.ranks = ranks;
  shape.local_experts = Placement{experts, ranks}.local_experts(0);  // rank 0 has the most
  shape.capacity = config.capacity;
  shape.hidden = config.hidden;
  shape.topk = config.topk;
  shape.element_bytes = size_of(config.dtype);
  return make_latency_layout(shape);
}

std::size_t latency_memory_hint(const LatencyConfig& config, std::int64_t experts, int ranks) {
  return segment_bytes(latency_layout(config, experts, ranks).bytes);
}

std::shared_ptr<LatencyEngine> make_host_latency(std::shared_ptr<HostEngine> engine,
                                                 const LatencyConfig& config) {
  check_config(config);
  const LatencyLayout layout = latency_layout(config, engine->placement().experts, engine->size());
  AddedSegments segments;
  std::shared_ptr<HostLatency>
      made;  // inside the call: its number among all is the same everywhere
  engine->enter("LatencyExchange", nullptr, [&] {
    StepMessage head;
    head.call.kind = CallKind::latency;
    head.call.dtype = static_cast<std::uint32_t>(config.dtype);
    head.call.columns = config.hidden;
    head.call.scale_columns = config.capacity;
    head.call.topk = static_cast<std::uint32_t>(config.topk);
    engine->agree("LatencyExchange: configuration", head, [] { return true; });
    constexpr const char* kStage = "LatencyExchange: buffers";
    segments = engine->add_segments(kStage, layout.bytes);
    for (int peer = 0; peer < engine->size(); ++peer) {
      const std::uint64_t bytes = segments.bytes[static_cast<std::size_t>(peer)];
      if (bytes < layout.bytes) {
        engine->channel().distrust(kStage, peer,
                                   "registered " + std::to_string(bytes) +
                                       " bytes, expected at least " + std::to_string(layout.bytes));
      }
    }
    engine->add_latency_memory(segments.mine);
    made = std::make_shared<HostLatency>(engine, config, segments, layout);
  });
  return made;
}

}  // namespace ferry::host
