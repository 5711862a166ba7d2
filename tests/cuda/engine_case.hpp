// What every rank sends in the engine's tests, known to all ranks by a seed, and what must arrive.
#pragma once
#include <algorithm>
#include <cmath>
#include <cstdint>
#include <ferry/ferry.hpp>
#include <string>
#include <utility>
#include <vector>

#include "core/number/formats.hpp"
#include "core/placement.hpp"
#include "gpu_buffer.hpp"

namespace ferry::test {

struct Shape {
  std::int64_t tokens = 37;  ///< of rank 0; the others have fewer, the last of several none
  std::int64_t hidden = 256;
  int topk = 4;
  std::int64_t experts = 12;
  Dtype dtype = Dtype::f32;  ///< of tokens; of latency mode's also bf16
};

inline float rounded(Dtype dtype, float value) {
  return dtype == Dtype::bf16 ? to_float(from_float<Bf16>(value)) : value;
}

/// One rank's tokens, routes and weights.
struct Sent {
  std::int64_t tokens = 0;
  std::vector<float> x{};
  std::vector<std::int64_t> routes{};
  std::vector<float> weights{};
};

inline std::uint64_t mix(std::uint64_t value) {
  value += 0x9e3779b97f4a7c15ull;
  value = (value ^ (value >> 30)) * 0xbf58476d1ce4e5b9ull;
  value = (value ^ (value >> 27)) * 0x94d049bb133111ebull;
  return value ^ (value >> 31);
}

inline Sent sent_by(int rank, int ranks, const Shape& shape, std::uint64_t seed) {
  Sent sent;
  std::uint64_t state = mix(seed * 1000 + static_cast<std::uint64_t>(rank));
  const auto next = [&] { return state = mix(state); };
  const auto real = [&] { return static_cast<float>(next() % 20001) / 7000.0f - 1.0f; };
  sent.tokens = ranks > 1 && rank == ranks - 1 ? 0 : shape.tokens - rank;
  for (std::int64_t i = 0; i < sent.tokens * shape.hidden; ++i) {
    sent.x.push_back(rounded(shape.dtype, real()));
  }
  for (std::int64_t i = 0; i < sent.tokens * shape.topk; ++i) {
    const bool unused = next() % 8 == 0;
    sent.routes.push_back(
        unused ? -1
               : static_cast<std::int64_t>(next() % static_cast<std::uint64_t>(shape.experts)));
    sent.weights.push_back(real());
  }
  return sent;
}

/// One received row: who sent it.
struct Arrival {
  int source;
  std::int64_t token;
};

/// All ranks' tokens, and what follows from them.
struct World {
  Shape shape;
  Placement placement;
  std::vector<Sent> ranks{};

  World(int count, const Shape& of, std::uint64_t seed) : shape(of), placement{of.experts, count} {
    for (int r = 0; r < count; ++r) ranks.push_back(sent_by(r, count, of, seed));
  }
  std::int64_t route(int source, std::int64_t token, int k) const {
    return ranks[static_cast<std::size_t>(source)]
        .routes[static_cast<std::size_t>(token * shape.topk + k)];
  }
  float weight(int source, std::int64_t token, int k) const {
    return ranks[static_cast<std::size_t>(source)]
        .weights[static_cast<std::size_t>(token * shape.topk + k)];
  }
  float x(int source, std::int64_t token, std::int64_t h) const {
    return ranks[static_cast<std::size_t>(source)]
        .x[static_cast<std::size_t>(token * shape.hidden + h)];
  }
  /// Whether these `hidden` numbers are that token's.
  bool is_row(int source, std::int64_t token, const float* row) const {
    const float* sent = ranks[static_cast<std::size_t>(source)].x.data() + token * shape.hidden;
    return std::equal(sent, sent + shape.hidden, row);
  }
  bool local(int rank, std::int64_t expert) const {
    return expert >= 0 && placement.rank_of(expert) == rank;
  }
  std::vector<Arrival> arrivals(int rank) const {
    std::vector<Arrival> rows;
    for (int s = 0; s < placement.ranks; ++s) {
      for (std::int64_t t = 0; t < ranks[static_cast<std::size_t>(s)].tokens; ++t) {
        bool comes = false;
        for (int k = 0; k < shape.topk; ++k) comes = comes || local(rank, route(s, t, k));
        if (comes) rows.push_back({s, t});
      }
    }
    return rows;
  }
  /// Slots of a token on a rank.
  int slots(int source, std::int64_t token, int rank) const {
    int count = 0;
    for (int k = 0; k < shape.topk; ++k) count += local(rank, route(source, token, k)) ? 1 : 0;
    return count;
  }
};

/// Options of one round trip.
struct Trip {
  std::int64_t worst_case_rows = 0;
  RowOrder order = RowOrder::rank_major;
  std::int64_t alignment = 1;
  bool registered = true;  ///< combine the received tensor itself, else a copy
  Stream* stream = nullptr;
  int sms = 0;
};

/// This rank's inputs on its GPU.
struct OnGpu {
  /// `spare`: allocating and freeing wait for the kernels of other ranks of this process, which may
  /// wait for this one: so it is done before and after all calls.
  Buffer x, routes, weights, spare{kSpareBytes};
  static constexpr std::size_t kSpareBytes = std::size_t{1} << 20;
  std::int64_t tokens;
  Device device;
  Shape shape;

  OnGpu(const Sent& sent, const Shape& of, int gpu, const Copier& copier)
      : x(sent.x.size() * size_of(of.dtype)),
        routes(sent.routes.size() * 8),
        weights(sent.weights.size() * 4),
        tokens(sent.tokens),
        device{DeviceKind::cuda, gpu},
        shape(of) {
    fill(sent, copier);
  }
  void fill(const Sent& sent, const Copier& copier) const {
    if (shape.dtype == Dtype::bf16) {
      std::vector<Bf16> narrow;
      for (const float value : sent.x) narrow.push_back(from_float<Bf16>(value));
      copier.put(x.data(), narrow);
    } else {
      copier.put(x.data(), sent.x);
    }
    copier.put(routes.data(), sent.routes);
    copier.put(weights.data(), sent.weights);
  }
  /// As frameworks have it, an empty tensor lies nowhere.
  void* place(const Buffer& buffer) const { return tokens == 0 ? nullptr : buffer.data(); }
  ConstTensorView x_view() const { return {place(x), shape.dtype, {tokens, shape.hidden}, device}; }
  ConstTensorView routes_view() const {
    return {place(routes), Dtype::i64, {tokens, shape.topk}, device};
  }
  ConstTensorView weights_view() const {
    return {place(weights), Dtype::f32, {tokens, shape.topk}, device};
  }
};

inline void check_received(const World& world, int rank, const Trip& trip, const Received& got,
                           const Copier& copier) {
  const auto rows = world.arrivals(rank);
  const auto n = static_cast<std::int64_t>(rows.size());
  const auto ids = copier.get<std::int64_t>(got.topk_idx, got.topk_idx.rows());
  const auto tokens = copier.get<std::int32_t>(got.source_token, got.source_token.rows());
  const auto weights = copier.get<float>(got.topk_weights, got.topk_weights.rows());
  const auto x = copier.get<float>(got.x, got.x.rows());
  const auto topk = static_cast<std::size_t>(world.shape.topk);
  const auto hidden = static_cast<std::size_t>(world.shape.hidden);
  need(got.topk_idx.rows() == (trip.worst_case_rows > 0 ? trip.worst_case_rows : n),
       "received rows: " + std::to_string(got.topk_idx.rows()) + ", expected " + std::to_string(n));
  std::vector<std::int64_t> slot_rows;
  if (trip.order == RowOrder::expert_major) {
    slot_rows = copier.get<std::int64_t>(got.slot_rows, got.slot_rows.rows());
  }
  const std::int64_t first = world.placement.first_expert(rank);
  for (std::size_t i = 0; i < rows.size(); ++i) {
    const auto [s, t] = rows[i];
    const std::string where = "row " + std::to_string(i);
    need(tokens[i] == t, where + ": source token");
    for (std::size_t k = 0; k < topk; ++k) {
      const std::int64_t expert = world.route(s, t, static_cast<int>(k));
      const bool here = world.local(rank, expert);
      need(ids[i * topk + k] == (here ? expert - first : -1), where + ": topk_idx");
      need(weights[i * topk + k] == (here ? world.weight(s, t, static_cast<int>(k)) : 0.0f),
           where + ": topk_weights");
      if (slot_rows.empty()) continue;
      const std::int64_t row = slot_rows[i * topk + k];
      need((row >= 0) == here && row < got.x.rows(), where + ": slot_rows");
      if (!here) continue;
      need(world.is_row(s, t, x.data() + static_cast<std::size_t>(row) * hidden),
           where + ": expert-major x");
    }
    need(!slot_rows.empty() || world.is_row(s, t, x.data() + i * hidden), where + ": x");
  }
  for (std::size_t i = rows.size() * topk; i < ids.size(); ++i) {
    need(ids[i] == -1 && weights[i] == 0.0f, "tail of topk_idx and topk_weights");
  }
}

inline void check_combined(const World& world, int rank, const Trip& trip, const Combined& got,
                           const Copier& copier) {
  const std::int64_t tokens = world.ranks[static_cast<std::size_t>(rank)].tokens;
  const auto x = copier.get<float>(got.x, tokens);
  const auto weights = copier.get<float>(got.topk_weights, tokens);
  const bool weighted = trip.order == RowOrder::expert_major;
  for (std::int64_t t = 0; t < tokens; ++t) {
    for (int k = 0; k < world.shape.topk; ++k) {
      const float wanted = world.route(rank, t, k) < 0 ? 0.0f : world.weight(rank, t, k);
      need(weights[static_cast<std::size_t>(t * world.shape.topk + k)] == wanted,
           "combined weight of token " + std::to_string(t));
    }
    for (std::int64_t h = 0; h < world.shape.hidden; ++h) {
      float sum = 0.0f;
      for (int d = 0; d < world.placement.ranks; ++d) {
        if (world.slots(rank, t, d) == 0) continue;
        float part = world.x(rank, t, h);
        if (weighted) {
          part = 0.0f;
          for (int k = 0; k < world.shape.topk; ++k) {
            if (world.local(d, world.route(rank, t, k))) {
              part = std::fmaf(world.weight(rank, t, k), world.x(rank, t, h), part);
            }
          }
        }
        sum += part;
      }
      const float found = x[static_cast<std::size_t>(t * world.shape.hidden + h)];
      if (found == sum) continue;  // words for every number would take seconds
      need(false, "combined token " + std::to_string(t) + ", channel " + std::to_string(h) +
                      ": got " + std::to_string(found) + ", expected " + std::to_string(sum));
    }
  }
}

/// One dispatch and one combine with a plan, both checked.
inline void round_trip(Group& group, const World& world, const OnGpu& mine, const Plan& plan,
                       const Trip& trip, const Copier& copier) {
  DispatchOptions options;
  options.topk_weights = mine.weights_view();
  options.order = trip.order;
  options.alignment = trip.alignment;
  options.worst_case_rows = trip.worst_case_rows;
  options.stream = trip.stream;
  options.sms = trip.sms;
  Received received = group.dispatch(mine.x_view(), plan, options);
  received.event.wait(std::chrono::seconds(60));
  check_received(world, group.rank(), trip, received, copier);
  need(group.is_registered(received.x.data()), "received rows are registered memory");
  ConstTensorView rows = received.x;
  if (!trip.registered) {
    need(received.x.view().bytes() <= OnGpu::kSpareBytes, "the spare buffer is too small");
    copier.put(mine.spare.data(), copier.get<float>(received.x, received.x.rows()));
    rows.data = mine.spare.data();
  }
  CombineOptions back;
  back.order = trip.order;
  back.alignment = trip.alignment;
  back.topk_weights = received.topk_weights;
  back.apply_weights = trip.order == RowOrder::expert_major;
  back.stream = trip.stream;
  back.sms = trip.sms;
  const Combined combined = group.combine(rows, plan, back);
  combined.event.wait(std::chrono::seconds(60));
  check_combined(world, group.rank(), trip, combined, copier);
}

}  // namespace ferry::test
