// Copies of busy experts planned on a GPU: the same plans and places as those of BatchBalancer.
// Skips without a GPU.
#include <gtest/gtest.h>

#include <algorithm>
#include <optional>

#include "core/experts/test_batches.hpp"
#include "engine_graph.hpp"
#include "gpu_buffer.hpp"
#include "shared_ranks.hpp"

namespace ferry::test {
namespace {

constexpr unsigned kSeed = 23;

struct CudaStream {
  CudaStream() {
    need(cudaStreamCreateWithFlags(&raw, cudaStreamNonBlocking), "cudaStreamCreateWithFlags");
    stream.emplace(Stream::of_cuda(raw, 0));
  }
  ~CudaStream() { cudaStreamDestroy(raw); }
  CudaStream(const CudaStream&) = delete;
  CudaStream& operator=(const CudaStream&) = delete;
  cudaStream_t raw = nullptr;
  std::optional<Stream> stream{};
};

/// Both balancers, and memory for their arguments.
class Balancers {
 public:
  static constexpr std::int64_t kTokens = 700, kTopk = 3;

  explicit Balancers(const BatchPlanShape& shape)
      : shape_(shape),
        memory_(static_cast<std::size_t>(bytes(shape))),
        counts_(index(std::int64_t{shape.ranks} * (shape.experts + 1)) * 4),
        routes_(kTokens * kTopk * 8),
        places_(kTokens * kTopk * 8),
        cpu(shape.experts, shape.ranks, shape.slots, shape.domain_size, shape.copy_rows, most()),
        gpu(shape.experts, shape.ranks, shape.slots, shape.domain_size, shape.copy_rows, most(),
            {memory_.data(), Dtype::u8, {bytes(shape)}, kGpu}, *stream.stream) {}

  /// changed: ranks whose experts have changed, told by the call or by the counts.
  void plan(const std::vector<std::int32_t>& counts, std::uint32_t changed, bool again) {
    const bool in_counts = changed % 2 == 0;
    std::vector<std::int32_t> rows;
    for (int rank = 0; rank < shape_.ranks; ++rank) {
      const auto row = counts.begin() + std::int64_t{rank} * shape_.experts;
      rows.insert(rows.end(), row, row + shape_.experts);
      const bool told = rank < 32 && (changed >> rank & 1) != 0;
      if (in_counts) rows.push_back(told ? 1 : 0);
      if (!told) continue;
      cpu.invalidate(rank);
      if (!in_counts) gpu.invalidate(rank);
    }
    put(counts_, rows);
    gpu.plan({counts_.data(), Dtype::i32, {shape_.ranks, shape_.experts + in_counts}, kGpu},
             *stream.stream, again);
    cpu.plan({counts.data(), Dtype::i32, {shape_.ranks, shape_.experts}}, again);
  }
  void fetched() {
    cpu.fetched();
    gpu.fetched(*stream.stream);
  }
  void expect_same_plan() {
    EXPECT_EQ(get<std::int32_t>(gpu.table()), cpu.table());
    EXPECT_EQ(get<std::int32_t>(gpu.fetches()), cpu.fetches());
    const auto load = get<std::int32_t>(gpu.load());
    EXPECT_EQ(std::vector<std::int64_t>(load.begin(), load.end()), cpu.load());
    EXPECT_EQ(get<std::int64_t>(gpu.plan_id()).at(0), cpu.plan_id());
  }
  template <class Id>
  std::vector<std::int32_t> gpu_counts(const std::vector<Id>& routes) {
    put(routes_, routes);
    const ConstTensorView out{counts_.data(), Dtype::i32, {shape_.experts}, kGpu};
    gpu.counts(view(routes), {counts_.data(), Dtype::i32, {shape_.experts}, kGpu}, *stream.stream);
    return get<std::int32_t>(out);
  }
  template <class Id>
  std::vector<std::int64_t> gpu_places(const std::vector<Id>& routes, int rank) {
    put(routes_, routes);
    gpu.places(view(routes), rank, {places_.data(), Dtype::i64, view(routes).shape, kGpu},
               *stream.stream);
    return get<std::int64_t>({places_.data(), Dtype::i64, view(routes).shape, kGpu});
  }

  template <class T>
  std::vector<T> get(const ConstTensorView& from) {
    std::vector<T> to(index(from.shape.product()));
    need(cudaMemcpyAsync(to.data(), from.data, to.size() * sizeof(T), cudaMemcpyDeviceToHost,
                         stream.raw),
         "cudaMemcpyAsync");
    need(cudaStreamSynchronize(stream.raw), "cudaStreamSynchronize");
    return to;
  }

  static constexpr Device kGpu{DeviceKind::cuda, 0};
  CudaStream stream{};

 private:
  static std::int64_t bytes(const BatchPlanShape& shape) {
    const auto bytes = GpuBalancer::memory_bytes(shape.experts, shape.ranks, shape.slots);
    return static_cast<std::int64_t>(bytes);
  }
  std::int64_t most() const { return shape_.max_rows == INT32_MAX ? 0 : shape_.max_rows; }
  template <class Id>
  ConstTensorView view(const std::vector<Id>& routes) const {
    const auto tokens = static_cast<std::int64_t>(routes.size()) / kTopk;
    return {routes_.data(), sizeof(Id) == 8 ? Dtype::i64 : Dtype::i32, {tokens, kTopk}, kGpu};
  }
  template <class T>
  void put(const Buffer& to, const std::vector<T>& from) {
    need(cudaMemcpyAsync(to.data(), from.data(), from.size() * sizeof(T), cudaMemcpyHostToDevice,
                         stream.raw),
         "cudaMemcpyAsync");
    need(cudaStreamSynchronize(stream.raw), "cudaStreamSynchronize");
  }
  BatchPlanShape shape_;
  Buffer memory_;
  Buffer counts_;
  Buffer routes_;
  Buffer places_;

 public:
  BatchBalancer cpu;
  GpuBalancer gpu;
};

TEST(GpuBalancer, PlansAreThoseOfTheCpu) {
  if (gpu_count() == 0) GTEST_SKIP() << "NO GPU";
  std::mt19937 random(kSeed);
  for (int run = 0; run < 30 && !HasFailure(); ++run) {
    const BatchPlanShape shape = test_batch(random).shape;
    Balancers both(shape);
    std::vector<std::vector<std::int32_t>> seen;
    for (int batch = 0; batch < 40 && !HasFailure(); ++batch) {
      SCOPED_TRACE("run " + std::to_string(run) + ", batch " + std::to_string(batch) + ": " +
                   std::to_string(shape.ranks) + " ranks, " + std::to_string(shape.experts) +
                   " experts, " + std::to_string(shape.slots) + " slots");
      const bool again = batch > 0 && random() % 4 == 0;
      if (!again) seen.push_back(test_counts(random, shape.ranks, shape.experts));
      const std::size_t back = again ? random() % seen.size() : 0;
      const std::uint32_t changed = random() % 3 == 0 ? random() : 0;
      both.plan(seen[seen.size() - 1 - back], changed, again);
      both.expect_same_plan();
      if (random() % 4 != 0) both.fetched();
    }
  }
}

/// Half of all name one expert, some none.
template <class Id>
std::vector<Id> random_routes(std::mt19937& random, int experts, std::int64_t tokens) {
  std::vector<Id> routes(index(tokens * Balancers::kTopk));
  for (Id& id : routes) {
    const auto any = static_cast<Id>(random() % static_cast<unsigned>(experts + 1)) - 1;
    id = random() % 2 == 0 ? Id{5} : any;
  }
  return routes;
}

template <class Id>
void expect_places(std::mt19937& random, const BatchPlanShape& shape, std::int64_t tokens) {
  Balancers both(shape);
  const Dtype dtype = sizeof(Id) == 8 ? Dtype::i64 : Dtype::i32;
  std::vector<std::vector<Id>> routes;
  std::vector<std::int32_t> counts;
  for (int rank = 0; rank < shape.ranks; ++rank) {
    routes.push_back(random_routes<Id>(random, shape.experts, tokens));
    const std::vector<std::int32_t> mine = both.gpu_counts(routes.back());
    const Tensor own = both.cpu.counts({routes.back().data(), dtype, {tokens, Balancers::kTopk}});
    EXPECT_TRUE(std::equal(mine.begin(), mine.end(), own.as<std::int32_t>()));
    counts.insert(counts.end(), mine.begin(), mine.end());
  }
  both.plan(counts, 0, false);
  both.fetched();
  for (int rank = 0; rank < shape.ranks; ++rank) {
    const auto& mine = routes[index(rank)];
    const Tensor places = both.cpu.places({mine.data(), dtype, {tokens, Balancers::kTopk}}, rank);
    const auto* wanted = places.as<std::int64_t>();
    EXPECT_EQ(both.gpu_places(mine, rank), std::vector<std::int64_t>(wanted, wanted + mine.size()))
        << "rank " << rank << " of " << shape.ranks << ", " << tokens << " tokens";
  }
}

TEST(GpuBalancer, PlacesAreThoseOfTheCpu) {
  if (gpu_count() == 0) GTEST_SKIP() << "NO GPU";
  std::mt19937 random(kSeed);
  for (const std::int64_t tokens : {1, 11, 64, 171, 700}) {
    for (const auto& [ranks, experts, slots] :
         {std::tuple{4, 64, 1}, {8, 256, 2}, {64, 384, 4}, {2, 16, 3}}) {
      const BatchPlanShape shape = batch_plan_shape({experts, ranks}, slots, 0, 0, 0);
      expect_places<std::int64_t>(random, shape, tokens);
      expect_places<std::int32_t>(random, shape, tokens);
    }
  }
}

TEST(GpuBalancer, WhatIsNoExpertHasNoPlace) {
  if (gpu_count() == 0) GTEST_SKIP() << "NO GPU";
  Balancers both(batch_plan_shape({8, 2}, 1, 0, 0, 0));
  const std::vector<std::int64_t> wrong{-1, 8, -2, 7, std::int64_t{1} << 40, 0};
  EXPECT_EQ(both.gpu_counts(wrong), (std::vector<std::int32_t>{1, 0, 0, 0, 0, 0, 0, 1}));
  EXPECT_THROW(both.gpu_places(wrong, 0), Error);  // nothing is planned
  both.plan(std::vector<std::int32_t>(16), 0, false);
  EXPECT_THROW(both.gpu_places(wrong, 0), Error);
  both.fetched();
  constexpr std::int64_t kNone = INT32_MAX;
  EXPECT_EQ(both.gpu_places(wrong, 0), (std::vector<std::int64_t>{-1, kNone, kNone, 8, kNone, 0}));
  // A batch that is to be computed again, and is forgotten.
  EXPECT_THROW(both.plan(std::vector<std::int32_t>(16, 3), 0, true), Error);  // on the CPU
  EXPECT_EQ(both.get<std::int64_t>(both.gpu.plan_id()), std::vector<std::int64_t>{-1});
  both.gpu.fetched(*both.stream.stream);
  EXPECT_EQ(both.gpu_places(wrong, 0), std::vector<std::int64_t>(wrong.size(), kNone));
}

/// All of it in a graph: other routes with each replay.
TEST(GpuBalancer, AGraphPlansAnew) {
  if (gpu_count() == 0) GTEST_SKIP() << "NO GPU";
  std::mt19937 random(kSeed);
  constexpr int kExperts = 32, kRanks = 4;
  constexpr std::int64_t kTokens = 300, kTopk = Balancers::kTopk;
  const BatchPlanShape shape = batch_plan_shape({kExperts, kRanks}, 2, 0, 0, 0);
  Balancers both(shape);
  Buffer ids(kRanks * kTokens * kTopk * 8), counts(kRanks * kExperts * 4);
  Buffer places(kRanks * kTokens * kTopk * 8);
  const auto part = [](const Buffer& of, std::int64_t at, Dtype dtype, Extents extents) {
    return TensorView(static_cast<std::byte*>(of.data()) + at, dtype, extents, Balancers::kGpu);
  };
  Stream& stream = *both.stream.stream;
  const Graph graph(both.stream.raw, [&] {
    for (int rank = 0; rank < kRanks; ++rank) {
      both.gpu.counts(part(ids, rank * kTokens * kTopk * 8, Dtype::i64, {kTokens, kTopk}),
                      part(counts, rank * kExperts * 4, Dtype::i32, {kExperts}), stream);
    }
    both.gpu.plan(part(counts, 0, Dtype::i32, {kRanks, kExperts}), stream);
    both.gpu.fetched(stream);
    for (int rank = 0; rank < kRanks; ++rank) {
      const std::int64_t at = rank * kTokens * kTopk * 8;
      both.gpu.places(part(ids, at, Dtype::i64, {kTokens, kTopk}), rank,
                      part(places, at, Dtype::i64, {kTokens, kTopk}), stream);
    }
  });
  const Copier copier;
  for (int replay = 0; replay < 5; ++replay) {
    const auto routes = random_routes<std::int64_t>(random, kExperts, kRanks * kTokens);
    copier.put(ids.data(), routes);
    graph.run();
    std::vector<std::int32_t> all;
    for (int rank = 0; rank < kRanks; ++rank) {
      const Tensor own =
          both.cpu.counts({routes.data() + rank * kTokens * kTopk, Dtype::i64, {kTokens, kTopk}});
      all.insert(all.end(), own.as<std::int32_t>(), own.as<std::int32_t>() + kExperts);
    }
    both.cpu.plan({all.data(), Dtype::i32, {kRanks, kExperts}});
    both.expect_same_plan();
    both.cpu.fetched();
    const auto got = copier.first<std::int64_t>(
        Tensor(part(places, 0, Dtype::i64, {kRanks * kTokens, kTopk}), nullptr), routes.size());
    for (int rank = 0; rank < kRanks; ++rank) {
      const auto at = index(rank * kTokens * kTopk);
      const Tensor wanted =
          both.cpu.places({routes.data() + at, Dtype::i64, {kTokens, kTopk}}, rank);
      EXPECT_TRUE(std::equal(got.begin() + rank * kTokens * kTopk,
                             got.begin() + (rank + 1) * kTokens * kTopk, wanted.as<std::int64_t>()))
          << "replay " << replay << ", rank " << rank;
    }
  }
}

}  // namespace
}  // namespace ferry::test
