// Latency mode on the host engine.
#include <cstring>
#include <utility>
#include <vector>

#include "bench/latency_check.hpp"
#include "bench/memory.hpp"
#include "bench/rank.hpp"
#include "ferry/latency.hpp"

namespace ferry::cli {
namespace {

struct LatencyBench {
  const BenchSettings& settings;
  Group& group;
  LatencyExchange latency;
  RowPattern pattern;
  std::vector<std::int64_t> routes{};
  std::vector<std::byte> tokens{};
  std::vector<float> weights{};
  Tensor rows{};  // what the experts made: with e4m3 only, else they work in place

  LatencyBench(const BenchSettings& s, Group& g)
      : settings(s),
        group(g),
        latency(g, latency_config(s)),
        pattern(s.seed, s.hidden, s.combine_dtype()),
        routes(make_routes(s, s.latency_tokens, g.rank())),
        tokens(static_cast<std::size_t>(s.latency_tokens) * pattern.row_bytes()),
        weights(routes.size(), 1.0f) {
    pattern.fill(tokens.data(), g.rank(), s.latency_tokens);
    if (s.dtype == Dtype::e4m3) {
      rows = g.empty({g.local_experts(), s.ranks * s.latency_tokens, s.hidden}, s.combine_dtype());
    }
  }
  LatencyReceived dispatch(bool hook = false) {
    LatencyDispatchOptions options;
    if (settings.dtype == Dtype::e4m3) options.format = WireFormat::e4m3;
    const Extents shape{settings.latency_tokens, settings.topk};
    options.topk_weights = ConstTensorView(weights.data(), Dtype::f32, shape);
    options.hook = hook;
    return latency.dispatch(
        {tokens.data(), settings.combine_dtype(), {settings.latency_tokens, settings.hidden}},
        {routes.data(), Dtype::i64, shape}, options);
  }
  LatencyCombined combine(const LatencyReceived& received, CombinePath path, bool hook = false) {
    LatencyCombineOptions options;
    options.path = path;
    options.hook = hook;
    return latency.combine(rows ? rows : received.x, received, options);
  }
};

// Checks every row, and fills `rows` as experts would that change nothing.
void check_dispatch(const LatencyBench& e, const LatencyReceived& received) {
  const LatencyArrival arrival{received.x.as<std::byte>(),
                               e.rows ? received.scales.as<float>() : nullptr,
                               received.ranges.as<std::int64_t>(),
                               received.source_token.as<std::int32_t>(), e.group.local_experts()};
  check_arrival(e.settings, arrival, e.pattern);
  if (!e.rows) return;
  for_each_row(e.settings, arrival, [&](std::int64_t row, int source, std::int64_t token) {
    std::memcpy(e.rows.as<std::byte>() + static_cast<std::size_t>(row) * e.pattern.row_bytes(),
                e.pattern.row(source, token), e.pattern.row_bytes());
  });
}

/// One sample of everything; ranks begin each part together.
class Sample {
 public:
  Sample(LatencyBench& e, const BenchBoard& board, int iteration)
      : e_(e), board_(board), iteration_(iteration) {}

  void take() {
    for (const bool slots : {true, false}) {
      const CombinePath path = slots ? CombinePath::per_slot : CombinePath::per_rank;
      LatencyReceived received;
      LatencyCombined combined;
      const auto combine_case =
          slots ? BenchCase::latency_combine_slots : BenchCase::latency_combine_ranks;
      const double us = time([&] { received = e_.dispatch(); });
      if (slots) note(BenchCase::latency_dispatch, us);
      note(combine_case, time([&] { combined = e_.combine(received, path); }));
    }
    halves();
    for (const bool slots : {true, false}) {
      const CombinePath path = slots ? CombinePath::per_slot : CombinePath::per_rank;
      const double us = time([&] {
        for (int i = 0; i < e_.settings.chain; ++i) {
          const LatencyReceived received = e_.dispatch();
          (void)e_.combine(received, path);
        }
      });
      note(slots ? BenchCase::latency_pair_slots : BenchCase::latency_pair_ranks,
           us / e_.settings.chain);
    }
    if (e_.group.rank() == 0) board_.report(0);
  }

 private:
  void halves() {
    LatencyReceived received;
    LatencyCombined combined;
    note(BenchCase::latency_dispatch_send, time([&] { received = e_.dispatch(true); }));
    note(BenchCase::latency_dispatch_receive, time([&] { received.receive(); }));
    note(BenchCase::latency_combine_send,
         time([&] { combined = e_.combine(received, CombinePath::per_rank, true); }));
    note(BenchCase::latency_combine_receive, time([&] { combined.receive(); }));
  }
  template <class Calls>
  double time(const Calls& calls) {
    e_.group.barrier();
    return time_of([&] {
      calls();
      return 0;
    });
  }
  void note(BenchCase which, double us) const {
    if (iteration_ >= 0) board_.sample(board_.line_of(which), e_.group.rank(), iteration_) = us;
  }

  LatencyBench& e_;
  const BenchBoard& board_;
  int iteration_;
};

}  // namespace

LatencyConfig latency_config(const BenchSettings& s) {
  LatencyConfig config;
  config.capacity = s.latency_tokens;
  config.hidden = s.hidden;
  config.topk = s.topk;
  config.dtype = s.combine_dtype();
  return config;
}

void bench_latency(const BenchSettings& settings, const BenchBoard& board,
                   std::shared_ptr<Bootstrap> bootstrap) {
  GroupConfig config = group_config(settings);
  config.memory_bytes = latency_memory(settings);
  Group group(std::move(bootstrap), config);
  LatencyBench exchange(settings, group);
  board.rows(0, group.rank()) =
      count_rows(settings, exchange.routes, settings.latency_tokens, group.rank());
  for (const CombinePath path : {CombinePath::per_slot, CombinePath::per_rank}) {
    const LatencyReceived received = exchange.dispatch();
    check_dispatch(exchange, received);
    check_latency_sums(settings, exchange.combine(received, path).x.as<std::byte>(), group.rank());
  }
  for (int i = -settings.warmup; i < settings.iterations; ++i) Sample(exchange, board, i).take();
  group.barrier();  // nobody leaves while another still reads
}

}  // namespace ferry::cli
