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
  std::optional<TensorView> wait_ns{};
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

/// The world as the others see it without these ranks: nothing comes from them, nothing goes there.
inline World without(World world, const std::set<int>& absent) {
  for (int r = 0; r < world.ranks; ++r) {
    for (std::int64_t& id : world.inputs[static_cast<std::size_t>(r)].topk_idx) {
      if (id >= 0 && (absent.contains(r) || absent.contains(world.rank_of(id)))) id = -1;
    }
  }
  return world;
}

inline void check_latency_rows(const World& world, int rank, const LatencyReceived& got,
                               const Copier& copier, const std::set<int>& absent = {}) {
  const auto expected = conformance::expect_latency(without(world, absent), rank);
  const auto places = static_cast<std::size_t>(got.source_token.view().shape[1]);
  const std::size_t row_bytes = world.row_bytes(), experts = expected.rows.size();
  const auto counts = copier.first<std::int32_t>(got.counts, experts);
  const auto tokens = copier.first<std::int32_t>(got.source_token, experts * places);
  const auto x = copier.first<std::byte>(got.x, experts * places * row_bytes);
  need_same("ranges", got.ranges, expected.ranges, copier);
  for (std::size_t e = 0; e < experts; ++e) {
    const auto& rows = expected.rows[e];
    const std::string where = "expert " + std::to_string(e);
    need(counts[e] == static_cast<std::int32_t>(rows.size()),
         where + ": " + std::to_string(counts[e]) + " rows, expected " +
             std::to_string(rows.size()));
    for (std::size_t i = 0; i < rows.size(); ++i) {
      const std::size_t place = e * places + i;
      const std::byte* sent = world.row(rows[i].source, rows[i].token);
      need(tokens[place] == rows[i].token, where + ": source token");
      need(std::equal(sent, sent + row_bytes, x.data() + place * row_bytes), where + ": x");
    }
  }
}

/// When the rows come back as they are.
inline void check_latency_sums(const World& world, int rank, const conformance::LatencyHow& how,
                               const Tensor& got, const Copier& copier,
                               const std::set<int>& absent = {}) {
  const World seen = without(world, absent);
  std::vector<conformance::ExpectedLatency> by_expert;
  std::vector<conformance::ExpectedRankMajor> by_rank;
  for (int d = 0; d < world.ranks; ++d) {
    by_expert.push_back(conformance::expect_latency(seen, d));
    by_rank.push_back(conformance::expect_rank_major(seen, d));
  }
  const auto row = [&](int d, std::int64_t block, std::int64_t place, std::byte* out) {
    const auto at = static_cast<std::size_t>(d), b = static_cast<std::size_t>(block),
               p = static_cast<std::size_t>(place);
    const std::byte* sent = how.order == RowOrder::rank_major
                                ? world.row(rank, by_rank[at].rows[b][p].token)
                                : world.row(rank, by_expert[at].rows[b][p].token);
    std::copy_n(sent, world.row_bytes(), out);
  };
  need_same("latency sums", got, conformance::expect_latency_combine(seen, rank, row, how), copier);
}
inline void check_latency_sums(const World& world, int rank, CombinePath path, const Tensor& got,
                               const Copier& copier, const std::set<int>& absent = {}) {
  check_latency_sums(world, rank, {RowOrder::expert_major, path}, got, copier, absent);
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
  options.wait_ns = trip.wait_ns;
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
  options.wait_ns = trip.wait_ns;
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
    LatencyTrip trip{.path = path, .weights_with_dispatch = hooks, .hooks = hooks};
    latency_trip(latency, world, rank, mine, trip, copier);
  }
}

/// The ranks that this one goes on without.
inline void need_masked(const LatencyExchange& latency, const std::set<int>& expected,
                        const std::string& when) {
  const std::vector<bool> masked = latency.masked();
  for (std::size_t r = 0; r < masked.size(); ++r) {
    need(masked[r] == expected.contains(static_cast<int>(r)),
         when + ": mask of rank " + std::to_string(r));
  }
}

}  // namespace ferry::test
