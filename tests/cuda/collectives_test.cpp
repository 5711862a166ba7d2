// Collectives on GPUs, through the public API: the same bits as the host engine's on the same
// ranks; in registered, ordinary and unaligned memory, on streams, in graphs; what ranks that
// disagree make of it. Skips without a GPU.
#include <chrono>

#include "collectives_pair.hpp"

namespace ferry::test {
namespace {

/// Rows by a table in GPU memory, as the host engine moves them by one that it reads.
void rows_by_table(Pair& pair, unsigned seed, std::int64_t columns, Dtype dtype) {
  constexpr std::int64_t kRows = 3, kSlots = 2;
  const int ranks = pair.size();
  std::vector<std::int32_t> table;
  for (std::int64_t i = 0; i < ranks * kSlots; ++i) {
    const auto any = (seed * 2654435761u + static_cast<unsigned>(i) * 40503u) >> 8;
    table.push_back(static_cast<std::int32_t>(any % static_cast<unsigned>(ranks * kRows + 1)) - 1);
  }
  const Case c{dtype, ReduceOp::sum, columns};
  const auto random = [&](std::int64_t rows, unsigned more) {
    return random_elements(dtype, rows * columns, seed + more + static_cast<unsigned>(pair.rank()));
  };
  const Bytes rows = random(kRows, 0), slots = random(kSlots, 50);
  const Device gpu = pair.place();
  std::byte* x = pair.memory(At::ordinary, 0, dtype);
  std::byte* out = pair.memory(At::registered, 1, dtype);
  const Buffer named(table.size() * 4);
  pair.copier.put(named.data(), table);
  pair.copier.put(x, rows);
  pair.copier.put(out, slots);
  const ConstTensorView by(named.data(), Dtype::i32, {ranks, kSlots}, gpu);
  Bytes expected = slots;
  pair.host.copy_rows({rows.data(), dtype, {kRows, columns}},
                      {expected.data(), dtype, {kSlots, columns}}, table);
  pair.gpu.copy_rows({x, dtype, {kRows, columns}, gpu}, {out, dtype, {kSlots, columns}, gpu}, by);
  need_same(dtype, pair.get(out, slots.size()), expected,
            words(pair, "copy_rows", c, At::registered));
  if (dtype != Dtype::f32) return;
  pair.copier.put(out, slots);
  expected = rows;
  pair.host.add_rows({slots.data(), dtype, {kSlots, columns}},
                     {expected.data(), dtype, {kRows, columns}}, table);
  pair.gpu.add_rows({out, dtype, {kSlots, columns}, gpu}, {x, dtype, {kRows, columns}, gpu}, by);
  need_same(dtype, pair.get(x, rows.size()), expected, words(pair, "add_rows", c, At::registered));
}

class CollectivesTest : public ::testing::TestWithParam<RankCount> {
 protected:
  void each(const std::function<void(Pair&)>& body) {
    on_pairs(GetParam().ranks, GetParam().threads, body);
  }
  bool few() const { return !GetParam().threads && GetParam().ranks > 1; }  // they take turns
};
INSTANTIATE_TEST_SUITE_P(Ranks, CollectivesTest,
                         ::testing::Values(RankCount{1, true}, RankCount{2, true},
                                           RankCount{3, true}, RankCount{4, true},
                                           RankCount{2, false}, RankCount{4, false}),
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

TEST_P(CollectivesTest, RowsMoveByATableThatNoCpuReads) {
  each([&](Pair& pair) {
    for (unsigned seed = 0; seed < 6; ++seed) {
      for (const std::int64_t columns : {1, 5, 4096, 100'003}) {
        rows_by_table(pair, seed, columns, Dtype::f32);
        rows_by_table(pair, seed, columns, Dtype::bf16);
      }
    }
    const Device gpu = pair.place();
    std::byte *x = pair.memory(At::ordinary, 0, Dtype::f32), *out = x + 4096;
    const Buffer named(1024);
    const auto copy = [&](std::int64_t slots) {
      pair.gpu.copy_rows({x, Dtype::f32, {2, 8}, gpu}, {out, Dtype::f32, {2, 8}, gpu},
                         ConstTensorView(named.data(), Dtype::i32, {pair.size(), slots}, gpu));
    };
    need_error(ErrorKind::invalid_argument, "another table was taken", [&] { copy(3); });
    need_error(ErrorKind::invalid_argument, "ordinary memory was taken", [&] { copy(2); });
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
