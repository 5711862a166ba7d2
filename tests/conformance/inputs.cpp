#include "inputs.hpp"

#include <algorithm>
#include <cmath>
#include <cstring>
#include <limits>

#include "random.hpp"

namespace ferry::conformance {
namespace {

/// Sign, an exponent from 2^-5 to 2^4, 23 bits of mantissa.
float plain_value(std::uint32_t bits) {
  const std::uint32_t exponent = 122 + (bits >> 23) % 10;
  const std::uint32_t word = (bits & 0x807fffffu) | exponent << 23;
  float value;
  std::memcpy(&value, &word, 4);
  return value;
}

float special_value(std::int64_t which) {
  using Limits = std::numeric_limits<float>;
  switch (which) {
    case 0: return -0.0f;
    case 1: return Limits::infinity();
    case 2: return -Limits::infinity();
    case 3: return Limits::quiet_NaN();
    case 4: return Limits::denorm_min() * 12345;
    case 5: return -Limits::denorm_min();
    case 6: return Limits::max();
    case 7: return 65504.0f;  // the largest f16
    case 8: return 6e-8f;     // a subnormal f16
    case 9: return -3e38f;
    default: return 0.0f;
  }
}

std::int64_t tokens_of(const Case& c, int rank) {
  Random random(mix(c.seed, 11, static_cast<std::uint64_t>(rank)));
  switch (c.routes) {
    case RouteKind::zero: return 0;
    case RouteKind::some_empty:
      // The same ranks on every rank; which ones changes with the seed.
      return (static_cast<std::uint64_t>(rank) + c.seed) % 2 == 0 ? 0 : c.tokens;
    case RouteKind::uneven: return random.below(2 * c.tokens + 1);
    default: return c.tokens;
  }
}

/// One id by Zipf's law with exponent 1 over the experts.
std::int64_t zipf(Random& random, std::int64_t experts) {
  double total = 0;
  for (std::int64_t e = 1; e <= experts; ++e) total += 1.0 / static_cast<double>(e);
  double left = total * static_cast<double>(random.below(1 << 20)) / (1 << 20);
  for (std::int64_t e = 0; e < experts; ++e) {
    left -= 1.0 / static_cast<double>(e + 1);
    if (left < 0) return e;
  }
  return experts - 1;
}

struct Range {
  std::int64_t first, count;
};

/// The experts of one rank that has any.
Range one_rank(const Case& c) {
  World world;
  world.ranks = c.ranks;
  world.experts = c.experts();
  Random random(mix(c.seed, 12));
  const auto holders = std::min<std::int64_t>(c.ranks, world.experts);
  const auto rank = static_cast<int>(random.below(holders));
  return {world.first_expert(rank), world.local_experts(rank)};
}

std::int64_t draw(const Case& c, Random& random, const std::int64_t* before, int k) {
  const std::int64_t experts = c.experts();
  switch (c.routes) {
    case RouteKind::zipf: return zipf(random, experts);
    case RouteKind::one_rank: {
      const Range range = one_rank(c);
      return range.first + random.below(range.count);
    }
    case RouteKind::holes: return random.below(5) < 2 ? -1 : random.below(experts);
    case RouteKind::duplicates:
      return k > 0 && random.one_in(2) ? before[random.below(k)] : random.below(experts);
    default: break;
  }
  // Without repeats as long as there are experts left.
  std::int64_t id = random.below(experts);
  for (int tries = 0; tries < 40 && k < experts && std::find(before, before + k, id) != before + k;
       ++tries) {
    id = random.below(experts);
  }
  return id;
}

}  // namespace

void fill_row(std::uint64_t seed, Dtype dtype, bool special, std::int64_t columns, std::byte* out) {
  Random random(seed);
  if (dtype != Dtype::f32 && dtype != Dtype::bf16 && dtype != Dtype::f16) {
    const auto bytes = static_cast<std::size_t>(columns) * size_of(dtype);
    for (std::size_t i = 0; i < bytes; i += 8) {
      const std::uint64_t word = random.next();
      std::memcpy(out + i, &word, std::min<std::size_t>(8, bytes - i));
    }
    return;
  }
  for (std::int64_t i = 0; i < columns; i += 2) {
    const std::uint64_t word = random.next();
    store(out, dtype, i, plain_value(static_cast<std::uint32_t>(word)));
    if (i + 1 < columns)
      store(out, dtype, i + 1, plain_value(static_cast<std::uint32_t>(word >> 32)));
  }
  if (!special) return;
  for (std::int64_t n = random.below(1 + std::max<std::int64_t>(1, columns / 12)); n > 0; --n) {
    const float value = special_value(random.below(11));  // compilers order arguments as they like
    store(out, dtype, random.below(columns), value);
  }
}

Bytes make_rows(std::uint64_t seed, Dtype dtype, bool special, std::int64_t rows,
                std::int64_t columns) {
  const std::size_t row_bytes = static_cast<std::size_t>(columns) * size_of(dtype);
  Bytes bytes(static_cast<std::size_t>(rows) * row_bytes);
  for (std::int64_t r = 0; r < rows; ++r) {
    fill_row(mix(seed, static_cast<std::uint64_t>(r)), dtype, special, columns,
             bytes.data() + static_cast<std::size_t>(r) * row_bytes);
  }
  return bytes;
}

float make_weight(std::uint64_t seed) {
  Random random(seed);
  if (random.one_in(9)) return random.one_in(2) ? 0.0f : -0.0f;
  return static_cast<float>(random.below(1 << 24) - (1 << 23)) * 0x1p-22f;
}

std::vector<std::int64_t> make_routes(const Case& c, int rank, std::int64_t tokens,
                                      std::int64_t limit) {
  Random random(mix(c.seed, 13, static_cast<std::uint64_t>(rank)));
  std::vector<std::int64_t> used(static_cast<std::size_t>(c.experts()), 0);
  std::vector<std::int64_t> routes(static_cast<std::size_t>(tokens * c.topk));
  for (std::int64_t t = 0; t < tokens; ++t) {
    std::int64_t* route = routes.data() + t * c.topk;
    const bool nowhere = c.routes == RouteKind::holes && random.one_in(4);
    for (int k = 0; k < c.topk; ++k) {
      route[k] = nowhere ? -1 : draw(c, random, route, k);
      if (route[k] < 0) continue;
      auto& count = used[static_cast<std::size_t>(route[k])];
      if (limit > 0 && count >= limit)
        route[k] = -1;
      else
        ++count;
    }
  }
  return routes;
}

World make_world(const Case& c, std::uint64_t round) {
  World world;
  world.ranks = c.ranks;
  world.experts = c.experts();
  world.topk = c.topk;
  world.hidden = c.hidden;
  world.dtype = c.dtype;
  world.scale_columns = c.dtype == Dtype::e4m3 ? (c.hidden + 127) / 128 : 0;
  for (int rank = 0; rank < c.ranks; ++rank) {
    const auto r = static_cast<std::uint64_t>(rank);
    RankInput input;
    input.tokens = tokens_of(c, rank);
    input.topk_idx = make_routes(c, rank, input.tokens, c.mode == Mode::latency ? c.capacity : 0);
    input.x =
        make_rows(mix(c.seed, 14, r, round), c.dtype, c.special_values, input.tokens, c.hidden);
    for (std::int64_t i = 0; i < input.tokens * world.scale_columns; ++i) {
      input.scales.push_back(
          std::fabs(make_weight(mix(c.seed, 15 + round, r, static_cast<std::uint64_t>(i)))));
    }
    for (std::int64_t i = 0; i < input.tokens * c.topk; ++i) {
      input.weights.push_back(
          make_weight(mix(c.seed, 1016 + round, r, static_cast<std::uint64_t>(i))));
    }
    world.inputs.push_back(std::move(input));
  }
  return world;
}

}  // namespace ferry::conformance
