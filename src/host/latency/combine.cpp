// Latency combine: the call; how this rank combines, and weights where they are needed, ahead of
// the rows; these, as soon as they may go; and the sums at the owner of the tokens.
#include <algorithm>
#include <array>

#include "base/claim.hpp"
#include "core/check.hpp"
#include "host/kernels/kernels.hpp"
#include "host/latency/engine.hpp"

namespace ferry::host {
namespace {

CombineHead head_of(Generation generation, const LatencyCombineCall& call) {
  return {generation, call.by_rank ? 1u : 0u, static_cast<std::uint32_t>(call.format),
          call.weights_follow ? 1u : 0u, 0};
}

/// The rows of a token in the order in which they are summed; return how many. `next`: [R], of
/// each rank the row that comes next; tokens are asked for in ascending order.
using NextSums = std::vector<const std::byte*>;

std::int64_t rows_of_slots(const LatencyMemory& memory, const Exchange& exchange,
                           const LatencyCombineCall& call, std::int64_t token, NextSums& next,
                           const void** rows, float* factors) {
  const std::int64_t first = token * exchange.topk;
  std::int64_t count = 0;
  for (int k = 0; k < exchange.topk; ++k) {
    const auto at = static_cast<std::size_t>(first + k);
    if (exchange.routes[at] < 0) continue;
    const int rank = memory.engine.placement().rank_of(exchange.routes[at]);
    rows[count] = next[static_cast<std::size_t>(rank)];
    next[static_cast<std::size_t>(rank)] += memory.sum_bytes(call.format);
    factors[count++] = call.weights[at];
  }
  return count;
}

std::int64_t rows_of_ranks(const LatencyMemory& memory, const Exchange& exchange,
                           const LatencyCombineCall& call, std::int64_t token,
                           const RankBytes& came, NextSums& next, const void** rows) {
  const std::int64_t first = token * exchange.topk;
  std::array<std::size_t, kMaxTopk> to{};
  std::size_t used = 0;
  for (int k = 0; k < exchange.topk; ++k) {
    const std::int32_t id = exchange.routes[static_cast<std::size_t>(first + k)];
    if (id >= 0) to[used++] = static_cast<std::size_t>(memory.engine.placement().rank_of(id));
  }
  std::sort(to.begin(), to.begin() + static_cast<std::ptrdiff_t>(used));
  std::int64_t count = 0;
  for (std::size_t i = 0; i < used; ++i) {
    if (i > 0 && to[i - 1] == to[i]) continue;
    const std::byte* row = next[to[i]];
    next[to[i]] += memory.sum_bytes(call.format);
    if (came[to[i]] != 0) rows[count++] = row;  // masked: nothing
  }
  return count;
}

}  // namespace

LatencyDispatched HostLatency::dispatched(const Exchange& exchange) const {
  return {exchange.options.order,
          exchange.options.topk_weights.has_value(),
          exchange.tokens,
          exchange.topk,
          ranks(),
          memory_.local_experts()};
}

LatencyCombined HostLatency::combine(const ConstTensorView& rows, const LatencyReceived& received,
                                     const std::optional<ConstTensorView>& topk_weights,
                                     const LatencyCombineOptions& options) {
  HostEngine::Call call(*engine_, kLatencyCombine, asks());
  check_complete(kLatencyCombine);
  const auto* state = dynamic_cast<const ReceiveRows*>(Access::state(received).get());
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
  check_latency_combine(rows, topk_weights, memory_.config, dispatched(*exchange), options);
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
  Access::state(result) = later;
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
  call.wait_ns = options.wait_ns;
  call.signals = options.signals;
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
                 : heap_tensor({exchange.tokens, memory_.config.hidden}, memory_.config.dtype);
  return call;
}

void HostLatency::announce_combine(const Exchange& exchange, const LatencyCombineCall& call) {
  const Generation g = exchange.generation;
  const std::uint64_t tag = protocol::Delivery<protocol::AnnounceTraits>::tag(g);
  const CombineHead head = head_of(g, call);
  const auto topk = static_cast<std::size_t>(exchange.topk);
  const std::size_t row_bytes = topk * sizeof(float);
  const RankBytes to = served(exchange);
  for (int i = 0; i < ranks(); ++i) {
    const int peer = (engine_->rank() + i) % ranks();
    if (to[static_cast<std::size_t>(peer)] == 0) continue;
    std::uint64_t bytes = sizeof(head);
    memory_.reach.write(
        peer, memory_.at(memory_.source_place(memory_.layout.combines, g, engine_->rank())), &head,
        sizeof(head), tag);
    for (std::int64_t t = 0; call.weights_follow && t < exchange.tokens; ++t) {
      memory_.reach.write(peer, memory_.at(memory_.weights_offset(g, engine_->rank(), t)),
                          call.weights.data() + static_cast<std::size_t>(t) * topk, row_bytes, tag);
      bytes += row_bytes;
    }
    announced_[memory_.buffer(g)].deliver(memory_.reach, peer, g, bytes);
  }
}

RankBytes HostLatency::await_announcements(const Exchange& exchange, const LatencyCombineCall& call,
                                           const RankBytes& pending,
                                           const std::optional<TensorView>& wait_ns) {
  const Generation g = exchange.generation;
  const char* stage = call.weights_follow ? "latency combine: weights" : "latency combine: rows";
  const RankBytes came = await_sources(
      {stage, memory_.flag_array(memory_.source_place(memory_.layout.announced, g, 0)), g}, pending,
      wait_ns);
  for (int source = 0; source < ranks(); ++source) {
    if (came[static_cast<std::size_t>(source)] != 0) check_announcement(exchange, call, source);
  }
  return came;
}

void HostLatency::check_announcement(const Exchange& exchange, const LatencyCombineCall& call,
                                     int source) const {
  const Generation g = exchange.generation;
  const auto& head = *reinterpret_cast<const CombineHead*>(
      memory_.segment.data + memory_.source_place(memory_.layout.combines, g, source));
  if (head == head_of(g, call)) return;
  disagree(*engine_, kLatencyCombine, source, "path, format or place for the weights", g);
}

void HostLatency::send_results(const Exchange& exchange, const LatencyCombineCall& call,
                               const ConstTensorView& rows) {
  check_still_joined(kLatencyCombine, exchange.generation);
  if (!exchange.received) {
    // On a stream, or while a receive() on another thread was about to fail.
    refuse(kLatencyCombine, "received", "a result whose receive failed", "one that was received");
  }
  announce_combine(exchange, call);
  const RankBytes to = answered(exchange);
  if (!call.weights_follow) {
    send_sums(exchange, call, rows, to);
  } else if (!masks_.on()) {
    send_sums(exchange, call, rows, await_announcements(exchange, call, to, call.wait_ns));
  } else {
    send_sums_as_weights_come(exchange, call, rows, to);
  }
}

void HostLatency::send_sums_as_weights_come(const Exchange& exchange,
                                            const LatencyCombineCall& call,
                                            const ConstTensorView& rows, const RankBytes& to) {
  // Whoever's weights are here is served at once, as in `send_as_credits_come`.
  const Generation g = exchange.generation;
  SourceClock clock(call.wait_ns);
  masks_.await(
      {"latency combine: weights",
       memory_.flag_array(memory_.source_place(memory_.layout.announced, g, 0)), g},
      to, g,
      [&](const RankBytes& given) {
        for (std::size_t source = 0; source < given.size(); ++source) {
          if (given[source] == 0) continue;
          clock.charge(source);
          check_announcement(exchange, call, static_cast<int>(source));
        }
        clock.apart_from([&] { send_sums(exchange, call, rows, given); });
      },
      [&](int peer) { clock.charge(static_cast<std::size_t>(peer)); });
}

void HostLatency::send_sums(const Exchange& exchange, const LatencyCombineCall& call,
                            const ConstTensorView& rows, const RankBytes& to) {
  const Generation g = exchange.generation;
  for (int i = 1; i <= ranks(); ++i) {  // each starts elsewhere
    const int owner = (engine_->rank() + i) % ranks();
    if (to[static_cast<std::size_t>(owner)] == 0) continue;
    const std::size_t bytes = send_sums_to(memory_, sum_room_, exchange, call, rows, owner);
    combined_[memory_.buffer(g)].deliver(memory_.reach, owner, g, bytes);
  }
}

void HostLatency::sum_rows(const Exchange& exchange, const LatencyCombineCall& call) {
  const Generation g = exchange.generation;
  check_still_joined(kLatencyCombine, g);
  // Each source is charged in each wait from the wait's begin: not for those that announced later,
  // and not again for what the sending half has waited.
  const RankBytes announced = await_announcements(exchange, call, served(exchange), call.wait_ns);
  const RankBytes came =
      await_sources({"latency combine: rows",
                     memory_.flag_array(memory_.source_place(memory_.layout.combined, g, 0)), g},
                    announced, call.wait_ns);
  engine_->channel().record().moved(exchange.tokens, memory_.plain_bytes());
  std::array<const void*, kMaxTopk> rows{};
  std::array<float, kMaxTopk> factors{};
  SumRows sum;
  sum.rows = rows.data();
  sum.weights = call.by_rank ? nullptr : factors.data();
  sum.columns = memory_.config.hidden;
  sum.dtype = memory_.config.dtype;
  sum.format = call.format;
  sum.in_flight = memory_.combine_row;
  NextSums next;
  for (const std::uint64_t first : exchange.sums_here) {
    next.push_back(memory_.segment.data + memory_.sums_offset(g, first));
  }
  for (std::int64_t token = 0; token < exchange.tokens; ++token) {
    const auto t = static_cast<std::size_t>(token);
    sum.count =
        call.by_rank
            ? rows_of_ranks(memory_, exchange, call, token, came, next, rows.data())
            : rows_of_slots(memory_, exchange, call, token, next, rows.data(), factors.data());
    sum.out = call.out.as<std::byte>() + t * memory_.plain_bytes();
    kernels().sum_rows(sum);
  }
}

void SumRowsLater::receive() {
  Claim claim(called);
  if (!claim) refuse_second_receive(kLatencyCombine);
  engine->enter(kLatencyCombine, nullptr, [this] { engine->sum_rows(*exchange, call); });
  claim.keep();
  exchange.reset();  // the buffer may go back now
}

}  // namespace ferry::host
