// Latency combine: the call, and the sums at the owner of the tokens.
#include <algorithm>
#include <array>
#include <string>
#include <utility>

#include "base/claim.hpp"
#include "core/check.hpp"
#include "host/kernels/kernels.hpp"
#include "host/latency/engine.hpp"

namespace ferry::host {

LatencyDispatched HostLatency::dispatched(const Exchange& exchange) const {
  return {exchange.options.order,
          exchange.options.topk_weights.has_value(),
          exchange.tokens,
          exchange.topk,
          ranks(),
          local_experts()};
}

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
    refuse(kLatencyCombine, "received", "a result whose hook was not called, or failed",
           "receive() before combine");
  }
  check_still_joined(kLatencyCombine, exchange->generation);
  check_latency_combine(rows, topk_weights, config_, dispatched(*exchange), options);
  Claim claim(exchange->combined);
  if (!claim) {
    refuse(kLatencyCombine, "received", "a result that was combined already",
           "one not combined yet");
  }
  auto later = std::make_shared<SumRowsLater>();
  later->engine = shared_from_this();
  later->exchange = exchange;
  later->call = combine_call(*exchange, topk_weights, options);
  LatencyCombined result;
  result.x = later->call.out;
  result.state = later;
  result.event = enter(
      kLatencyCombine, options.stream,
      [self = shared_from_this(), later, rows, hook = options.hook] {
        self->send_results(*later->exchange, later->call, rows);
        if (hook) return;
        self->sum_rows(*later->exchange, later->call);
        later->exchange.reset();  // the buffer may go back now
      },
      &call);
  claim.keep();
  if (!options.hook) later->called = true;
  return result;
}

LatencyCombineCall HostLatency::combine_call(const Exchange& exchange,
                                             const std::optional<ConstTensorView>& topk_weights,
                                             const LatencyCombineOptions& options) const {
  LatencyCombineCall call;
  call.format = options.format;
  call.waits = options.waits;
  const bool summed = exchange.options.order == RowOrder::rank_major;
  call.by_rank = summed || options.path == CombinePath::per_rank;
  call.weights_follow = call.by_rank && topk_weights.has_value();
  if (topk_weights) {
    const auto* weights = static_cast<const float*>(topk_weights->data);
    call.weights.assign(weights, weights + topk_weights->shape.product());
  } else if (!call.by_rank) {
    call.weights = exchange.weights;
  }
  call.out = options.out
                 ? Tensor{*options.out, std::shared_ptr<void>(options.out->data, [](void*) {})}
                 : heap_tensor({exchange.tokens, config_.hidden}, config_.dtype);
  return call;
}

void HostLatency::sum_rows(const Exchange& exchange, const LatencyCombineCall& call) {
  const Generation g = exchange.generation;
  check_still_joined(kLatencyCombine, g);
  // Each source is charged in each wait from the wait's begin: not for those that announced later,
  // and not again for what the sending half has waited.
  const RankBytes announced = await_announcements(exchange, call, served(exchange), call.waits);
  const RankBytes came =
      await_sources({"latency combine: rows", flag_row(line_offset(layout_.combined, g, 0)), g},
                    announced, call.waits);
  std::array<const void*, kMaxTopk> rows{};
  std::array<float, kMaxTopk> factors{};
  SumRows sum;
  sum.rows = rows.data();
  sum.weights = call.by_rank ? nullptr : factors.data();
  sum.columns = config_.hidden;
  sum.dtype = config_.dtype;
  sum.format = call.format;
  sum.in_flight = combine_row_;
  NextSums next;
  for (const std::uint64_t first : exchange.sums_here) {
    next.push_back(segment_.data + sums_offset(g, first));
  }
  for (std::int64_t token = 0; token < exchange.tokens; ++token) {
    const auto t = static_cast<std::size_t>(token);
    sum.count = call.by_rank
                    ? rows_of_ranks(exchange, call, token, came, next, rows.data())
                    : rows_of_slots(exchange, call, token, next, rows.data(), factors.data());
    sum.out = call.out.as<std::byte>() + t * plain_bytes();
    kernels().sum_rows(sum);
  }
}

std::int64_t HostLatency::rows_of_slots(const Exchange& exchange, const LatencyCombineCall& call,
                                        std::int64_t token, NextSums& next, const void** rows,
                                        float* factors) const {
  const std::int64_t first = token * exchange.topk;
  std::int64_t count = 0;
  for (int k = 0; k < exchange.topk; ++k) {
    const auto at = static_cast<std::size_t>(first + k);
    if (exchange.routes[at] < 0) continue;
    const int rank = engine_->placement().rank_of(exchange.routes[at]);
    rows[count] = next[static_cast<std::size_t>(rank)];
    next[static_cast<std::size_t>(rank)] += sum_bytes(call.format);
    factors[count++] = call.weights[at];
  }
  return count;
}

std::int64_t HostLatency::rows_of_ranks(const Exchange& exchange, const LatencyCombineCall& call,
                                        std::int64_t token, const RankBytes& came, NextSums& next,
                                        const void** rows) const {
  const std::int64_t first = token * exchange.topk;
  std::array<std::size_t, kMaxTopk> to{};
  std::size_t used = 0;
  for (int k = 0; k < exchange.topk; ++k) {
    const std::int32_t id = exchange.routes[static_cast<std::size_t>(first + k)];
    if (id >= 0) to[used++] = static_cast<std::size_t>(engine_->placement().rank_of(id));
  }
  std::sort(to.begin(), to.begin() + static_cast<std::ptrdiff_t>(used));
  std::int64_t count = 0;
  for (std::size_t i = 0; i < used; ++i) {
    if (i > 0 && to[i - 1] == to[i]) continue;
    const std::byte* row = next[to[i]];
    next[to[i]] += sum_bytes(call.format);
    if (came[to[i]] != 0) rows[count++] = row;  // masked: nothing
  }
  return count;
}

void SumRowsLater::receive() {
  Claim claim(called);
  if (!claim) refuse_second_receive(kLatencyCombine);
  engine->enter(kLatencyCombine, nullptr, [this] { engine->sum_rows(*exchange, call); });
  claim.keep();
  exchange.reset();  // the buffer may go back now
}

}  // namespace ferry::host
