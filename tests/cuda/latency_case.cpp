#include "latency_case.hpp"

#include <algorithm>
#include <cmath>

namespace ferry::cuda::test {

namespace {

/// A value of about ±`scale`, or now and then something special.
float number_of(Random& random, float scale) {
  const std::int64_t kind = random.below(400);
  if (kind == 0) return 0.0f;
  if (kind == 1) return -0.0f;
  if (kind == 2) return scale * 1e-6f;
  return scale * (static_cast<float>(random.below(20001)) - 10000.0f) / 10000.0f;
}

std::vector<std::byte> random_rows(Random& random, Dtype dtype, std::int64_t count) {
  std::vector<std::byte> bytes(static_cast<std::size_t>(count) * size_of(dtype));
  float scale = 2.0f;
  for (std::int64_t i = 0; i < count; ++i) {
    if (i % 128 == 0) scale = std::ldexp(1.0f, static_cast<int>(random.below(12)) - 6);
    conformance::store(bytes.data(), dtype, i, number_of(random, scale));
  }
  return bytes;
}

}  // namespace

std::string describe(const LatencyCase& c) {
  return "ranks " + std::to_string(c.ranks) + ", topk " + std::to_string(c.call_topk) + " of " +
         std::to_string(c.topk) + ", experts " + std::to_string(c.experts) + ", hidden " +
         std::to_string(c.hidden) + ", capacity " + std::to_string(c.capacity) + ", " +
         std::string(name_of(c.dtype)) + ", format " + std::to_string(static_cast<int>(c.format)) +
         ", routes " + std::to_string(static_cast<int>(c.routes)) + ", blocks " +
         std::to_string(c.blocks) + ", parts " + std::to_string(c.parts) + ", ll " +
         std::to_string(c.ll) + ", ll128 " + std::to_string(c.ll128) + ", weights " +
         std::to_string(c.weights_with_dispatch);
}

std::vector<std::byte> LatencyWorld::result_row(int rank, std::int64_t expert,
                                                std::int64_t place) const {
  Random random(seed * 977 + static_cast<std::uint64_t>(rank) * 1000003 +
                static_cast<std::uint64_t>(expert) * 131071 + static_cast<std::uint64_t>(place));
  return random_rows(random, dtype, hidden);
}

LatencyWorld make_latency_world(const LatencyCase& c, std::uint64_t seed,
                                const std::vector<std::int64_t>& tokens) {
  LatencyWorld world;
  world.c = c;
  world.seed = seed;
  world.ranks = c.ranks;
  world.experts = c.experts;
  world.topk = c.call_topk;
  world.hidden = c.hidden;
  world.dtype = c.dtype;
  Random random(seed);
  for (int r = 0; r < c.ranks; ++r) {
    conformance::RankInput input;
    const std::int64_t kind = random.below(6);
    input.tokens = kind == 0 ? 0 : kind == 1 ? c.capacity : random.below(c.capacity + 1);
    if (!tokens.empty()) input.tokens = tokens[static_cast<std::size_t>(r)];
    const std::int64_t busy = random.below(c.experts);
    std::vector<std::int64_t> used(static_cast<std::size_t>(c.experts), 0);
    for (std::int64_t t = 0; t < input.tokens; ++t) {
      std::vector<std::int64_t> mine;
      for (int k = 0; k < c.call_topk; ++k) {
        std::int64_t id = random.below(c.experts);
        if (c.routes == Routes::one_expert && k == 0) id = busy;
        if (c.routes == Routes::nothing) id = -1;
        if (c.routes == Routes::holes && random.below(2) == 0) id = -1;
        const bool again = std::find(mine.begin(), mine.end(), id) != mine.end();
        if (id >= 0 && again && c.routes != Routes::duplicates) id = -1;
        if (id >= 0 && ++used[static_cast<std::size_t>(id)] > c.capacity) id = -1;
        mine.push_back(id);
        input.weights.push_back(number_of(random, 1.0f));
      }
      input.topk_idx.insert(input.topk_idx.end(), mine.begin(), mine.end());
    }
    input.x = random_rows(random, c.dtype, input.tokens * c.hidden);
    world.inputs.push_back(std::move(input));
  }
  return world;
}

LatencyCase small_latency_case() {
  LatencyCase c;
  c.ranks = 3;
  c.topk = c.call_topk = 3;
  c.experts = 6;
  c.hidden = 2080;
  c.capacity = 20;
  c.format = LatencyFormat::e4m3;
  c.blocks = 4;
  return c;
}

void expect(const char* what, bool good, const std::string& detail) {
  if (!good) stop(std::string(what) + " " + detail);
}

}  // namespace ferry::cuda::test
