// Latency combine, sending: how this rank combines, and weights where they are needed, ahead of
// the rows; then these, as soon as they may go.

#include "core/check.hpp"
#include "host/latency/engine.hpp"

namespace ferry::host {

namespace {

CombineHead head_of(Generation generation, const LatencyCombineCall& call) {
  return {generation, call.by_rank ? 1u : 0u, static_cast<std::uint32_t>(call.format),
          call.weights_follow ? 1u : 0u, 0};
}

}  // namespace

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
    reach_.write(peer, at(line_offset(layout_.combines, g, engine_->rank())), &head, sizeof(head),
                 tag);
    for (std::int64_t t = 0; call.weights_follow && t < exchange.tokens; ++t) {
      reach_.write(peer, at(weights_offset(g, engine_->rank(), t)),
                   call.weights.data() + static_cast<std::size_t>(t) * topk, row_bytes, tag);
      bytes += row_bytes;
    }
    announced_[buffer(g)].deliver(reach_, peer, g, bytes);
  }
}

RankBytes HostLatency::await_announcements(const Exchange& exchange, const LatencyCombineCall& call,
                                           const RankBytes& pending,
                                           const std::optional<TensorView>& waits) {
  const Generation g = exchange.generation;
  const char* stage = call.weights_follow ? "latency combine: weights" : "latency combine: rows";
  const RankBytes came =
      await_sources({stage, flag_row(line_offset(layout_.announced, g, 0)), g}, pending, waits);
  for (int source = 0; source < ranks(); ++source) {
    if (came[static_cast<std::size_t>(source)] != 0) check_announcement(exchange, call, source);
  }
  return came;
}

void HostLatency::check_announcement(const Exchange& exchange, const LatencyCombineCall& call,
                                     int source) const {
  const Generation g = exchange.generation;
  const auto& head = *reinterpret_cast<const CombineHead*>(
      segment_.data + line_offset(layout_.combines, g, source));
  if (head == head_of(g, call)) return;
  disagree(*engine_, kLatencyCombine, source, "path, format or place for the weights", g);
}

const float* HostLatency::weights_of(const Exchange& exchange, const LatencyCombineCall& call,
                                     std::size_t n) const {
  if (!call.weights_follow) {
    return exchange.slot_weights.data() + n * static_cast<std::size_t>(config_.topk);
  }
  const Arrival& arrival = exchange.arrivals[n];
  return reinterpret_cast<const float*>(
      segment_.data + weights_offset(exchange.generation, arrival.source, arrival.token));
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
    send_sums(exchange, call, rows, await_announcements(exchange, call, to, call.waits));
  } else {
    send_sums_as_weights_come(exchange, call, rows, to);
  }
}

void HostLatency::send_sums_as_weights_come(const Exchange& exchange,
                                            const LatencyCombineCall& call,
                                            const ConstTensorView& rows, const RankBytes& to) {
  // Whoever's weights are here is served at once, as in `send_as_credits_come`.
  const Generation g = exchange.generation;
  SourceClock clock(call.waits);
  masks_.await(
      {"latency combine: weights", flag_row(line_offset(layout_.announced, g, 0)), g}, to, g,
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

}  // namespace ferry::host
