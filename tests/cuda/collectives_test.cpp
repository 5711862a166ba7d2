// Collectives on GPUs, through the public API: the same bits as the host engine's on the same
// ranks; in registered, ordinary and unaligned memory, on streams, in graphs; what ranks that
// disagree make of it. Skips without a GPU.
#include <gtest/gtest.h>

#include <chrono>
#include <cmath>
#include <cstring>

#include "engine_graph.hpp"
#include "engine_seat.hpp"
#include "host/collectives/test_collectives.hpp"

namespace ferry::test {
namespace {

using host::test::Bytes;
using host::test::random_elements;

constexpr std::size_t kBytes = std::size_t{40} << 20;  // of a tensor, at most

std::size_t index(std::int64_t value) {
  return static_cast<std::size_t>(value);
}

/// Where a tensor lies.
enum class At { ordinary, registered, mixed, unaligned };
constexpr At kAll[] = {At::ordinary, At::registered, At::mixed, At::unaligned};
const char* name_of(At at) {
  constexpr const char* kNames[] = {"ordinary", "registered", "registered on rank 0", "unaligned"};
  return kNames[static_cast<int>(at)];
}

/// One rank: collectives on its GPU and on the host, and memory, which is made before any call,
/// since making some waits for kernels of other ranks.
struct Pair {
  Bootstrap& bootstrap;
  int device;
  Collectives gpu;
  Collectives host;
  Copier copier{};
  Buffer ordinary[2] = {Buffer(kBytes), Buffer(kBytes)};
  Tensor registered[2] = {room(), room()};

  static GroupConfig config(Backend backend) {
    GroupConfig config;
    config.backend = backend;
    config.deadline = 20s;
    config.memory_bytes = backend == Backend::cuda ? 3 * kBytes : 0;
    return config;
  }
  explicit Pair(Bootstrap& meeting)
      : bootstrap(meeting),
        device(take_gpu(meeting)),
        gpu(borrowed(meeting), config(Backend::cuda)),
        host(borrowed(meeting), config(Backend::host)) {
    meet();
  }
  Tensor room() { return gpu.empty({static_cast<std::int64_t>(kBytes)}, Dtype::u8); }
  int rank() const { return gpu.rank(); }
  int size() const { return gpu.size(); }
  void meet() const { bootstrap.all_gather({}, 60s); }

  std::byte* memory(At at, int which, Dtype dtype) {
    const bool here = at == At::registered || (at == At::mixed && rank() == 0);
    auto* data = static_cast<std::byte*>(here ? registered[which].data() : ordinary[which].data());
    return data + (at == At::unaligned ? size_of(dtype) : 0);
  }
  Device place() const { return {DeviceKind::cuda, device}; }
  TensorView view(std::byte* data, Dtype dtype, std::int64_t count) const {
    return {data, dtype, {count}, place()};
  }
  Bytes get(const std::byte* data, std::size_t bytes) const {
    Bytes values(bytes);
    if (bytes == 0) return values;
    // Of this thread alone: the default stream would wait for other ranks of this process.
    need(cudaMemcpyAsync(values.data(), data, bytes, cudaMemcpyDefault, cudaStreamPerThread),
         "cudaMemcpyAsync");
    need(cudaStreamSynchronize(cudaStreamPerThread), "cudaStreamSynchronize");
    return values;
  }
};

void on_pairs(int ranks, bool threads, const std::function<void(Pair&)>& body) {
  if (gpu_count() == 0) GTEST_SKIP() << "NO GPU";
  ASSERT_TRUE(kQueues);
  const RankBody rank = [&](Bootstrap& bootstrap) {
    Pair pair(bootstrap);
    body(pair);
    pair.meet();
  };
  for (const std::string& problem : run_on_crew(ranks, threads ? ranks : 1, rank, 120)) {
    ADD_FAILURE() << problem;
  }
}

void need_same(Dtype dtype, const Bytes& got, const Bytes& expected, const std::string& what) {
  need(got.size() == expected.size(), what + ": sizes");
  const std::int64_t at = host::test::first_difference(dtype, got, expected);
  need(at < 0, what + ": other bits than the host engine's at element " + std::to_string(at));
}

struct Case {
  Dtype dtype;
  ReduceOp op;
  std::int64_t count;
};

std::string words(const Pair& pair, const char* call, const Case& c, At at) {
  return "rank " + std::to_string(pair.rank()) + ": " + call + " of " + std::to_string(c.count) +
         " " + std::string(ferry::name_of(c.dtype)) + ", " + std::string(ferry::name_of(c.op)) +
         ", " + name_of(at);
}

bool is_float(Dtype dtype) {
  return dtype == Dtype::f32 || dtype == Dtype::bf16 || dtype == Dtype::f16;
}

constexpr Dtype kReduced[] = {Dtype::f32, Dtype::bf16, Dtype::f16,
                              Dtype::i32, Dtype::i64,  Dtype::u8};

std::vector<Case> cases(bool few) {
  std::vector<Case> all;
  for (const Dtype dtype : kReduced) {
    if (few && dtype != Dtype::bf16 && dtype != Dtype::i32) continue;
    for (const ReduceOp op :
         {ReduceOp::sum, ReduceOp::mean, ReduceOp::product, ReduceOp::min, ReduceOp::max}) {
      if (!is_float(dtype) && op == ReduceOp::mean) continue;
      all.push_back({dtype, op, 1000});
      if (!few) all.push_back({dtype, op, 300'001});
    }
    for (const std::int64_t count : {0, 1, 3, 20'001}) all.push_back({dtype, ReduceOp::sum, count});
    all.push_back({dtype, ReduceOp::sum, std::int64_t{1'100'000} / std::int64_t(size_of(dtype))});
  }
  // Many rounds through the inboxes; from 16 MiB on wherever the tensors lie.
  all.push_back({Dtype::f32, ReduceOp::sum, few ? 1'000'003 : 8'000'003});
  if (!few) all.push_back({Dtype::bf16, ReduceOp::mean, 9'000'001});
  return all;
}

void reduce(Pair& pair, const Case& c, At at) {
  const Bytes mine = random_elements(c.dtype, c.count, static_cast<unsigned>(pair.rank()));
  Bytes expected = mine;
  pair.host.all_reduce({expected.data(), c.dtype, {c.count}}, {.op = c.op});
  std::byte* x = pair.memory(at, 0, c.dtype);
  pair.copier.put(x, mine);
  pair.gpu.all_reduce(pair.view(x, c.dtype, c.count), {.op = c.op});
  need_same(c.dtype, pair.get(x, mine.size()), expected, words(pair, "all_reduce", c, at));

  const std::int64_t block = c.count / pair.size(), whole = block * pair.size();
  Bytes part(index(block) * size_of(c.dtype));
  pair.host.reduce_scatter({mine.data(), c.dtype, {whole}}, {part.data(), c.dtype, {block}},
                           {.op = c.op});
  std::byte* out = pair.memory(at, 1, c.dtype);
  pair.copier.put(x, mine);
  pair.gpu.reduce_scatter(pair.view(x, c.dtype, whole), pair.view(out, c.dtype, block),
                          {.op = c.op});
  need_same(c.dtype, pair.get(out, part.size()), part, words(pair, "reduce_scatter", c, at));
}

/// Tensors around it stay as they are.
void guarded(Pair& pair, std::int64_t count) {
  const Case c{Dtype::bf16, ReduceOp::sum, count};
  constexpr std::size_t kGuard = 64;
  Bytes mine = random_elements(c.dtype, count, static_cast<unsigned>(pair.rank()) + 9);
  Bytes around(mine.size() + 2 * kGuard, std::byte{0xa5});
  std::copy(mine.begin(), mine.end(), around.begin() + kGuard);
  for (const At at : {At::ordinary, At::registered}) {
    std::byte* data = pair.memory(at, 0, c.dtype);
    pair.copier.put(data, around);
    Bytes expected = around;
    pair.host.all_reduce({expected.data() + kGuard, c.dtype, {count}});
    pair.gpu.all_reduce(pair.view(data + kGuard, c.dtype, count));
    need_same(Dtype::u8, pair.get(data, kGuard), Bytes(kGuard, std::byte{0xa5}), "before it");
    need_same(c.dtype, pair.get(data, around.size()), expected, words(pair, "all_reduce", c, at));
  }
}

void move(Pair& pair, std::int64_t count, At at) {
  const Case c{Dtype::e4m3, ReduceOp::sum, count};
  const int ranks = pair.size();
  const Bytes mine = random_elements(c.dtype, count, static_cast<unsigned>(pair.rank()) + 50);
  std::byte *x = pair.memory(at, 0, Dtype::u8), *out = pair.memory(at, 1, Dtype::u8);
  pair.copier.put(x, mine);
  Bytes expected(index(count * ranks));
  pair.host.all_gather({mine.data(), c.dtype, {count}},
                       {expected.data(), c.dtype, {count * ranks}});
  pair.gpu.all_gather(pair.view(x, c.dtype, count), pair.view(out, c.dtype, count * ranks));
  need_same(c.dtype, pair.get(out, expected.size()), expected, words(pair, "all_gather", c, at));

  const std::int64_t whole = count / ranks * ranks;
  expected.resize(index(whole));
  pair.host.all_to_all({mine.data(), c.dtype, {whole}}, {expected.data(), c.dtype, {whole}});
  pair.gpu.all_to_all(pair.view(x, c.dtype, whole), pair.view(out, c.dtype, whole));
  need_same(c.dtype, pair.get(out, expected.size()), expected, words(pair, "all_to_all", c, at));

  for (const int root : {0, ranks - 1}) {
    expected = mine;
    pair.host.broadcast({expected.data(), c.dtype, {count}}, root);
    pair.copier.put(x, mine);
    pair.gpu.broadcast(pair.view(x, c.dtype, count), root);
    need_same(c.dtype, pair.get(x, expected.size()), expected, words(pair, "broadcast", c, at));
  }
}

void split(Pair& pair, std::int64_t scale, At at) {
  const auto count = [&](int from, int to) { return (from * 7 + to * 3) % 5 * scale; };
  std::vector<std::int64_t> to, from;
  std::int64_t sent = 0, taken = 0;
  for (int r = 0; r < pair.size(); ++r) {
    sent += to.emplace_back(count(pair.rank(), r));
    taken += from.emplace_back(count(r, pair.rank()));
  }
  const Case c{Dtype::i32, ReduceOp::sum, scale};
  const Bytes mine = random_elements(c.dtype, sent, static_cast<unsigned>(pair.rank()) + 70);
  Bytes expected(index(taken) * 4);
  pair.host.all_to_all({mine.data(), c.dtype, {sent}}, to, {expected.data(), c.dtype, {taken}},
                       from);
  std::byte *x = pair.memory(at, 0, c.dtype), *out = pair.memory(at, 1, c.dtype);
  pair.copier.put(x, mine);
  pair.gpu.all_to_all(pair.view(x, c.dtype, sent), to, pair.view(out, c.dtype, taken), from);
  need_same(c.dtype, pair.get(out, expected.size()), expected, words(pair, "split", c, at));
}

class CollectivesTest : public ::testing::TestWithParam<Ranks> {
 protected:
  void each(const std::function<void(Pair&)>& body) {
    on_pairs(GetParam().ranks, GetParam().threads, body);
  }
  bool few() const { return !GetParam().threads && GetParam().ranks > 1; }  // they take turns
};
INSTANTIATE_TEST_SUITE_P(Ranks, CollectivesTest,
                         ::testing::Values(Ranks{1, true}, Ranks{2, true}, Ranks{3, true},
                                           Ranks{4, true}, Ranks{2, false}, Ranks{4, false}),
                         [](const auto& one) {
                           return std::to_string(one.param.ranks) +
                                  (one.param.threads ? "Threads" : "Processes");
                         });

TEST_P(CollectivesTest, ReduceAsTheHostDoes) {
  each([&](Pair& pair) {
    for (const Case& c : cases(few())) {
      for (const At at : kAll) {
        if (c.count > 5'000'000 && at == At::unaligned) continue;
        reduce(pair, c, at);
      }
    }
    for (const std::int64_t count : {1, 7, 1001, 300'003}) guarded(pair, count);
  });
}

// Both algorithms give the bits of the host engine, whatever the size; others are refused.
TEST_P(CollectivesTest, AlgorithmsAreForced) {
  each([&](Pair& pair) {
    for (const Algorithm algorithm : {Algorithm::one_shot, Algorithm::direct}) {
      for (const std::int64_t count : {0, 1, 3, 1001, 16'384}) {
        for (const At at : kAll) {
          const Case c{Dtype::f32, ReduceOp::sum, count};
          const Bytes mine =
              random_elements(c.dtype, count, static_cast<unsigned>(pair.rank()) + 30);
          Bytes expected = mine;
          pair.host.all_reduce({expected.data(), c.dtype, {count}});
          std::byte* x = pair.memory(at, 0, c.dtype);
          pair.copier.put(x, mine);
          pair.gpu.all_reduce(pair.view(x, c.dtype, count), {.algorithm = algorithm});
          need_same(
              c.dtype, pair.get(x, mine.size()), expected,
              words(pair, "all_reduce", c, at) + ", " + std::string(ferry::name_of(algorithm)));
        }
      }
    }
    std::byte* x = pair.memory(At::ordinary, 0, Dtype::f32);
    const auto run = [&](std::int64_t count, const ReduceOptions& options) {
      pair.gpu.all_reduce(pair.view(x, Dtype::f32, count), options);
    };
    for (const Algorithm algorithm : {Algorithm::hierarchical, Algorithm::ring, Algorithm::tree}) {
      need_error(ErrorKind::invalid_argument, "an algorithm of the host engine was taken",
                 [&] { run(8, {.algorithm = algorithm}); });
    }
    need_error(ErrorKind::invalid_argument, "a large one_shot was taken",
               [&] { run(1'000'000, {.algorithm = Algorithm::one_shot}); });
    need_error(ErrorKind::invalid_argument, "shares were taken", [&] { run(8, {.shares = {1}}); });
    if (pair.size() > 1) {
      // The kernels of different algorithms refuse each other.
      const Error error = need_error(ErrorKind::mismatch, "other algorithms were taken", [&] {
        run(60'000, {.algorithm = pair.rank() == 0 ? Algorithm::direct : Algorithm::one_shot});
      });
      need(std::string(error.what()).find("algorithm is") != std::string::npos, error.what());
    }
    run(8, {});  // they go on
  });
}

TEST_P(CollectivesTest, MoveAsTheHostDoes) {
  each([&](Pair& pair) {
    for (const std::int64_t count : {0, 1, 100, 5001, 400'000, 3'000'001}) {
      if (few() && count > 1'000'000) continue;
      for (const At at : kAll) move(pair, count, at);
    }
    for (const std::int64_t scale : {1, 1000, 90'001}) {
      for (const At at : kAll) split(pair, scale, at);
    }
  });
}

// A block may be where it belongs in the whole.
TEST_P(CollectivesTest, BlocksInPlace) {
  each([&](Pair& pair) {
    for (const std::int64_t block : {5, 1000, 300'001}) {
      for (const At at : kAll) {
        const std::int64_t whole = block * pair.size();
        const Case c{Dtype::f32, ReduceOp::sum, whole};
        const Bytes mine = random_elements(c.dtype, whole, static_cast<unsigned>(pair.rank()) + 90);
        std::byte* x = pair.memory(at, 0, c.dtype);
        const std::size_t own = index(pair.rank() * block) * 4, bytes = index(block) * 4;
        Bytes part(bytes), expected(mine.size());
        pair.host.reduce_scatter({mine.data(), c.dtype, {whole}}, {part.data(), c.dtype, {block}});
        pair.copier.put(x, mine);
        pair.gpu.reduce_scatter(pair.view(x, c.dtype, whole), pair.view(x + own, c.dtype, block));
        need_same(c.dtype, pair.get(x + own, bytes), part, words(pair, "reduce_scatter", c, at));
        pair.host.all_gather({part.data(), c.dtype, {block}}, {expected.data(), c.dtype, {whole}});
        pair.gpu.all_gather(pair.view(x + own, c.dtype, block), pair.view(x, c.dtype, whole));
        need_same(c.dtype, pair.get(x, mine.size()), expected, words(pair, "all_gather", c, at));
      }
    }
  });
}

// Calls of all kinds one after another, on two streams, without waiting between.
TEST_P(CollectivesTest, StreamsKeepTheOrderOfCalls) {
  each([&](Pair& pair) {
    OwnStream a(pair.device), b(pair.device);
    const std::int64_t count = few() ? 5000 : 200'000;
    const std::vector<float> ones(index(count), 1.0f);
    std::byte *x = pair.memory(At::registered, 0, Dtype::f32),
              *y = pair.memory(At::ordinary, 0, Dtype::f32);
    pair.copier.put(x, ones);
    pair.copier.put(y, ones);
    Event last;
    const int rounds = few() ? 3 : 8;  // 4^8 is exact
    for (int i = 0; i < rounds; ++i) {
      Stream* stream = i % 2 == 0 ? &a.stream : &b.stream;
      pair.gpu.all_reduce(pair.view(x, Dtype::f32, count), {.stream = stream});
      pair.gpu.all_reduce(pair.view(y, Dtype::f32, 1000), {.stream = stream});
      last = pair.gpu.all_reduce(pair.view(y, Dtype::f32, count),
                                 {.op = ReduceOp::mean, .stream = stream});
    }
    last.wait();
    std::vector<float> got(index(count));
    const Bytes bytes = pair.get(x, got.size() * 4);
    std::memcpy(got.data(), bytes.data(), bytes.size());
    const float expected = std::pow(static_cast<float>(pair.size()), static_cast<float>(rounds));
    for (const float value : got) need(value == expected, "sum " + std::to_string(value));
  });
}

TEST_P(CollectivesTest, GraphsReplay) {
  each([&](Pair& pair) {
    OwnStream own(pair.device);
    const std::int64_t small = 1000, large = few() ? 100'000 : 700'001;
    std::byte *x = pair.memory(At::registered, 0, Dtype::f32),
              *y = pair.memory(At::ordinary, 0, Dtype::f32);
    pair.meet();
    const Graph graph(own.raw, [&] {
      pair.gpu.all_reduce(pair.view(x, Dtype::f32, large), {.stream = &own.stream});
      pair.gpu.all_reduce(pair.view(y, Dtype::f32, large), {.stream = &own.stream});
      pair.gpu.all_reduce(pair.view(x, Dtype::f32, small), {.stream = &own.stream});
    });
    for (int i = 0; i < (few() ? 2 : 5); ++i) {
      const Bytes mine =
          random_elements(Dtype::f32, large, static_cast<unsigned>(100 * i + pair.rank()));
      Bytes once = mine;
      pair.host.all_reduce({once.data(), Dtype::f32, {large}});
      Bytes twice = once;
      pair.host.all_reduce({twice.data(), Dtype::f32, {small}});
      pair.copier.put(x, mine);
      pair.copier.put(y, mine);
      pair.meet();
      graph.run();
      need_same(Dtype::f32, pair.get(y, mine.size()), once, "ordinary, replay");
      need_same(Dtype::f32, pair.get(x, mine.size()), twice, "registered, replay");
      pair.gpu.all_reduce(pair.view(y, Dtype::f32, small));  // between the replays
    }
    pair.meet();
  });
}

TEST_P(CollectivesTest, RanksThatDisagreeLearnIt) {
  each([&](Pair& pair) {
    if (pair.size() == 1) return;
    std::byte *x = pair.memory(At::ordinary, 0, Dtype::f32),
              *out = pair.memory(At::ordinary, 1, Dtype::f32);
    for (const std::int64_t count : {100, 500'000}) {
      const std::int64_t mine = pair.rank() == 0 ? count + 1 : count;
      const Error error = need_error(ErrorKind::mismatch, "another size was taken",
                                     [&] { pair.gpu.all_reduce(pair.view(x, Dtype::f32, mine)); });
      need(std::string(error.what()).find("number of elements") != std::string::npos, error.what());
    }
    // Rank 0 sends one element more to rank 1 than that expects.
    const auto ranks = index(pair.size());
    std::vector<std::int64_t> to(ranks, 10), from(ranks, 10);
    if (pair.rank() == 0) to[1] = 11;
    const auto sum = [](const std::vector<std::int64_t>& counts) {
      std::int64_t all = 0;
      for (const std::int64_t count : counts) all += count;
      return all;
    };
    const Error error = need_error(ErrorKind::mismatch, "other counts were taken", [&] {
      pair.gpu.all_to_all(pair.view(x, Dtype::f32, sum(to)), to,
                          pair.view(out, Dtype::f32, sum(from)), from);
    });
    const std::string told = error.what();
    need(told.find("rank 0 sends 11 elements to rank 1, which expects 10") != std::string::npos,
         told);
    reduce(pair, {Dtype::f32, ReduceOp::sum, 1000}, At::ordinary);  // they go on
    reduce(pair, {Dtype::f32, ReduceOp::sum, 500'000}, At::registered);
  });
}

}  // namespace
}  // namespace ferry::test
