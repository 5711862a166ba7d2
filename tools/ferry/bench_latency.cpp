#include <fmt/format.h>

#include <cmath>
#include <cstring>
#include <stdexcept>
#include <utility>
#include <vector>

#include "bench_clock.hpp"
#include "bench_data.hpp"
#include "bench_rank.hpp"
#include "ferry/latency.hpp"

namespace ferry::cli {
namespace {

constexpr std::size_t kSlack = std::size_t{16} << 20;

// With e4m3 the tokens are bf16 and are quantised in flight.
LatencyConfig latency_config(const BenchSettings& s) {
  LatencyConfig config;
  config.capacity = s.latency_tokens;
  config.hidden = s.hidden;
  config.topk = s.topk;
  config.dtype = s.combine_dtype();
  return config;
}

struct Exchange {
  const BenchSettings& settings;
  Group& group;
  LatencyExchange latency;
  RowPattern pattern;
  std::vector<std::int64_t> routes{};
  std::vector<std::byte> tokens{};
  std::vector<float> weights{};
  Tensor rows{};  // what the experts made: with e4m3 only, else they work in place

  Exchange(const BenchSettings& s, Group& g)
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
  LatencyReceived dispatch() {
    LatencyDispatchOptions options;
    if (settings.dtype == Dtype::e4m3) options.format = WireFormat::e4m3;
    return latency.dispatch(
        {tokens.data(), settings.combine_dtype(), {settings.latency_tokens, settings.hidden}},
        {routes.data(), Dtype::i64, {settings.latency_tokens, settings.topk}}, options);
  }
  LatencyCombined combine(const LatencyReceived& received) {
    return latency.combine(rows ? rows : received.x, received,
                           {weights.data(), Dtype::f32, {settings.latency_tokens, settings.topk}});
  }
};

// One element that was quantised: three mantissa bits of the largest of its block.
bool close_to(float got, int expected) {
  return std::fabs(got - static_cast<float>(expected)) <=
         std::fabs(static_cast<float>(expected)) / 16 + 1e-6f;
}

// Calls visit(row of x, source rank, token) for every row that arrived, in order.
template <class Visit>
void for_each_row(const Exchange& e, const LatencyReceived& received, const Visit& visit) {
  const std::int64_t experts = e.group.local_experts();
  const std::int64_t stride = e.settings.ranks * e.settings.latency_tokens;
  for (std::int64_t expert = 0; expert < experts; ++expert) {
    for (int source = 0; source < e.settings.ranks; ++source) {
      const std::int64_t range =
          received.ranges.as<std::int64_t>()[expert * e.settings.ranks + source];
      const std::int64_t first = range >> 32;
      const std::int64_t count = range & 0xffffffff;
      for (std::int64_t row = expert * stride + first; row < expert * stride + first + count;
           ++row) {
        visit(row, source, received.source_token.as<std::int32_t>()[row]);
      }
    }
  }
}

bool quantised_row_is(const Exchange& e, const LatencyReceived& received, std::int64_t row,
                      int source, std::int64_t token) {
  const TensorView& scales = received.scales.view();
  const std::int64_t stride = e.settings.ranks * e.settings.latency_tokens;
  const auto* codes = received.x.as<std::uint8_t>() + row * e.settings.hidden;
  for (std::int64_t c = 0; c < e.settings.hidden; ++c) {
    const std::int64_t at = row / stride * scales.strides[0] + row % stride * scales.strides[1] +
                            c / 128 * scales.strides[2];
    const float value = decode_e4m3(codes[c]) * static_cast<const float*>(scales.data)[at];
    if (!close_to(value, e.pattern.value(source, token, c))) return false;
  }
  return true;
}

// Checks every row, and fills `rows` as experts would that change nothing.
void check_dispatch(const Exchange& e, const LatencyReceived& received) {
  for_each_row(e, received, [&](std::int64_t row, int source, std::int64_t token) {
    const std::size_t at = static_cast<std::size_t>(row) * e.pattern.row_bytes();
    const bool right = e.rows ? quantised_row_is(e, received, row, source, token)
                              : e.pattern.matches(received.x.as<std::byte>() + at, source, token);
    if (!right) {
      throw std::runtime_error(
          fmt::format("latency dispatch: row {} is not token {} of rank {}", row, token, source));
    }
    if (e.rows) {
      std::memcpy(e.rows.as<std::byte>() + at, e.pattern.row(source, token), e.pattern.row_bytes());
    }
  });
}

// Every token comes back once for each slot, with weight 1.
void check_combine(const Exchange& e, const LatencyCombined& combined) {
  const BenchSettings& s = e.settings;
  const RowPattern expected(s.seed, s.hidden, s.combine_dtype(), s.topk);
  for (std::int64_t t = 0; t < s.latency_tokens; ++t) {
    const std::size_t at = static_cast<std::size_t>(t) * expected.row_bytes();
    if (!expected.matches(combined.x.as<std::byte>() + at, e.group.rank(), t)) {
      throw std::runtime_error(
          fmt::format("latency combine: token {} is not the sum of its {} rows", t, s.topk));
    }
  }
}

void step(Exchange& e, const BenchBoard& board, int iteration) {
  LatencyReceived received;
  LatencyCombined combined;
  const int rank = e.group.rank();
  e.group.barrier();
  const double dispatch_ns = time_of([&] {
    received = e.dispatch();
    return 0;
  });
  e.group.barrier();
  const double combine_ns = time_of([&] {
    combined = e.combine(received);
    return 0;
  });
  if (iteration >= 0) {
    board.sample(BenchCase::latency_dispatch, rank, iteration) = dispatch_ns;
    board.sample(BenchCase::latency_combine, rank, iteration) = combine_ns;
  }
  if (rank == 0) board.report(BenchCase::latency_dispatch);
}

}  // namespace

void bench_latency(const BenchSettings& settings, const BenchBoard& board,
                   std::shared_ptr<Bootstrap> bootstrap) {
  GroupConfig config = group_config(settings);
  const auto most_rows = static_cast<std::size_t>((settings.experts / settings.ranks + 1) *
                                                  settings.ranks * settings.latency_tokens);
  config.memory_bytes =
      kSlack + (settings.dtype == Dtype::e4m3 ? most_rows * settings.combine_row_bytes() : 0);
  Group group(std::move(bootstrap), config);
  Exchange exchange(settings, group);
  board.rows(true, group.rank()) =
      count_rows(settings, exchange.routes, settings.latency_tokens, group.rank());
  {
    const LatencyReceived received = exchange.dispatch();
    check_dispatch(exchange, received);
    check_combine(exchange, exchange.combine(received));
  }
  for (int i = -settings.warmup; i < settings.iterations; ++i) step(exchange, board, i);
  group.barrier();  // nobody leaves while another still reads
}

}  // namespace ferry::cli
