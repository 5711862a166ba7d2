#include <cstdio>

#include "combine_case.hpp"

namespace ferry::cuda::test {
namespace {

std::size_t at(std::int64_t value) {
  return static_cast<std::size_t>(value);
}

void bench_shape(KernelGroup& group, Gate& gate, const CombineCase& c, const CombineSetup& setup) {
  const Exchange& x = setup.exchange;
  double logical = 0, wire = 0;
  for (int r = 0; r < c.shape.ranks; ++r) {
    logical += double(x.sent(r, false)) * double(c.row_bytes()) / c.shape.ranks;
    wire += double(x.sent(r, true)) * double(c.row_bytes()) / c.shape.ranks;
  }
  SumShape shape;
  const SumTask task{c.row_bytes(), c.shape.tokens[0], c.sms, (c.weights ? kWeightWarps : 0) + 1,
                     combine_pulls(c.sms)};
  FERRY_CUDA_CHECK(make_sum_shape(c.tuning, task, shape));
  const auto samples = time_calls(group, gate, 4, [&](int r) {
    CombineParameters p = setup.parameters[at(r)];
    p.sms = c.sms;
    FERRY_CUDA_CHECK(launch_combine(p, group.stream(r), c.tuning));
  });
  const double median = samples[samples.size() / 2];
  std::printf(
      "{\"bench\": \"combine\", \"ranks\": %d, \"gpus\": %d, \"tokens\": %lld, \"row_bytes\": "
      "%lld, "
      "\"sms\": %d, \"weights\": %d, \"vectors\": %d, \"warps\": %d, \"stages\": %d, \"spread\": "
      "%d, "
      "\"us\": %.1f, \"p95_us\": %.1f, \"logical_gbs\": %.1f, \"wire_gbs\": %.1f}\n",
      c.shape.ranks, gpu_count(), static_cast<long long>(c.shape.tokens[0]),
      static_cast<long long>(c.row_bytes()), c.sms, int{c.weights}, shape.vectors, shape.warps,
      shape.stages, int{shape.spread}, median, samples[samples.size() * 95 / 100],
      logical / median / 1e3, wire / median / 1e3);
  std::fflush(stdout);
}

/// All shapes that the options name, of so many tokens a rank.
void bench_tokens(int argc, char** argv, CombineCase c, std::int64_t tokens) {
  const int ranks = c.shape.ranks;
  c.shape.tokens.assign(at(ranks), tokens);
  const bool spread = option(argc, argv, "--spread", 1) != 0;
  const std::size_t rows = at(tokens) * at(ranks) + at(4 * tokens) + 1024;
  KernelGroup group({.ranks = ranks,
                     .arena_bytes = rows * at(c.row_bytes()) + (256u << 20),
                     .deadline_ns = 10'000'000'000});
  Gate gate;
  Random random(1);
  const CombineSetup setup = make_combine(group, c, random);
  for (const int sms : option_list(argc, argv, "--sms", {4, 8, 16, 24, 32, 64})) {
    for (const int vectors : option_list(argc, argv, "--vectors", {0})) {
      for (const int warps : option_list(argc, argv, "--warps", {0})) {
        for (const int stages : option_list(argc, argv, "--stages", {0})) {
          for (const int pulls : option_list(argc, argv, "--pulls", {0})) {
            if (sms > fair_sms(ranks)) continue;  // ranks that share a GPU must all be resident
            c.sms = sms;
            c.tuning = {vectors, warps, stages, spread, pulls};
            bench_shape(group, gate, c, setup);
          }
        }
      }
    }
  }
}

}  // namespace

void bench_combine(int argc, char** argv) {
  CombineCase c;
  const int ranks = static_cast<int>(option(argc, argv, "--ranks", gpu_count()));
  c.shape = {ranks, 256, 8, {}, 0};
  c.columns = option(argc, argv, "--hidden", 7168);
  c.weights = has_option(argc, argv, "--weights");
  for (const int tokens : option_list(argc, argv, "--tokens", {4096})) {
    bench_tokens(argc, argv, c, tokens);
  }
}

}  // namespace ferry::cuda::test
