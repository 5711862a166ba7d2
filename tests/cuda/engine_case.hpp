// What every rank sends in the engine's tests, known to all ranks by a seed, and what must arrive.
#pragma once
#include <algorithm>
#include <cstdint>
#include <ferry/ferry.hpp>
#include <string>
#include <type_traits>
#include <vector>

#include "conformance/reference.hpp"
#include "gpu_buffer.hpp"

namespace ferry::test {

struct Shape {
  std::int64_t tokens = 37;  ///< of rank 0; the others have fewer, the last of several none
  std::int64_t hidden = 256;
  int topk = 4;
  std::int64_t experts = 12;
  Dtype dtype = Dtype::f32;  ///< of tokens; of latency mode's also bf16
};

inline std::uint64_t mix(std::uint64_t value) {
  value += 0x9e3779b97f4a7c15ull;
  value = (value ^ (value >> 30)) * 0xbf58476d1ce4e5b9ull;
  value = (value ^ (value >> 27)) * 0x94d049bb133111ebull;
  return value ^ (value >> 31);
}

/// One rank's tokens, routes and weights.
using Sent = conformance::RankInput;

inline Sent sent_by(int rank, int ranks, const Shape& shape, std::uint64_t seed) {
  Sent sent;
  std::uint64_t state = mix(seed * 1000 + static_cast<std::uint64_t>(rank));
  const auto next = [&] { return state = mix(state); };
  const auto real = [&] { return static_cast<float>(next() % 20001) / 7000.0f - 1.0f; };
  sent.tokens = ranks > 1 && rank == ranks - 1 ? 0 : shape.tokens - rank;
  sent.x.resize(static_cast<std::size_t>(sent.tokens * shape.hidden) * size_of(shape.dtype));
  for (std::int64_t i = 0; i < sent.tokens * shape.hidden; ++i) {
    conformance::store(sent.x.data(), shape.dtype, i, real());
  }
  for (std::int64_t i = 0; i < sent.tokens * shape.topk; ++i) {
    const bool unused = next() % 8 == 0;
    sent.topk_idx.push_back(
        unused ? -1
               : static_cast<std::int64_t>(next() % static_cast<std::uint64_t>(shape.experts)));
    sent.weights.push_back(real());
  }
  return sent;
}

/// All ranks' tokens.
struct World : conformance::World {
  Shape shape;

  World(int count, const Shape& of, std::uint64_t seed) : shape(of) {
    ranks = count;
    experts = of.experts;
    topk = of.topk;
    hidden = of.hidden;
    dtype = of.dtype;
    for (int r = 0; r < count; ++r) inputs.push_back(sent_by(r, count, of, seed));
  }
  const Sent& sent(int rank) const { return inputs[static_cast<std::size_t>(rank)]; }
  const std::byte* row(int source, std::int64_t token) const {
    return sent(source).x.data() + static_cast<std::size_t>(token) * row_bytes();
  }
  /// Received by a rank.
  std::int64_t rows(int rank) const {
    return static_cast<std::int64_t>(conformance::arrivals_at(*this, rank).size());
  }
};

/// Options of one round trip.
struct Trip {
  std::int64_t max_recv_rows = 0;
  RowOrder order = RowOrder::rank_major;
  std::int64_t alignment = 1;
  bool registered = true;  ///< combine the received tensor itself, else a copy
  Stream* stream = nullptr;
  int num_sms = 0;
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
      : x(sent.x.size()),
        routes(sent.topk_idx.size() * 8),
        weights(sent.weights.size() * 4),
        tokens(sent.tokens),
        device{DeviceKind::cuda, gpu},
        shape(of) {
    fill(sent, copier);
  }
  void fill(const Sent& sent, const Copier& copier) const {
    copier.put(x.data(), sent.x);
    copier.put(routes.data(), sent.topk_idx);
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

/// Of as many elements as are expected, every bit.
template <class T>
void need_same(const std::string& what, const Tensor& got, const std::vector<T>& expected,
               const Copier& copier) {
  const auto found = copier.first<T>(got, expected.size());
  const auto [at, wanted] = std::mismatch(found.begin(), found.end(), expected.begin());
  if (at == found.end()) return;  // words for every number would take seconds
  std::string values;
  if constexpr (std::is_arithmetic_v<T>) {
    values = ": got " + std::to_string(*at) + ", expected " + std::to_string(*wanted);
  }
  need(false, what + " differs at " + std::to_string(at - found.begin()) + " of " +
                  std::to_string(found.size()) + values);
}

inline void check_received(const World& world, int rank, const Trip& trip, const Received& got,
                           const Copier& copier) {
  auto expected = conformance::expect_dispatch(world, rank, trip.order, trip.alignment);
  const std::int64_t rows = world.rows(rank);
  need(got.topk_idx.rows() == (trip.max_recv_rows > 0 ? trip.max_recv_rows : rows),
       "received rows: " + std::to_string(got.topk_idx.rows()) + ", expected " +
           std::to_string(rows));
  const auto all = static_cast<std::size_t>(got.topk_idx.rows() * world.topk);
  expected.topk_idx.resize(all, -1);
  expected.topk_weights.resize(all, 0.0f);
  need_same("topk_idx", got.topk_idx, expected.topk_idx, copier);
  need_same("topk_weights", got.topk_weights, expected.topk_weights, copier);
  need_same("source_token", got.source_token, expected.source_token, copier);
  need_same("x", got.x, expected.x, copier);
  if (trip.order == RowOrder::expert_major) {
    need_same("slot_rows", got.slot_rows, expected.slot_rows, copier);
  }
}

/// When the rows come back as they are. `domain_size`: as conformance::CombineInput has it.
inline void check_combined(const World& world, int rank, const Trip& trip, const Combined& got,
                           const Copier& copier, int domain_size = 0) {
  std::vector<conformance::ExpectedDispatch> sent;
  for (int d = 0; d < world.ranks; ++d) {
    sent.push_back(conformance::expect_dispatch(world, d, trip.order, trip.alignment));
  }
  conformance::CombineInput back{trip.order, trip.alignment, world.dtype, world.hidden};
  back.row = [&](int d, std::int64_t row, std::byte* out) {
    const std::byte* from = sent[static_cast<std::size_t>(d)].x.data();
    std::copy_n(from + static_cast<std::size_t>(row) * world.row_bytes(), world.row_bytes(), out);
  };
  back.weight = [&](int d, std::int64_t row, int k) {
    return sent[static_cast<std::size_t>(d)]
        .topk_weights[static_cast<std::size_t>(row * world.topk + k)];
  };
  back.apply_weights = trip.order == RowOrder::expert_major;
  back.domain_size = domain_size;
  const auto expected = conformance::expect_combine(world, rank, back);
  need_same("combined topk_weights", got.topk_weights, expected.topk_weights, copier);
  need_same("combined x", got.x, expected.x, copier);
}

inline DispatchOptions dispatch_options(const OnGpu& mine, const Trip& trip) {
  DispatchOptions options;
  options.topk_weights = mine.weights_view();
  options.order = trip.order;
  options.alignment = trip.alignment;
  options.max_recv_rows = trip.max_recv_rows;
  options.stream = trip.stream;
  options.num_sms = trip.num_sms;
  return options;
}
inline CombineOptions combine_options(const Received& received, const Trip& trip) {
  CombineOptions back;
  back.order = trip.order;
  back.alignment = trip.alignment;
  back.topk_weights = received.topk_weights;
  back.apply_weights = trip.order == RowOrder::expert_major;
  back.stream = trip.stream;
  back.num_sms = trip.num_sms;
  return back;
}

/// One dispatch and one combine with a plan, both checked.
inline void round_trip(Group& group, const World& world, const OnGpu& mine, const Plan& plan,
                       const Trip& trip, const Copier& copier) {
  Received received = group.dispatch(mine.x_view(), plan, dispatch_options(mine, trip));
  received.event.wait(std::chrono::seconds(60));
  check_received(world, group.rank(), trip, received, copier);
  need(group.is_registered(received.x.data()), "received rows are registered memory");
  ConstTensorView rows = received.x;
  if (!trip.registered) {
    need(received.x.view().bytes() <= OnGpu::kSpareBytes, "the spare buffer is too small");
    copier.put(mine.spare.data(), copier.get<float>(received.x, received.x.rows()));
    rows.data = mine.spare.data();
  }
  const Combined combined = group.combine(rows, plan, combine_options(received, trip));
  combined.event.wait(std::chrono::seconds(60));
  check_combined(world, group.rank(), trip, combined, copier);
}

}  // namespace ferry::test
