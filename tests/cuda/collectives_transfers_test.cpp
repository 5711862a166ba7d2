// send and recv on GPUs of one domain and of several: the bytes of the host engine, tags and
// streams, sizes that differ, a rank that stays away. Skips without a GPU.
#include <chrono>

#include "collectives_pair.hpp"
#include "crew.hpp"

namespace ferry::test {
namespace {

/// `domain`: ranks of one; 0: all.
struct Layout {
  int ranks;
  bool threads;
  int domain = 0;
};
constexpr Layout kLayouts[] = {{2, true},     {3, true},     {4, true},    {2, false},
                               {3, false},    {2, true, 1},  {3, true, 2}, {4, true, 2},
                               {2, false, 1}, {4, false, 2}, {4, false, 1}};

class TransfersTest : public ::testing::TestWithParam<Layout> {
 protected:
  void each(const std::function<void(Pair&)>& body) {
    on_pairs(GetParam().ranks, GetParam().threads, body, GetParam().domain);
  }
};
INSTANTIATE_TEST_SUITE_P(Ranks, TransfersTest, ::testing::ValuesIn(kLayouts), [](const auto& one) {
  const std::string by = one.param.domain > 0 ? "By" + std::to_string(one.param.domain) : "";
  return std::to_string(one.param.ranks) + by + (one.param.threads ? "Threads" : "Processes");
});

/// To the next rank, from the one before: the last of an odd number sends and receives in turn,
/// too.
void pass_on(Collectives& all, const ConstTensorView& x, const TensorView& out, int tag) {
  const int after = (all.rank() + 1) % all.size(),
            before = (all.rank() + all.size() - 1) % all.size();
  if (all.rank() % 2 == 0) (void)all.send(x, after, tag);
  (void)all.recv(out, before, tag);
  if (all.rank() % 2 != 0) (void)all.send(x, after, tag);
}

// More of them than offers have places.
TEST_P(TransfersTest, BytesAreThoseOfTheHost) {
  each([&](Pair& pair) {
    for (const std::int64_t count : {0, 1, 100, 5001, 400'000, 3'000'001}) {
      if (!GetParam().threads && count > 1'000'000) continue;
      for (const At at : kAll) {
        for (int round = 0; round < 3; ++round) {
          const Case c{Dtype::bf16, ReduceOp::sum, count};
          const Bytes mine =
              random_elements(c.dtype, count, static_cast<unsigned>(pair.rank() + 10 * round));
          std::byte *x = pair.memory(at, 0, c.dtype), *out = pair.memory(at, 1, c.dtype);
          Bytes expected(mine.size());
          pair.copier.put(x, mine);
          pass_on(pair.host, {mine.data(), c.dtype, {count}}, {expected.data(), c.dtype, {count}},
                  round);
          pass_on(pair.gpu, pair.view(x, c.dtype, count), pair.view(out, c.dtype, count), round);
          need_same(c.dtype, pair.get(out, mine.size()), expected, words(pair, "recv", c, at));
          need_same(c.dtype, pair.get(x, mine.size()), mine, words(pair, "send", c, at));
        }
      }
    }
  });
}

// What is sent may be written again by work behind it in the stream.
TEST_P(TransfersTest, TagsMatchOnStreamsBesideOtherCalls) {
  each([&](Pair& pair) {
    constexpr std::int64_t kCount = 300'000;
    OwnStream streams[3] = {OwnStream(pair.device), OwnStream(pair.device), OwnStream(pair.device)};
    const int after = (pair.rank() + 1) % pair.size();
    const int before = (pair.rank() + pair.size() - 1) % pair.size();
    std::byte* x[2] = {pair.memory(At::ordinary, 0, Dtype::u8),
                       pair.memory(At::registered, 0, Dtype::u8)};
    std::byte* out[2] = {pair.memory(At::ordinary, 1, Dtype::u8),
                         pair.memory(At::registered, 1, Dtype::u8)};
    std::byte* sum = x[0] + (kBytes / 2);
    const std::vector<float> ones(1000, 1.0f);
    pair.copier.put(sum, ones);
    for (int i = 0; i < 2; ++i) {
      pair.copier.put(x[i], Bytes(kCount, std::byte(10 * pair.rank() + i)));
    }
    for (int i = 0; i < 2; ++i) {
      (void)pair.gpu.send(pair.view(x[i], Dtype::u8, kCount), after, i,
                          {.stream = &streams[i].stream});
      need(cudaMemsetAsync(x[i], 0xff, kCount, streams[i].raw), "cudaMemsetAsync");
    }
    // A call of all ranks while they are under way.
    (void)pair.gpu.all_reduce(pair.view(sum, Dtype::f32, 1000), {.stream = &streams[2].stream});
    for (const int i : {1, 0}) {
      pair.gpu.recv(pair.view(out[i], Dtype::u8, kCount), before, i, {.stream = &streams[2].stream})
          .wait();
      need_same(Dtype::u8, pair.get(out[i], kCount), Bytes(kCount, std::byte(10 * before + i)),
                "tag " + std::to_string(i));
    }
    pair.meet();
  });
}

// Between domains no stream waits for a send: both send first, and the copy to ordinary memory that
// follows a receive comes when that has.
TEST_P(TransfersTest, BothSendFirstBetweenDomains) {
  if (GetParam().domain != 1) GTEST_SKIP() << "one receives first";
  if (GetParam().threads) GTEST_SKIP() << "ranks share a driver";  // which the copy keeps
  each([&](Pair& pair) {
    OwnStream own(pair.device);
    const int after = (pair.rank() + 1) % pair.size();
    const int before = (pair.rank() + pair.size() - 1) % pair.size();
    for (const std::int64_t count : {24, 3'000'000}) {
      std::byte *x = pair.memory(At::registered, 0, Dtype::u8),
                *out = pair.memory(At::ordinary, 1, Dtype::u8);
      pair.copier.put(x, Bytes(index(count), std::byte(pair.rank() + 1)));
      const Event sent =
          pair.gpu.send(pair.view(x, Dtype::u8, count), after, 0, {.stream = &own.stream});
      need(cudaMemsetAsync(x, 0xff, index(count), own.raw), "cudaMemsetAsync");
      (void)pair.gpu.recv(pair.view(out, Dtype::u8, count), before, 0, {.stream = &own.stream});
      Bytes got(index(count));
      need(cudaMemcpyAsync(got.data(), out, got.size(), cudaMemcpyDeviceToHost, own.raw),
           "cudaMemcpyAsync");
      own.stream.synchronize();
      need_same(Dtype::u8, got, Bytes(got.size(), std::byte(before + 1)), "received");
      sent.wait(20s);
    }
    pair.meet();
  });
}

TEST_P(TransfersTest, SizesThatDifferAreNamedOnBothSides) {
  each([&](Pair& pair) {
    std::byte *x = pair.memory(At::ordinary, 0, Dtype::u8),
              *out = pair.memory(At::ordinary, 1, Dtype::u8);
    if (pair.rank() < 2) {
      const Error error = need_error(
          ErrorKind::mismatch, "another size was taken",
          [&] {
            if (pair.rank() == 0) {
              (void)pair.gpu.send(pair.view(x, Dtype::u8, 20), 1, -7);
            } else {
              (void)pair.gpu.recv(pair.view(x, Dtype::u8, 16), 0, -7);
            }
          },
          1 - pair.rank());
      const std::string told = error.what();
      need(told.find("rank 0 sends 20 bytes to rank 1 (tag -7), which expects 16 bytes") !=
               std::string::npos,
           told);
    }
    pair.meet();
    pass_on(pair.gpu, pair.view(x, Dtype::u8, 100), pair.view(out, Dtype::u8, 100), -7);  // goes on
    reduce(pair, {Dtype::f32, ReduceOp::sum, 1000}, At::ordinary);
  });
}

TEST_P(TransfersTest, GraphsAreRefused) {
  each([&](Pair& pair) {
    OwnStream own(pair.device);
    std::byte* x = pair.memory(At::ordinary, 0, Dtype::u8);
    pair.meet();
    const Graph graph(own.raw, [&] {
      need_error(ErrorKind::unsupported, "a transfer was captured", [&] {
        (void)pair.gpu.send(pair.view(x, Dtype::u8, 8), (pair.rank() + 1) % pair.size(), 0,
                            {.stream = &own.stream});
      });
    });
    pair.meet();
  });
}

TEST(TransfersFailures, ARankThatStaysAwayIsNamed) {
  if (gpu_count() == 0) GTEST_SKIP() << "NO GPU";
  const RankBody rank = [&](Bootstrap& bootstrap) {
    const int device = take_gpu(bootstrap);
    GroupConfig config;
    config.backend = Backend::cuda;
    config.deadline = 4s;
    for (const int what : {0, 1, 2, 3}) {
      const bool sends = what % 2 == 0;
      config.domain_size = what / 2;
      const Buffer x(1000);
      Collectives all(borrowed(bootstrap), config);
      bootstrap.all_gather({}, 60s);
      const TensorView view(x.data(), Dtype::u8, {1000}, {DeviceKind::cuda, device});
      if (all.rank() == 0) {
        const Error error = need_error(
            ErrorKind::deadline, "rank 1 was not missed",
            [&] { (void)(sends ? all.send(view, 1, 5) : all.recv(view, 1, 5)); }, 1);
        const std::string told = error.what();
        need(told.find("1000 bytes (tag 5)") != std::string::npos, told);
      }
      bootstrap.all_gather({}, 60s);
    }
  };
  for (const std::string& problem : run_on_crew(2, 1, rank, 90)) ADD_FAILURE() << problem;
}

}  // namespace
}  // namespace ferry::test
