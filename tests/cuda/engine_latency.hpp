// Latency mode through the public API: one exchange of known tokens, and what must arrive.
#pragma once
#include <chrono>
#include <optional>
#include <set>

#include "engine_case.hpp"

namespace ferry::test {

/// Options of one latency exchange.
struct LatencyTrip {
  CombinePath path = CombinePath::per_slot;
  bool weights_with_dispatch = false;
  bool hooks = false;
  Stream* stream = nullptr;
  std::optional<TensorView> waits{};
};

inline LatencyConfig latency_config(const Shape& shape, bool masks = false) {
  LatencyConfig config;
  config.capacity = shape.tokens;
  config.hidden = shape.hidden;
  config.topk = shape.topk;
  config.dtype = shape.dtype;
  config.masks = masks;
  return config;
}

/// Rows of one local expert in their order. `absent`: ranks of which nothing comes.
inline std::vector<Arrival> rows_of_expert(const World& world, std::int64_t expert,
                                           const std::set<int>& absent = {}) {
  std::vector<Arrival> rows;
  for (int s = 0; s < world.placement.ranks; ++s) {
    if (absent.contains(s)) continue;
    for (std::int64_t t = 0; t < world.ranks[static_cast<std::size_t>(s)].tokens; ++t) {
      for (int k = 0; k < world.shape.topk; ++k) {
        if (world.route(s, t, k) == expert) rows.push_back({s, t});
      }
    }
  }
  return rows;
}

inline void check_latency_rows(const World& world, int rank, const LatencyReceived& got,
                               const Copier& copier, const std::set<int>& absent = {}) {
  const std::int64_t first = world.placement.first_expert(rank);
  const std::int64_t experts = world.placement.local_experts(rank);
  const auto places = static_cast<std::size_t>(got.source_token.view().shape[1]);
  const auto hidden = static_cast<std::size_t>(world.shape.hidden);
  const auto counts = copier.get<std::int32_t>(got.counts, experts);
  const auto tokens = copier.get<std::int32_t>(got.source_token, experts);
  const auto ranges = copier.get<std::int64_t>(got.ranges, experts);
  const Tensor flat{TensorView(got.x.data(), world.shape.dtype,
                               {experts * static_cast<std::int64_t>(places), world.shape.hidden},
                               got.x.view().device),
                    got.x.owner()};
  const auto x = copier.get_floats(flat, flat.rows());
  for (std::int64_t e = 0; e < experts; ++e) {
    const auto rows = rows_of_expert(world, first + e, absent);
    const std::string where = "expert " + std::to_string(e);
    const auto at = static_cast<std::size_t>(e);
    need(counts[at] == static_cast<std::int32_t>(rows.size()),
         where + ": " + std::to_string(counts[at]) + " rows, expected " +
             std::to_string(rows.size()));
    std::vector<std::int64_t> from(static_cast<std::size_t>(world.placement.ranks));
    for (std::size_t i = 0; i < rows.size(); ++i) {
      const std::size_t place = at * places + i;
      ++from[static_cast<std::size_t>(rows[i].source)];
      need(tokens[place] == rows[i].token, where + ": source token");
      need(world.is_row(rows[i].source, rows[i].token, x.data() + place * hidden), where + ": x");
    }
    std::int64_t begin = 0;
    for (std::size_t s = 0; s < from.size(); ++s) {
      need(ranges[at * from.size() + s] == (begin << 32 | from[s]), where + ": ranges");
      begin += from[s];
    }
  }
}

/// When the rows come back as they are.
inline void check_latency_sums(const World& world, int rank, CombinePath path, const Tensor& got,
                               const Copier& copier, const std::set<int>& absent = {}) {
  const std::int64_t tokens = world.ranks[static_cast<std::size_t>(rank)].tokens;
  const auto x = copier.get_floats(got, tokens);
  const int ranks = world.placement.ranks;
  for (std::int64_t t = 0; t < tokens; ++t) {
    for (std::int64_t h = 0; h < world.shape.hidden; ++h) {
      std::vector<float> sums(static_cast<std::size_t>(ranks));  // of each rank, or one of all
      std::vector<bool> any(sums.size());
      for (int k = 0; k < world.shape.topk; ++k) {
        const std::int64_t expert = world.route(rank, t, k);
        if (expert < 0) continue;
        const int owner = world.placement.rank_of(expert);
        if (absent.contains(owner)) continue;
        const auto at = static_cast<std::size_t>(path == CombinePath::per_rank ? owner : 0);
        sums[at] = std::fmaf(world.weight(rank, t, k), world.x(rank, t, h), sums[at]);
        any[at] = true;
      }
      float sum = 0;
      for (std::size_t r = 0; r < sums.size(); ++r) {
        const bool alone = path == CombinePath::per_slot;  // rounded once
        if (any[r]) sum = sum + (alone ? sums[r] : rounded(world.shape.dtype, sums[r]));
      }
      sum = rounded(world.shape.dtype, sum);
      const float found = x[static_cast<std::size_t>(t * world.shape.hidden + h)];
      if (found == sum) continue;
      need(false, "latency sum of token " + std::to_string(t) + ", channel " + std::to_string(h) +
                      ": got " + std::to_string(found) + ", expected " + std::to_string(sum));
    }
  }
}

struct LatencyExchanged {
  LatencyReceived received{};
  LatencyCombined combined{};
};

/// A dispatch and the combine of what came; captured, too.
inline LatencyReceived latency_dispatch(LatencyExchange& latency, const OnGpu& mine,
                                        const LatencyTrip& trip) {
  LatencyDispatchOptions options;
  if (trip.weights_with_dispatch) options.topk_weights = mine.weights_view();
  options.hook = trip.hooks;
  options.stream = trip.stream;
  options.waits = trip.waits;
  LatencyReceived received = latency.dispatch(mine.x_view(), mine.routes_view(), options);
  if (trip.hooks) received.receive();
  return received;
}
inline LatencyCombined latency_combine(LatencyExchange& latency, const OnGpu& mine,
                                       const LatencyReceived& received, const LatencyTrip& trip) {
  LatencyCombineOptions options;
  options.path = trip.path;
  options.hook = trip.hooks;
  options.stream = trip.stream;
  options.waits = trip.waits;
  LatencyCombined combined =
      trip.weights_with_dispatch
          ? latency.combine(received.x, received, options)
          : latency.combine(received.x, received, mine.weights_view(), options);
  if (trip.hooks) combined.receive();
  return combined;
}
/// With hooks on a stream the event is of the sending half.
inline void await_latency(const Event& event, const LatencyTrip& trip) {
  event.wait(std::chrono::seconds(60));
  if (trip.hooks && trip.stream != nullptr) trip.stream->synchronize();
}

/// One exchange, checked.
inline void latency_trip(LatencyExchange& latency, const World& world, int rank, const OnGpu& mine,
                         const LatencyTrip& trip, const Copier& copier,
                         const std::set<int>& absent = {}) {
  const LatencyReceived received = latency_dispatch(latency, mine, trip);
  await_latency(received.event, trip);
  check_latency_rows(world, rank, received, copier, absent);
  const LatencyCombined combined = latency_combine(latency, mine, received, trip);
  await_latency(combined.event, trip);
  check_latency_sums(world, rank, trip.path, combined.x, copier, absent);
}

/// One with hooks and weights that come with the dispatch, one without either.
inline void latency_trips(LatencyExchange& latency, const World& world, int rank, const OnGpu& mine,
                          CombinePath path, const Copier& copier) {
  for (const bool hooks : {false, true}) {
    LatencyTrip trip;
    trip.path = path;
    trip.weights_with_dispatch = hooks;
    trip.hooks = hooks;
    latency_trip(latency, world, rank, mine, trip, copier);
  }
}

}  // namespace ferry::test
