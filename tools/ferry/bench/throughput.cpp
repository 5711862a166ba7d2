#include <fmt/format.h>

#include <algorithm>
#include <cstring>
#include <map>
#include <stdexcept>
#include <string>
#include <utility>
#include <vector>

#include "bench/data.hpp"
#include "bench/memory.hpp"
#include "bench/rank.hpp"
#include "bench/tuning.hpp"

namespace ferry::cli {
namespace {

struct ThroughputBench {
  const BenchSettings& settings;
  Group& group;
  std::vector<std::int64_t> routes{};
  std::vector<std::byte> tokens{};
  std::vector<float> scales{};

  ThroughputBench(const BenchSettings& s, Group& g)
      : settings(s),
        group(g),
        routes(make_routes(s, s.tokens, g.rank())),
        tokens(static_cast<std::size_t>(s.tokens * s.hidden) * size_of(s.dtype)),
        scales(static_cast<std::size_t>(s.tokens * s.scales()), 1.0f) {
    RowPattern(s.seed, s.hidden, s.dtype).fill(tokens.data(), g.rank(), s.tokens);
  }
  Plan plan() const {
    return group.plan({routes.data(), Dtype::i64, {settings.tokens, settings.topk}});
  }
  Received dispatch(const Plan& with) const {
    DispatchOptions options;
    if (!scales.empty()) {
      options.scales =
          ConstTensorView(scales.data(), Dtype::f32, {settings.tokens, settings.scales()});
    }
    return group.dispatch({tokens.data(), settings.dtype, {settings.tokens, settings.hidden}}, with,
                          options);
  }
};

void check_dispatch(const BenchSettings& s, const Plan& plan, const Received& received) {
  const RowPattern expected(s.seed, s.hidden, s.dtype);
  const std::vector<std::int64_t> rows_per_rank = plan.recv_rows_per_rank();
  std::int64_t row = 0;
  for (int source = 0; source < s.ranks; ++source) {
    const std::int64_t end = row + rows_per_rank[static_cast<std::size_t>(source)];
    for (; row < end; ++row) {
      const std::int64_t token = received.source_token.as<std::int32_t>()[row];
      const std::byte* data =
          received.x.as<std::byte>() + static_cast<std::size_t>(row) * expected.row_bytes();
      if (!expected.matches(data, source, token)) {
        throw std::runtime_error(
            fmt::format("dispatch: row {} is not token {} of rank {}", row, token, source));
      }
    }
  }
  if (row != received.x.rows()) {
    throw std::runtime_error(
        fmt::format("dispatch: got {} rows, expected {}", received.x.rows(), row));
  }
}

// Fills `rows` as experts would that change nothing.
void fill_rows(const BenchSettings& s, const Plan& plan, const Received& received, void* rows) {
  const RowPattern pattern(s.seed, s.hidden, s.combine_dtype());
  const std::vector<std::int64_t> rows_per_rank = plan.recv_rows_per_rank();
  auto* at = static_cast<std::byte*>(rows);
  std::int64_t row = 0;
  for (int source = 0; source < s.ranks; ++source) {
    const std::int64_t end = row + rows_per_rank[static_cast<std::size_t>(source)];
    for (; row < end; ++row, at += pattern.row_bytes()) {
      const std::int64_t token = received.source_token.as<std::int32_t>()[row];
      std::memcpy(at, pattern.row(source, token), pattern.row_bytes());
    }
  }
}

// Every token comes back as often as it has destinations.
void check_combine(const ThroughputBench& e, const Combined& combined) {
  const BenchSettings& s = e.settings;
  std::vector<RowPattern> times;
  for (int n = 0; n <= std::min(s.ranks, s.topk); ++n) {
    times.emplace_back(s.seed, s.hidden, s.combine_dtype(), n);
  }
  for (std::int64_t t = 0; t < s.tokens; ++t) {
    const std::size_t count = destinations(s, e.routes, t).size();
    const std::byte* data =
        combined.x.as<std::byte>() + static_cast<std::size_t>(t) * times[0].row_bytes();
    if (!times[count].matches(data, e.group.rank(), t)) {
      throw std::runtime_error(
          fmt::format("combine: token {} is not the sum of the {} rows that it was", t, count));
    }
  }
}

/// Collective: until no search goes on, of what the operation calls.
template <class Operation>
void tune(Group& group, const Operation& operation) {
  constexpr int kMostCalls = 100;
  const auto settled = [&] {  // the same on all ranks
    const std::vector<TunedCall> calls = group.tuning();
    return std::all_of(calls.begin(), calls.end(), [](const auto& one) { return one.settled; });
  };
  for (int call = 0; call < kMostCalls && (call == 0 || !settled()); ++call) operation();
}

/// Collective: warm-up, then one sample an iteration, every one after a barrier.
template <class Operation>
void measure(const BenchSettings& settings, const BenchBoard& board, BenchCase which, Group& group,
             const Operation& operation) {
  const std::size_t line = board.line_of(which);
  if (!settings.tune.empty()) tune(group, operation);
  for (int i = -settings.warmup; i < settings.iterations; ++i) {
    group.barrier();
    const double taken = time_of(operation);
    if (i >= 0) board.sample(line, group.rank(), i) = taken;
    if (group.rank() == 0) board.report(line);
  }
}

void measure_all(const ThroughputBench& e, const BenchBoard& board, const Plan& plan,
                 const Tensor& registered, const ConstTensorView& ordinary) {
  const BenchSettings& s = e.settings;
  measure(s, board, BenchCase::plan, e.group, [&] { return e.plan(); });
  measure(s, board, BenchCase::dispatch_full, e.group, [&] {
    Plan fresh = e.plan();
    Received received = e.dispatch(fresh);
    return std::pair(std::move(fresh), std::move(received));
  });
  measure(s, board, BenchCase::dispatch_cached, e.group, [&] { return e.dispatch(plan); });
  measure(s, board, BenchCase::combine_registered, e.group,
          [&] { return e.group.combine(registered, plan); });
  measure(s, board, BenchCase::combine_ordinary, e.group,
          [&] { return e.group.combine(ordinary, plan); });
}

GroupConfig throughput_config(const BenchSettings& settings) {
  GroupConfig config = group_config(settings);
  config.memory_bytes = throughput_memory(settings);
  return config;
}

/// Collective: what calls take with each setting, one after another, again and again.
std::vector<SettingTimes> times_of_settings(const BenchSettings& s,
                                            const std::shared_ptr<Bootstrap>& bootstrap) {
  constexpr int kCalls = 10;  // of which the tuner's clock takes the middle one of nine
  std::vector<SettingTimes> times;
  for (int round = 0; round < s.oracle; ++round) {
    for (std::int64_t chunk_bytes = 64 << 10; chunk_bytes <= 1 << 20; chunk_bytes *= 2) {
      for (const Crossing crossing : {Crossing::direct, Crossing::hierarchical}) {
        GroupConfig config = throughput_config(s);
        config.tuning = kept_settings(s.dtype, s.combine_dtype(), crossing, chunk_bytes);
        Group group(bootstrap, config);
        const ThroughputBench exchange(s, group);
        const Plan plan = exchange.plan();
        const Tensor rows = group.empty({plan.recv_rows(), s.hidden}, s.combine_dtype());
        std::map<std::string, std::vector<double>> calls_us;
        const auto repeat = [&](const std::string& name, const auto& operation) {
          for (int call = 0; call <= kCalls; ++call) {
            const double took = time_of([&] {
              operation();
              group.barrier();  // the slowest rank's
              return 0;
            });
            if (call > 0) calls_us[name].push_back(took);
          }
        };
        repeat("dispatch", [&] { exchange.dispatch(plan); });
        repeat("combine", [&] { group.combine(rows, plan); });
        add_times(times, group.tuning(), calls_us);
        group.barrier();
      }
    }
  }
  return times;
}

}  // namespace

void bench_throughput(const BenchSettings& settings, const BenchBoard& board,
                      std::shared_ptr<Bootstrap> bootstrap) {
  Group group(bootstrap, throughput_config(settings));

  const ThroughputBench exchange(settings, group);
  board.rows(0, group.rank()) =
      count_rows(settings, exchange.routes, settings.tokens, group.rank());
  const Plan plan = exchange.plan();
  const Extents shape = {plan.recv_rows(), settings.hidden};
  const Tensor registered = group.empty(shape, settings.combine_dtype());
  {
    const Received received = exchange.dispatch(plan);
    check_dispatch(settings, plan, received);
    fill_rows(settings, plan, received, registered.data());
  }
  std::vector<std::byte> ordinary(registered.view().bytes());
  if (!ordinary.empty()) std::memcpy(ordinary.data(), registered.data(), ordinary.size());
  const ConstTensorView ordinary_view(ordinary.data(), settings.combine_dtype(), shape);
  check_combine(exchange, group.combine(registered, plan));
  check_combine(exchange, group.combine(ordinary_view, plan));

  measure_all(exchange, board, plan, registered, ordinary_view);
  if (!settings.tune.empty()) {
    const std::vector<SettingTimes> times = times_of_settings(settings, bootstrap);
    if (group.rank() == 0) write_tuning(settings.tune, group.tuning(), times);
  }
  group.barrier();  // nobody leaves while another still reads
}

}  // namespace ferry::cli
