// Latency dispatch: the call, its buffer, and the waits for credits and for rows.
#include <algorithm>
#include <string>
#include <utility>

#include "base/claim.hpp"
#include "core/check.hpp"
#include "core/sum_places.hpp"
#include "host/latency/engine.hpp"

namespace ferry::host {

namespace {

bool any(const RankBytes& ranks) {
  return std::any_of(ranks.begin(), ranks.end(), [](auto r) { return r != 0; });
}

}  // namespace

void HostLatency::check_expert_capacity(const std::vector<std::int32_t>& routes) const {
  // Duplicate ids in a route take a row each, so one expert can get more rows than there are
  // tokens; with at most `capacity` from each rank its block always holds them.
  std::vector<std::int64_t> slots(static_cast<std::size_t>(engine_->placement().experts), 0);
  for (std::int32_t id : routes) {
    if (id >= 0 && ++slots[static_cast<std::size_t>(id)] > memory_.config.capacity) {
      refuse(kLatencyDispatch, "topk_idx",
             "more than " + std::to_string(memory_.config.capacity) + " slots for expert " +
                 std::to_string(id),
             "at most the capacity for one expert");
    }
  }
}

std::shared_ptr<Exchange> HostLatency::begin(const ConstTensorView& x,
                                             const ConstTensorView& topk_idx,
                                             const LatencyDispatchOptions& options) {
  check_latency_dispatch(x, topk_idx, memory_.config, options);
  check_waits(kLatencyDispatch, options.wait_ns, ranks());
  auto exchange = std::make_shared<Exchange>();
  exchange->routes = checked_routes(kLatencyDispatch, topk_idx, engine_->placement().experts);
  check_expert_capacity(exchange->routes);
  exchange->options = options;
  exchange->tokens = x.rows();
  exchange->sent.assign(static_cast<std::size_t>(ranks()), 0);
  exchange->came.assign(static_cast<std::size_t>(ranks()), 0);
  exchange->topk = static_cast<int>(topk_idx.shape[1]);
  exchange->sums_here = memory_.config.masks
                            ? fixed_sum_places(memory_.config.capacity, ranks())
                            : first_sum_places(exchange->routes, engine_->placement());
  exchange->sums_there.assign(static_cast<std::size_t>(ranks()), 0);
  if (options.topk_weights) {
    const auto* weights = static_cast<const float*>(options.topk_weights->data);
    exchange->weights.assign(weights, weights + options.topk_weights->shape.product());
  }
  std::scoped_lock lock(mutex_);
  const Generation next = generation_ + 1;
  if (alive_[memory_.buffer(next)]) {
    throw Error(ErrorKind::exhausted,
                std::string(kLatencyDispatch) +
                    ": the result of the dispatch before the last is still alive, and the two "
                    "buffers are used in turn; drop it (LatencyReceived, its tensors and its "
                    "LatencyCombined) before this dispatch",
                {engine_->rank(), engine_->rank(), kLatencyDispatch, generation_, 0, 0});
  }
  exchange->generation = next;
  exchange->lease = std::make_shared<BufferLease>(shared_from_this(), next);
  make_result(memory_, *exchange);
  // Nothing fails any more: from here on the peers count on this generation.
  exchange->lease->take();
  generation_ = next;
  alive_[memory_.buffer(next)] = true;
  return exchange;
}

LatencyReceived HostLatency::dispatch(const ConstTensorView& x, const ConstTensorView& topk_idx,
                                      const LatencyDispatchOptions& options) {
  HostEngine::Call call(*engine_, kLatencyDispatch, asks());
  check_complete(kLatencyDispatch);
  masks_.check_evicted(kLatencyDispatch);
  const std::shared_ptr<Exchange> exchange = begin(x, topk_idx, options);
  auto state = std::make_shared<ReceiveRows>();
  state->engine = shared_from_this();
  state->exchange = exchange;
  LatencyReceived result = exchange->result;
  Access::state(result) = state;
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
    const RankBytes& sent = sent_[memory_.buffer(generation)];
    for (std::size_t r = 0; r < awaited.size(); ++r) awaited[r] &= sent[r];
    await_sources({"latency dispatch: rows of a dropped result",
                   memory_.flag_array(memory_.layout.arrived), generation},
                  awaited);
    // Not `drop`: a later generation may be alive in this buffer by now.
    std::scoped_lock lock(mutex_);
    release(generation);
  }
}

void HostLatency::await_credits(Generation generation) {
  if (generation <= 2) return;
  const protocol::FlagArray flags{memory_.segment.data + memory_.layout.released, kSourceBytes,
                                  ranks()};
  engine_->channel().await("latency dispatch: credit", {flags, generation - 2},
                           [&](GroupWatch& watch) {
                             protocol::Status status;
                             for (int peer = 0; peer < ranks() && status.ok(); ++peer) {
                               status = credit_.await_credit(peer, generation, watch);
                             }
                             return status;
                           });
}

void HostLatency::send_as_credits_come(Exchange& exchange, const ConstTensorView& x) {
  const Generation g = exchange.generation;
  exchange.sent = unmasked();
  sent_[memory_.buffer(g)] = exchange.sent;
  if (!masks_.on() || g <= 2) {
    await_credits(g);
    send_rows(memory_, credit_, exchange, x, exchange.sent);
    return;
  }
  // Whoever gives credit is served at once: a rank that is late must not make this one late for the
  // others.
  const RankBytes pending = std::move(exchange.sent);
  exchange.sent.assign(pending.size(), 0);
  // A peer that throws away results unread gives credit far ahead.
  masks_.await({"latency dispatch: credit", memory_.flag_array(memory_.layout.released), g - 2,
                protocol::kAnyAhead},
               pending, g, [&](const RankBytes& given) {
                 send_rows(memory_, credit_, exchange, x, given);
                 for (std::size_t r = 0; r < given.size(); ++r) exchange.sent[r] |= given[r];
               });
}

RankBytes HostLatency::await_sources(const SourceWait& wait, const RankBytes& pending,
                                     const std::optional<TensorView>& wait_ns) {
  RankBytes came(pending.size(), 0);
  if (!any(pending)) return came;
  const SourceClock clock(wait_ns);
  const auto note = [&](const RankBytes& newcomers) {
    for (std::size_t r = 0; r < newcomers.size(); ++r) {
      if (newcomers[r] == 0) continue;
      came[r] = 1;
      clock.charge(r);
    }
  };
  if (masks_.on()) {
    masks_.await(wait, pending, wait.wanted, note,
                 [&](int peer) { clock.charge(static_cast<std::size_t>(peer)); });
    return came;
  }
  if (!wait_ns) {
    engine_->channel().await(wait.stage, {wait.flags, wait.wanted}, [&](GroupWatch& watch) {
      return protocol::await_all(wait.flags, wait.wanted, wait.depth, watch);
    });
    return pending;
  }
  RankBytes left = pending;
  engine_->channel().await(wait.stage, {wait.flags, wait.wanted}, [&](GroupWatch& watch) {
    protocol::Status status;
    while (any(left) && status.ok()) {
      RankBytes newcomers(left.size(), 0);
      status = protocol::await_some(wait.flags, wait.wanted, wait.depth, left, newcomers, watch);
      note(newcomers);
    }
    return status;
  });
  return came;
}

void HostLatency::leave_out_unsent(Exchange& exchange) const {
  for (int source = 0; source < ranks(); ++source) {
    const SourceHeader& header = memory_.header_from(exchange, source);
    std::uint8_t& came = exchange.came[static_cast<std::size_t>(source)];
    if (came != 0 && header.generation != exchange.generation) came = 0;
  }
}

void HostLatency::receive_rows(Exchange& exchange) {
  const Generation g = exchange.generation;
  check_still_joined(kLatencyDispatch, g);
  exchange.came =
      await_sources({"latency dispatch: rows", memory_.flag_array(memory_.layout.arrived), g},
                    unmasked(), exchange.options.wait_ns);
  if (masks_.on()) leave_out_unsent(exchange);
  receive_result(memory_, exchange);
  engine_->channel().record().moved(static_cast<std::int64_t>(exchange.arrivals.size()),
                                    memory_.row_bytes(exchange));
  exchange.lease->mark_received();
  exchange.received.store(true, std::memory_order_release);
}

void ReceiveRows::receive() {
  Claim claim(called);
  if (!claim) refuse_second_receive(kLatencyDispatch);
  engine->enter(kLatencyDispatch, nullptr, [this] { engine->receive_rows(*exchange); });
  claim.keep();
}

}  // namespace ferry::host
