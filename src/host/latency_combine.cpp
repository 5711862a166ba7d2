// Latency combine: one row for each slot to the token's owner, who sums in ascending k.
#include <array>
#include <string>
#include <utility>

#include "core/check.hpp"
#include "core/claim.hpp"
#include "host/kernels/kernels.hpp"
#include "host/latency_engine.hpp"

namespace ferry::host {

LatencyCombined HostLatency::combine(const ConstTensorView& rows, const LatencyReceived& received,
                                     const std::optional<ConstTensorView>& topk_weights,
                                     const LatencyCombineOptions& options) {
  HostEngine::Call call(*engine_, kLatencyCombine, asks());
  const auto* state = dynamic_cast<const ReceiveRows*>(received.state.get());
  if (state == nullptr || state->engine.get() != this) {
    refuse(kLatencyCombine, "received", "a result of another exchange, or none",
           "what dispatch of this latency exchange returned");
  }
  const std::shared_ptr<Exchange> exchange = state->exchange;
  if (!state->called.load()) {
    refuse(kLatencyCombine, "received", "a result whose hook was not called",
           "receive() before combine");
  }
  check_still_joined(kLatencyCombine, exchange->generation);
  check_latency_combine(topk_weights, options);
  check_waits(kLatencyCombine, options.waits, ranks());
  check_exact(kLatencyCombine, "rows", rows, config_.dtype,
              {local_experts(), output_rows(), config_.hidden});
  check_exact(kLatencyCombine, "topk_weights", *topk_weights, Dtype::f32,
              {exchange->tokens, exchange->topk});
  if (options.out) {
    check_exact(kLatencyCombine, "out", *options.out, config_.dtype,
                {exchange->tokens, config_.hidden});
  }
  Claim claim(exchange->combined);
  if (!claim) {
    refuse(kLatencyCombine, "received", "a result that was combined already",
           "one not combined yet");
  }
  auto later = std::make_shared<SumRowsLater>();
  later->engine = shared_from_this();
  later->exchange = exchange;
  later->waits = options.waits;
  const auto* weights = static_cast<const float*>(topk_weights->data);
  later->weights.assign(weights, weights + topk_weights->shape.product());
  const Extents own{exchange->tokens, config_.hidden};
  later->out = options.out
                   ? Tensor{*options.out, std::shared_ptr<void>(options.out->data, [](void*) {})}
                   : heap_tensor(own, config_.dtype);
  LatencyCombined result;
  result.x = later->out;
  result.state = later;
  result.event = enter(
      kLatencyCombine, options.stream,
      [self = shared_from_this(), later, rows, hook = options.hook] {
        self->send_results(*later->exchange, rows);
        if (hook) return;
        self->sum_rows(*later->exchange, later->weights, later->out, later->waits);
        later->exchange.reset();  // the buffer may go back now
      },
      &call);
  claim.keep();
  if (!options.hook) later->called = true;
  return result;
}

void HostLatency::send_results(const Exchange& exchange, const ConstTensorView& rows) {
  const Generation g = exchange.generation;
  check_still_joined(kLatencyCombine, g);
  const RankBytes to = answered(exchange);
  const auto* from = static_cast<const std::byte*>(rows.data);
  std::vector<std::uint64_t> bytes(static_cast<std::size_t>(ranks()), 0);
  for (std::int64_t e = 0; e < local_experts(); ++e) {
    for (std::int32_t r = 0; r < exchange.counts[static_cast<std::size_t>(e)]; ++r) {
      const auto index = static_cast<std::size_t>(e * output_rows() + r);
      const Origin& origin = exchange.origins[index];
      if (to[static_cast<std::size_t>(origin.source)] == 0) continue;
      reach_.write(origin.source, at(partial_offset(g, engine_->rank(), origin.token, origin.slot)),
                   from + index * plain_bytes(), plain_bytes(), protocol::Delivery<>::tag(g));
      bytes[static_cast<std::size_t>(origin.source)] += plain_bytes();
    }
  }
  for (int i = 0; i < ranks(); ++i) {
    const int peer = (engine_->rank() + i) % ranks();
    if (to[static_cast<std::size_t>(peer)] == 0) continue;
    combined_[buffer(g)].deliver(reach_, peer, g, bytes[static_cast<std::size_t>(peer)]);
  }
}

void HostLatency::sum_rows(const Exchange& exchange, const std::vector<float>& weights,
                           const Tensor& out, const std::optional<TensorView>& waits) {
  const Generation g = exchange.generation;
  check_still_joined(kLatencyCombine, g);
  RankBytes owners = unmasked();
  for (std::size_t r = 0; r < owners.size(); ++r) owners[r] &= exchange.sent[r];
  const std::size_t flags =
      layout_.combined + buffer(g) * static_cast<std::size_t>(ranks()) * kLineBytes;
  const RankBytes came =
      await_sources({"latency combine: rows", flag_row(flags), g}, owners, waits);
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
      const std::int32_t expert = exchange.routes[t * topk + k];
      if (expert < 0) continue;
      const int owner = engine_->placement().rank_of(expert);
      if (came[static_cast<std::size_t>(owner)] == 0) continue;  // masked: nothing
      const auto n = static_cast<std::size_t>(sum.count++);
      rows[n] = segment_.data + partial_offset(g, owner, token, static_cast<int>(k));
      factors[n] = weights[t * topk + k];
    }
    sum.out = static_cast<std::byte*>(out.data()) + t * plain_bytes();
    kernels().sum_rows(sum);
  }
}

void SumRowsLater::receive() {
  if (called.exchange(true)) refuse_second_receive(kLatencyCombine);
  engine->enter(kLatencyCombine, nullptr,
                [this] { engine->sum_rows(*exchange, weights, out, waits); });
  exchange.reset();  // the buffer may go back now
}

}  // namespace ferry::host
