// Results of latency mode on GPUs that are not fanned out, that cross in few bits, or that were
// kept too long. Skips without a GPU.
#include <gtest/gtest.h>

#include <chrono>
#include <functional>
#include <thread>

#include "engine_graph.hpp"
#include "engine_latency.hpp"

namespace ferry::test {
namespace {

constexpr std::uint64_t kSeed = 20261127;

/// Tokens of `source` that have a slot on `rank`, in their order.
std::vector<std::int64_t> tokens_for(const World& world, int source, int rank) {
  std::vector<std::int64_t> tokens;
  for (std::int64_t t = 0; t < world.ranks[static_cast<std::size_t>(source)].tokens; ++t) {
    bool comes = false;
    for (int k = 0; k < world.shape.topk; ++k) {
      const std::int64_t expert = world.route(source, t, k);
      comes |= expert >= 0 && world.placement.rank_of(expert) == rank;
    }
    if (comes) tokens.push_back(t);
  }
  return tokens;
}

void check_ranked_rows(const World& world, int rank, const LatencyReceived& got,
                       const Copier& copier) {
  const int ranks = world.placement.ranks;
  const auto capacity = got.x.view().shape[1];
  const auto hidden = static_cast<std::size_t>(world.shape.hidden);
  const std::int64_t first = world.placement.first_expert(rank);
  const auto counts = copier.get<std::int32_t>(got.counts, ranks);
  const auto tokens = copier.get<std::int32_t>(got.source_token, ranks);
  const auto flat = [&](const Tensor& tensor, Dtype dtype, std::int64_t columns) {
    return Tensor{
        TensorView(tensor.data(), dtype, {ranks * capacity, columns}, tensor.view().device),
        tensor.owner()};
  };
  const auto x = copier.get<float>(flat(got.x, Dtype::f32, world.shape.hidden), ranks * capacity);
  const auto ids =
      copier.get<std::int32_t>(flat(got.topk_idx, Dtype::i32, world.shape.topk), ranks * capacity);
  for (int s = 0; s < ranks; ++s) {
    const auto expected = tokens_for(world, s, rank);
    const std::string where = "source " + std::to_string(s);
    need(counts[static_cast<std::size_t>(s)] == static_cast<std::int32_t>(expected.size()),
         where + ": counts");
    for (std::int64_t i = 0; i < capacity; ++i) {
      const auto at = static_cast<std::size_t>(s * capacity + i);
      const bool valid = i < static_cast<std::int64_t>(expected.size());
      const std::int64_t token = valid ? expected[static_cast<std::size_t>(i)] : -1;
      for (int k = 0; k < world.shape.topk; ++k) {
        const std::int64_t expert = valid ? world.route(s, token, k) : -1;
        const bool here = expert >= 0 && world.placement.rank_of(expert) == rank;
        need(ids[at * static_cast<std::size_t>(world.shape.topk) + static_cast<std::size_t>(k)] ==
                 (here ? expert - first : -1),
             where + ": topk_idx");
      }
      if (!valid) continue;
      need(tokens[at] == token, where + ": source token");
      need(world.is_row(s, token, x.data() + at * hidden), where + ": x");
    }
  }
}

/// When each row comes back as it is: once from each rank that got it.
void check_ranked_sums(const World& world, int rank, const Tensor& got, const Copier& copier) {
  const std::int64_t tokens = world.ranks[static_cast<std::size_t>(rank)].tokens;
  const auto x = copier.get<float>(got, tokens);
  for (std::int64_t t = 0; t < tokens; ++t) {
    std::set<int> from;
    for (int k = 0; k < world.shape.topk; ++k) {
      const std::int64_t expert = world.route(rank, t, k);
      if (expert >= 0) from.insert(world.placement.rank_of(expert));
    }
    for (std::int64_t h = 0; h < world.shape.hidden; ++h) {
      float sum = 0;
      for (std::size_t r = 0; r < from.size(); ++r) sum = sum + world.x(rank, t, h);
      need(x[static_cast<std::size_t>(t * world.shape.hidden + h)] == sum,
           "rank-major sum of token " + std::to_string(t));
    }
  }
}

/// Other routes in each replay; an exchange that has no room to fan out, and one that has.
TEST_P(EngineTest, LatencyRankMajorRowsAreReplayed) {
  const Shape shape;
  each(shape, [&](Seat& seat) {
    const auto self = static_cast<std::size_t>(seat.rank());
    for (const RowOrder order : {RowOrder::rank_major, RowOrder::expert_major}) {
      World world(seat.size(), shape, kSeed);
      const OnGpu mine(world.ranks[self], shape, seat.device, seat.copier);
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
        LatencyDispatchOptions options;
        options.order = RowOrder::rank_major;
        options.stream = &own.stream;
        options.hook = order == RowOrder::expert_major;
        received = latency.dispatch(mine.x_view(), mine.routes_view(), options);
        if (options.hook) received.receive();
        LatencyCombineOptions back;
        back.stream = &own.stream;
        back.hook = options.hook;
        combined = latency.combine(received.x, received, back);
        if (back.hook) combined.receive();
      });
      for (std::uint64_t i = 0; i < 4; ++i) {
        world = World(seat.size(), shape, kSeed + 1 + i);
        mine.fill(world.ranks[self], seat.copier);
        seat.meet();
        graph.run();
        check_ranked_rows(world, seat.rank(), received, seat.copier);
        check_ranked_sums(world, seat.rank(), combined.x, seat.copier);
      }
      seat.meet();
    }
  });
}

/// Ranks whose rows cross in different formats hear it, each from the other, before the deadline.
TEST_P(EngineTest, LatencyFormatsOfSomeRanksAreAMismatch) {
  const Shape shape;
  GroupConfig config = config_for(shape);
  config.deadline = 3s;
  on_ranks(GetParam().ranks, GetParam().threads, config, [&](Seat& seat) {
    const World world(seat.size(), shape, kSeed + 20);
    const OnGpu mine(world.ranks[static_cast<std::size_t>(seat.rank())], shape, seat.device,
                     seat.copier);
    LatencyExchange latency(seat.group, latency_config(shape));
    seat.meet();
    const LatencyReceived received = latency_dispatch(latency, mine, {});
    LatencyCombineOptions options;
    options.format = seat.rank() == 1 ? CombineFormat::e4m3 : CombineFormat::logfmt10;
    std::optional<ErrorKind> kind;
    std::string what = "it went on";
    try {
      (void)latency.combine(received.x, received, mine.weights_view(), options);
    } catch (const Error& error) {
      kind = error.kind();
      what = error.what();
    }
    seat.meet();  // who waits for nobody would leave while others still find out
    // A rank without tokens waits for nobody's rows.
    const bool waits = world.ranks[static_cast<std::size_t>(seat.rank())].tokens > 0;
    need(kind == ErrorKind::mismatch || kind == ErrorKind::peer_failed || (!waits && !kind), what);
    if (waits && seat.size() == 2) need(kind == ErrorKind::mismatch, what);
  });
}

/// A result that was kept while a graph made several dispatches may be read, but its sums would lie
/// where those of the graph do.
TEST_P(EngineTest, LatencyResultsKeptTooLongAreRefused) {
  const Shape shape;
  each(shape, [&](Seat& seat) {
    const auto self = static_cast<std::size_t>(seat.rank());
    const World world(seat.size(), shape, kSeed + 30);
    const OnGpu mine(world.ranks[self], shape, seat.device, seat.copier);
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
      std::optional<ErrorKind> kind;
      try {
        const LatencyCombined combined = latency_combine(latency, mine, kept, trip);
        await_latency(combined.event, trip);
        check_latency_sums(world, seat.rank(), trip.path, combined.x, seat.copier);
      } catch (const Error& error) {
        kind = error.kind();
      }
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
    const auto self = static_cast<std::size_t>(seat.rank());
    const World world(seat.size(), shape, kSeed + 50), later(seat.size(), shape, kSeed + 51);
    const LatencyTrip trip{CombinePath::per_rank, false, false, nullptr, {}};
    for (const bool masks : {false, true}) {
      const OnGpu mine(world.ranks[self], shape, seat.device, seat.copier);
      LatencyExchange latency(seat.group, latency_config(shape, masks));
      seat.meet();
      LatencyDispatchOptions hook;
      hook.hook = true;
      (void)latency.dispatch(mine.x_view(), mine.routes_view(), hook);
      (void)latency_dispatch(latency, mine, trip);
      const LatencyReceived kept = latency_dispatch(latency, mine, trip);
      if (masks) latency.rejoin();
      mine.fill(later.ranks[self], seat.copier);
      const LatencyReceived other = latency_dispatch(latency, mine, trip);
      std::optional<ErrorKind> kind;
      try {
        (void)latency_dispatch(latency, mine, trip);
      } catch (const Error& error) {
        kind = error.kind();
      }
      need(kind == ErrorKind::exhausted, "a third result was made");
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
  GroupConfig config = config_for(shape);
  config.deadline = 2s;
  on_ranks(GetParam().ranks, GetParam().threads, config, [&](Seat& seat) {
    const World world(seat.size(), shape, kSeed + 40);
    const OnGpu mine(world.ranks[static_cast<std::size_t>(seat.rank())], shape, seat.device,
                     seat.copier);
    LatencyExchange latency(seat.group, latency_config(shape, true));
    seat.meet();
    const LatencyTrip trip{CombinePath::per_rank, false, false, nullptr, {}};
    latency_trip(latency, world, seat.rank(), mine, trip, seat.copier);
    const LatencyReceived received = latency_dispatch(latency, mine, trip);
    seat.meet();
    if (seat.rank() != 1) {
      const LatencyCombined combined = latency_combine(latency, mine, received, trip);
      check_latency_sums(world, seat.rank(), trip.path, combined.x, seat.copier, {1});
      const std::vector<bool> masked = latency.masked();
      for (std::size_t r = 0; r < masked.size(); ++r) {
        need(masked[r] == (r == 1), "mask of rank " + std::to_string(r));
      }
    }
    seat.meet();
    latency.rejoin();
    latency_trip(latency, world, seat.rank(), mine, trip, seat.copier);
    seat.meet();
  });
}

}  // namespace
}  // namespace ferry::test
