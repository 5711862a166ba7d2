// Latency combine, sending: the rows of a token to its owner, one for each slot or, summed here,
// one for each rank; ahead of them how this rank combines, and weights where they are needed.
#include <algorithm>
#include <array>
#include <span>
#include <string>

#include "core/check.hpp"
#include "host/kernels/kernels.hpp"
#include "host/latency_engine.hpp"

namespace ferry::host {

namespace {

CombineHead head_of(Generation generation, const CombineCall& call) {
  return {generation, call.by_rank ? 1u : 0u, static_cast<std::uint32_t>(call.format),
          call.weights_follow ? 1u : 0u, 0};
}

/// The sum of one token's slots on this rank, in ascending k, rounded to the dtype.
class SlotSum {
 public:
  explicit SlotSum(const LatencyConfig& config)
      : topk_(config.topk),
        row_bytes_(static_cast<std::size_t>(config.hidden) * size_of(config.dtype)),
        row_(row_bytes_) {
    sum_.rows = rows_.data();
    sum_.weights = weights_.data();
    sum_.out = row_.data();
    sum_.columns = config.hidden;
    sum_.dtype = config.dtype;
  }
  /// `places`, `weights`: [K]; rows are `from` + place, where it is not −1.
  const std::byte* add_up(const std::byte* from, const std::int32_t* places, const float* weights) {
    sum_.count = 0;
    for (int k = 0; k < topk_; ++k) {
      if (places[k] < 0) continue;
      const auto n = static_cast<std::size_t>(sum_.count++);
      rows_[n] = from + static_cast<std::size_t>(places[k]) * row_bytes_;
      weights_[n] = weights[k];
    }
    kernels().sum_rows(sum_);
    return row_.data();
  }

 private:
  int topk_;
  std::size_t row_bytes_;
  std::vector<std::byte> row_;
  std::array<const void*, kMaxTopk> rows_{};
  std::array<float, kMaxTopk> weights_{};
  SumRows sum_{};
};

}  // namespace

void HostLatency::announce_combine(const Exchange& exchange, const CombineCall& call) {
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

RankBytes HostLatency::await_announcements(const Exchange& exchange, const CombineCall& call,
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

void HostLatency::check_announcement(const Exchange& exchange, const CombineCall& call,
                                     int source) const {
  const Generation g = exchange.generation;
  const auto& head = *reinterpret_cast<const CombineHead*>(
      segment_.data + line_offset(layout_.combines, g, source));
  if (head == head_of(g, call)) return;
  disagree(*engine_, kLatencyCombine, source, "path, format or place for the weights", g);
}

const float* HostLatency::weights_of(const Exchange& exchange, const CombineCall& call,
                                     std::size_t n) const {
  if (!call.weights_follow) {
    return exchange.slot_weights.data() + n * static_cast<std::size_t>(config_.topk);
  }
  const Arrival& arrival = exchange.arrivals[n];
  return reinterpret_cast<const float*>(
      segment_.data + weights_offset(exchange.generation, arrival.source, arrival.token));
}

std::size_t HostLatency::sum_bytes(CombineFormat format) const {
  switch (format) {
    case CombineFormat::e4m3: return combine_row_.e4m3_bytes;
    case CombineFormat::logfmt10: return combine_row_.logfmt_bytes;
    default: return plain_bytes();
  }
}

const std::byte* HostLatency::encode_sum(const CombineCall& call, const std::byte* row) {
  if (call.format == CombineFormat::e4m3) {
    QuantizeRow quantize;
    quantize.row = row;
    quantize.dtype = config_.dtype;
    quantize.columns = config_.hidden;
    quantize.codes = encoded_.data();
    quantize.scales = reinterpret_cast<float*>(encoded_.data() + combine_row_.e4m3_scales);
    kernels().quantize_row(quantize);
    return encoded_.data();
  }
  if (call.format == CombineFormat::logfmt10) {
    kernels().encode_logfmt({row, config_.dtype, config_.hidden, encoded_.data(), combine_row_});
    return encoded_.data();
  }
  return row;
}

void HostLatency::send_results(const Exchange& exchange, const CombineCall& call,
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
    send_sums(exchange, call, rows, await_announcements(exchange, call, to));
  } else {
    // Whoever's weights are here is served at once, as in `send_as_credits_come`.
    const Generation g = exchange.generation;
    masks_.await({"latency combine: weights", flag_row(line_offset(layout_.announced, g, 0)), g},
                 to, g, [&](const RankBytes& given) {
                   for (int source = 0; source < ranks(); ++source) {
                     if (given[static_cast<std::size_t>(source)] == 0) continue;
                     check_announcement(exchange, call, source);
                   }
                   send_sums(exchange, call, rows, given);
                 });
  }
}

void HostLatency::send_sums(const Exchange& exchange, const CombineCall& call,
                            const ConstTensorView& rows, const RankBytes& to) {
  const Generation g = exchange.generation;
  for (int i = 1; i <= ranks(); ++i) {  // each starts elsewhere
    const int owner = (engine_->rank() + i) % ranks();
    if (to[static_cast<std::size_t>(owner)] == 0) continue;
    const std::size_t bytes = send_sums_to(exchange, call, rows, owner);
    combined_[buffer(g)].deliver(reach_, owner, g, bytes);
  }
}

std::size_t HostLatency::send_sums_to(const Exchange& exchange, const CombineCall& call,
                                      const ConstTensorView& rows, int owner) {
  const Generation g = exchange.generation;
  const auto* from = static_cast<const std::byte*>(rows.data);
  const bool fanned_out = exchange.options.order == RowOrder::expert_major;
  const auto topk = static_cast<std::size_t>(config_.topk);
  const auto arrivals = std::ranges::equal_range(exchange.arrivals, owner, {}, &Arrival::source);
  const auto first = static_cast<std::size_t>(arrivals.begin() - exchange.arrivals.begin());
  const std::span<const std::int32_t> places =
      fanned_out ? std::span(exchange.slot_rows).subspan(first * topk, arrivals.size() * topk)
                 : std::span<const std::int32_t>();
  const std::size_t count = call.by_rank
                                ? arrivals.size()
                                : static_cast<std::size_t>(std::ranges::count_if(
                                      places, [](std::int32_t place) { return place >= 0; }));
  check_sums_there(exchange, owner, count);
  const std::size_t row_bytes = sum_bytes(call.format);
  std::size_t sent = sums_offset(g, exchange.sums_there[static_cast<std::size_t>(owner)]);
  const auto send = [&](const std::byte* row) {
    reach_.write(owner, at(sent), encode_sum(call, row), row_bytes, protocol::Delivery<>::tag(g));
    sent += row_bytes;
  };
  SlotSum slots(config_);
  for (std::size_t n = 0; n < arrivals.size(); ++n) {
    if (!fanned_out) {
      send(from + slot(0, owner, arrivals[n].row) * plain_bytes());
    } else if (call.by_rank) {
      send(slots.add_up(from, places.data() + n * topk, weights_of(exchange, call, first + n)));
    } else {
      for (const std::int32_t place : places.subspan(n * topk, topk)) {
        if (place >= 0) send(from + static_cast<std::size_t>(place) * plain_bytes());
      }
    }
  }
  return count * row_bytes;
}

void HostLatency::check_sums_there(const Exchange& exchange, int owner, std::size_t rows) {
  const std::uint64_t first = exchange.sums_there[static_cast<std::size_t>(owner)];
  // Not first + rows: that could overflow.
  if (first <= sum_places() && rows <= sum_places() - first) return;
  engine_->channel().distrust("latency combine: rows", owner,
                              "wants " + std::to_string(rows) + " rows at place " +
                                  std::to_string(first) + " of " + std::to_string(sum_places()));
}

}  // namespace ferry::host
