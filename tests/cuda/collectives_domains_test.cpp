// Collectives on GPUs in several virtual domains, through the public API: the bits of the host
// engine's in the same domains. Skips without a GPU.
#include <numeric>

#include "collectives_pair.hpp"

namespace ferry::test {
namespace {

struct InDomains {
  int ranks;
  int size;
  bool threads;
};

class CollectivesInDomains : public ::testing::TestWithParam<InDomains> {
 protected:
  void each(const std::function<void(Pair&)>& body) {
    on_pairs(GetParam().ranks, GetParam().threads, body, GetParam().size);
  }
};
INSTANTIATE_TEST_SUITE_P(Domains, CollectivesInDomains,
                         ::testing::Values(InDomains{2, 1, true}, InDomains{3, 2, true},
                                           InDomains{4, 2, true}, InDomains{4, 2, false},
                                           InDomains{4, 1, false}),
                         [](const auto& one) {
                           return std::to_string(one.param.ranks) + "By" +
                                  std::to_string(one.param.size) +
                                  (one.param.threads ? "Threads" : "Processes");
                         });

TEST_P(CollectivesInDomains, ReduceAsTheHostDoes) {
  each([&](Pair& pair) {
    std::vector<Case> all{
        {Dtype::f32, ReduceOp::sum, 0},       {Dtype::f32, ReduceOp::sum, 1},
        {Dtype::f32, ReduceOp::mean, 1000},   {Dtype::bf16, ReduceOp::mean, 20'001},
        {Dtype::f16, ReduceOp::sum, 300'001}, {Dtype::i64, ReduceOp::max, 1000},
        {Dtype::u8, ReduceOp::sum, 20'001},   {Dtype::bf16, ReduceOp::product, 3},
        {Dtype::f16, ReduceOp::min, 1000},    {Dtype::i32, ReduceOp::sum, 400'003}};
    for (const Case& c : all) {
      for (const At at : kAll) reduce(pair, c, at);
    }
    // Many steps of rooms that are full.
    reduce(pair, {Dtype::f32, ReduceOp::sum, 5'000'003}, At::registered);
    reduce(pair, {Dtype::bf16, ReduceOp::mean, 5'000'001}, At::ordinary);
    for (const std::int64_t count : {1, 1001, 300'003}) guarded(pair, count);
  });
}

TEST_P(CollectivesInDomains, MoveAsTheHostDoes) {
  each([&](Pair& pair) {
    for (const std::int64_t count : {0, 1, 5001, 400'000, 3'000'001}) {
      for (const At at : kAll) move(pair, count, at);
    }
    for (const std::int64_t scale : {1, 1000, 190'001}) {
      for (const At at : kAll) split(pair, scale, at);
    }
  });
}

TEST_P(CollectivesInDomains, SumsCrossInCodes) {
  each([&](Pair& pair) {
    constexpr std::int64_t kCount = 1'000'000;
    std::mt19937 random(static_cast<unsigned>(pair.rank()));
    std::normal_distribution<float> normal;
    std::vector<float> mine(index(kCount));
    for (float& value : mine) value = normal(random);
    std::byte* x = pair.memory(At::registered, 0, Dtype::f32);
    std::byte* every = pair.memory(At::registered, 1, Dtype::f32);
    const auto sum = [&](ReduceFormat format) {
      pair.copier.put(x, mine);
      pair.gpu.all_reduce(pair.view(x, Dtype::f32, kCount),
                          {.op = ReduceOp::mean, .format = format});
      const Bytes bytes = pair.get(x, mine.size() * 4);
      std::vector<float> got(mine.size());
      std::memcpy(got.data(), bytes.data(), bytes.size());
      return got;
    };
    const std::vector<float> exact = sum(ReduceFormat::exact);
    for (const ReduceFormat format : {ReduceFormat::bf16, ReduceFormat::f16, ReduceFormat::e4m3}) {
      const std::vector<float> coded = sum(format);
      double error = 0, signal = 0;
      for (std::size_t i = 0; i < coded.size(); ++i) {
        error += std::pow(double(coded[i]) - exact[i], 2);
        signal += std::pow(double(exact[i]), 2);
      }
      need(error > 0 && error < signal * (format == ReduceFormat::e4m3 ? 0.0025 : 1e-5),
           std::string(ferry::name_of(format)) + ": relative error " +
               std::to_string(std::sqrt(error / signal)));
      pair.gpu.all_gather(pair.view(x, Dtype::f32, kCount),
                          pair.view(every, Dtype::f32, kCount * pair.size()));
      const Bytes own = pair.get(x, mine.size() * 4);
      for (int r = 0; r < pair.size(); ++r) {
        need_same(Dtype::f32, pair.get(every + index(r) * own.size(), own.size()), own,
                  "of rank " + std::to_string(r));
      }
    }
  });
}

// Work of the caller's streams before the calls and behind them, which nobody waits for between.
TEST_P(CollectivesInDomains, StreamsKeepTheOrderOfCalls) {
  each([&](Pair& pair) {
    OwnStream a(pair.device), b(pair.device);
    const std::int64_t count = 200'000;
    const std::size_t bytes = index(count) * 4;
    std::vector<float> ones(index(count), 1.0f);
    std::byte *x = pair.memory(At::registered, 0, Dtype::f32),
              *copy = pair.memory(At::ordinary, 0, Dtype::f32);
    pair.copier.put(x, std::vector<float>(index(count), 0.0f));
    pair.copier.put(copy, ones);
    need(cudaMemcpyAsync(x, copy, bytes, cudaMemcpyDeviceToDevice, a.raw), "cudaMemcpyAsync");
    constexpr int kRounds = 4;
    for (int i = 0; i < kRounds; ++i) {
      Stream* stream = i % 2 == 0 ? &a.stream : &b.stream;
      const Event event = pair.gpu.all_reduce(pair.view(x, Dtype::f32, count), {.stream = stream});
      if (i + 1 < kRounds) (i % 2 == 0 ? b : a).stream.wait(event);
    }
    need(cudaMemcpyAsync(copy, x, bytes, cudaMemcpyDeviceToDevice, b.raw), "cudaMemcpyAsync");
    b.stream.synchronize();
    const Bytes raw = pair.get(copy, bytes);
    std::memcpy(ones.data(), raw.data(), bytes);
    const float expected = std::pow(static_cast<float>(pair.size()), float(kRounds));
    for (const float value : ones) need(value == expected, "sum " + std::to_string(value));
  });
}

// Such a copy keeps all other threads out of the driver until the stream has come to it.
TEST_P(CollectivesInDomains, CopiesToOrdinaryMemoryFollow) {
  if (GetParam().threads && GetParam().size > 1) GTEST_SKIP() << "ranks of a domain share a driver";
  each([&](Pair& pair) {
    OwnStream own(pair.device);
    for (const std::int64_t count : {24, 200'000}) {
      std::byte* x = pair.memory(At::ordinary, 0, Dtype::f32);
      std::vector<float> sums(index(count), 1.0f);
      pair.copier.put(x, sums);
      pair.gpu.all_reduce(pair.view(x, Dtype::f32, count), {.stream = &own.stream});
      need(cudaMemcpyAsync(sums.data(), x, sums.size() * sizeof(float), cudaMemcpyDeviceToHost,
                           own.raw),
           "cudaMemcpyAsync");
      own.stream.synchronize();
      for (const float sum : sums)
        need(sum == static_cast<float>(pair.size()), "sum " + std::to_string(sum));
    }
  });
}

TEST_P(CollectivesInDomains, RanksThatDisagreeLearnItAndGoOn) {
  each([&](Pair& pair) {
    std::byte* x = pair.memory(At::ordinary, 0, Dtype::f32);
    for (const std::int64_t count : {100, 500'000}) {
      const std::int64_t mine = pair.rank() == 0 ? count + 1 : count;
      const Error error = need_error(ErrorKind::mismatch, "another size was taken",
                                     [&] { pair.gpu.all_reduce(pair.view(x, Dtype::f32, mine)); });
      need(std::string(error.what()).find("number of elements") != std::string::npos, error.what());
    }
    reduce(pair, {Dtype::f32, ReduceOp::sum, 500'000}, At::registered);  // they go on
    need_error(ErrorKind::invalid_argument, "one_shot was taken", [&] {
      pair.gpu.all_reduce(pair.view(x, Dtype::f32, 8), {.algorithm = Algorithm::one_shot});
    });
    pair.meet();
    OwnStream own(pair.device);
    need(cudaStreamBeginCapture(own.raw, cudaStreamCaptureModeRelaxed), "cudaStreamBeginCapture");
    need_error(ErrorKind::unsupported, "a captured stream was taken",
               [&] { pair.gpu.all_reduce(pair.view(x, Dtype::f32, 8), {.stream = &own.stream}); });
    cudaGraph_t graph = nullptr;
    need(cudaStreamEndCapture(own.raw, &graph), "cudaStreamEndCapture");
    cudaGraphDestroy(graph);
    pair.gpu.barrier();
  });
}

}  // namespace
}  // namespace ferry::test
