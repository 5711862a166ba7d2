// Results of latency mode on GPUs that are not fanned out, that cross in few bits, or that were
// kept too long. Skips without a GPU.
#include <gtest/gtest.h>

#include <chrono>

#include "engine_graph.hpp"
#include "engine_latency.hpp"
#include "engine_seat.hpp"

namespace ferry::test {
namespace {

constexpr std::uint64_t kLatencyResultsSeed = 20261127;

void check_ranked_rows(const World& world, int rank, const LatencyReceived& got,
                       const Copier& copier) {
  const auto expected = conformance::expect_rank_major(world, rank);
  const auto capacity = static_cast<std::size_t>(got.x.view().shape[1]);
  const auto topk = static_cast<std::size_t>(world.topk);
  const std::size_t rows = expected.rows.size() * capacity, row_bytes = world.row_bytes();
  const auto counts = copier.first<std::int32_t>(got.counts, expected.rows.size());
  const auto tokens = copier.first<std::int32_t>(got.source_token, rows);
  const auto x = copier.first<std::byte>(got.x, rows * row_bytes);
  const auto ids = copier.first<std::int32_t>(got.topk_idx, rows * topk);
  for (std::size_t s = 0; s < expected.rows.size(); ++s) {
    const auto& sent = expected.rows[s];
    const std::string where = "source " + std::to_string(s);
    need(counts[s] == static_cast<std::int32_t>(sent.size()), where + ": counts");
    for (std::size_t i = 0; i < capacity; ++i) {
      const std::size_t at = s * capacity + i;
      const std::vector<std::int32_t> none(topk, -1);
      const auto& local = i < sent.size() ? sent[i].topk_idx : none;
      need(std::equal(local.begin(), local.end(), ids.data() + at * topk), where + ": topk_idx");
      if (i >= sent.size()) continue;
      need(tokens[at] == sent[i].token, where + ": source token");
      const std::byte* row = world.row(static_cast<int>(s), sent[i].token);
      need(std::equal(row, row + row_bytes, x.data() + at * row_bytes), where + ": x");
    }
  }
}

/// Other routes in each replay; an exchange that has no room to fan out, and one that has.
TEST_P(EngineTest, LatencyRankMajorRowsAreReplayed) {
  const Shape shape;
  each(shape, [&](Seat& seat) {
    for (const RowOrder order : {RowOrder::rank_major, RowOrder::expert_major}) {
      World world(seat.size(), shape, kLatencyResultsSeed);
      const OnGpu mine = seat.on_gpu(world);
      OwnStream own(seat.device);
      LatencyConfig config = latency_config(shape);
      config.order = order;
      LatencyExchange latency(seat.group, config);
      need(seat.group.memory().latency_bytes >=
               LatencyExchange::memory_hint(config, shape.experts, seat.size(), DeviceKind::cuda),
           "memory");
      seat.meet();
      LatencyReceived received;
      LatencyCombined combined;
      const Graph graph(own.raw, [&] {
        LatencyDispatchOptions options{.order = RowOrder::rank_major,
                                       .hook = order == RowOrder::expert_major,
                                       .stream = &own.stream};
        received = latency.dispatch(mine.x_view(), mine.routes_view(), options);
        if (options.hook) received.receive();
        LatencyCombineOptions back{.hook = options.hook, .stream = &own.stream};
        combined = latency.combine(received.x, received, back);
        if (back.hook) combined.receive();
      });
      for (std::uint64_t i = 0; i < 4; ++i) {
        world = seat.refill(mine, kLatencyResultsSeed + 1 + i);
        graph.run();
        check_ranked_rows(world, seat.rank(), received, seat.copier);
        check_latency_sums(world, seat.rank(), {RowOrder::rank_major}, combined.x, seat.copier);
      }
      seat.meet();
    }
  });
}

/// Ranks whose rows cross in different formats hear it, each from the other, before the deadline.
TEST_P(EngineTest, LatencyFormatsOfSomeRanksAreAMismatch) {
  const Shape shape;
  each_within(
      3s, shape, kLatencyResultsSeed + 20, [&](Seat& seat, const World& world, const OnGpu& mine) {
        LatencyExchange latency(seat.group, latency_config(shape));
        seat.meet();
        const LatencyReceived received = latency_dispatch(latency, mine, {});
        LatencyCombineOptions options;
        options.format = seat.rank() == 1 ? CombineFormat::e4m3 : CombineFormat::logfmt10;
        const auto error = error_of(
            [&] { (void)latency.combine(received.x, received, mine.weights_view(), options); });
        const std::string what = error ? error->what() : "it went on";
        seat.meet();  // who waits for nobody would leave while others still find out
        // A rank without tokens waits for nobody's rows.
        const bool waits = world.inputs[static_cast<std::size_t>(seat.rank())].tokens > 0;
        const bool mismatch = error && error->kind() == ErrorKind::mismatch;
        need(mismatch || (error && error->kind() == ErrorKind::peer_failed) || (!waits && !error),
             what);
        if (waits && seat.size() == 2) need(mismatch, what);
      });
}

/// A result that was kept while a graph made several dispatches may be read, but its sums would lie
/// where those of the graph do.
TEST_P(EngineTest, LatencyResultsKeptTooLongAreRefused) {
  const Shape shape;
  each(shape, kLatencyResultsSeed + 30, [&](Seat& seat, const World& world, const OnGpu& mine) {
    OwnStream own(seat.device);
    LatencyExchange latency(seat.group, latency_config(shape));
    seat.meet();
    const LatencyTrip trip{CombinePath::per_rank, true, false, &own.stream, {}};
    for (const int layers : {1, 3}) {
      const Graph graph(own.raw, [&] {
        for (int layer = 0; layer < layers; ++layer) {
          (void)latency_combine(latency, mine, latency_dispatch(latency, mine, trip), trip);
        }
      });
      const LatencyReceived kept = latency_dispatch(latency, mine, trip);
      await_latency(kept.event, trip);
      seat.meet();
      graph.run();
      check_latency_rows(world, seat.rank(), kept, seat.copier);
      const auto kind = kind_of([&] {
        const LatencyCombined combined = latency_combine(latency, mine, kept, trip);
        await_latency(combined.event, trip);
        check_latency_sums(world, seat.rank(), trip.path, combined.x, seat.copier);
      });
      need(kind == (layers == 1 ? std::nullopt : std::optional(ErrorKind::invalid_argument)),
           std::to_string(layers) + " dispatches later");
      seat.meet();
    }
    latency_trip(latency, world, seat.rank(), mine, trip, seat.copier);
    seat.meet();
  });
}

/// The buffer of a result that was dropped before its rows came is taken by the next but one, which
/// is not overwritten while it is alive, whatever becomes of the first; across a rejoin, too.
TEST_P(EngineTest, LatencyResultsOutliveThoseDroppedUnreceived) {
  const Shape shape;
  each(shape, [&](Seat& seat) {
    const World world(seat.size(), shape, kLatencyResultsSeed + 50),
        later(seat.size(), shape, kLatencyResultsSeed + 51);
    const LatencyTrip trip{CombinePath::per_rank, false, false, nullptr, {}};
    for (const bool masks : {false, true}) {
      const OnGpu mine = seat.on_gpu(world);
      LatencyExchange latency(seat.group, latency_config(shape, masks));
      seat.meet();
      (void)latency.dispatch(mine.x_view(), mine.routes_view(), {.hook = true});
      (void)latency_dispatch(latency, mine, trip);
      const LatencyReceived kept = latency_dispatch(latency, mine, trip);
      if (masks) latency.rejoin();
      mine.fill(later.sent(seat.rank()), seat.copier);
      const LatencyReceived other = latency_dispatch(latency, mine, trip);
      need_error(ErrorKind::exhausted, "a third result was made",
                 [&] { (void)latency_dispatch(latency, mine, trip); });
      check_latency_rows(world, seat.rank(), kept, seat.copier);
      check_latency_rows(later, seat.rank(), other, seat.copier);
      const LatencyCombined sums = latency_combine(latency, mine, other, trip);
      check_latency_sums(later, seat.rank(), trip.path, sums.x, seat.copier);
      seat.meet();
    }
  });
}

/// A rank that is late with its weights, which come with the combine, keeps nobody's sums from the
/// others: they mask it, and not each other.
TEST_P(EngineTest, LatencyLateWeightsMaskTheirRankAlone) {
  if (GetParam().ranks < 3) GTEST_SKIP() << "needs two ranks that are not late";
  const Shape shape;
  each_within(2s, shape, kLatencyResultsSeed + 40,
              [&](Seat& seat, const World& world, const OnGpu& mine) {
                LatencyExchange latency(seat.group, latency_config(shape, true));
                seat.meet();
                const LatencyTrip trip{CombinePath::per_rank, false, false, nullptr, {}};
                latency_trip(latency, world, seat.rank(), mine, trip, seat.copier);
                const LatencyReceived received = latency_dispatch(latency, mine, trip);
                seat.meet();
                if (seat.rank() != 1) {
                  const LatencyCombined combined = latency_combine(latency, mine, received, trip);
                  check_latency_sums(world, seat.rank(), trip.path, combined.x, seat.copier, {1});
                  need_masked(latency, {1}, "late weights");
                }
                seat.meet();
                latency.rejoin();
                latency_trip(latency, world, seat.rank(), mine, trip, seat.copier);
                seat.meet();
              });
}

}  // namespace
}  // namespace ferry::test
