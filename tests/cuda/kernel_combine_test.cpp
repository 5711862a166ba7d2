// launch_combine against the definition, every byte.
//   kernel_combine_test [--seed n] [--repeat n] [--ranks n]
//   kernel_combine_test --small [--ranks n]      a few short cases, for sanitize.sh
#include <algorithm>
#include <cstdio>
#include <cstring>
#include <string>

#include "combine_case.hpp"
#include "cuda/kernels/base/load.hpp"

namespace ferry::cuda::test {
namespace {

CombineCase random_case(Random& random, int ranks) {
  CombineCase c;
  c.shape.ranks = ranks;
  c.shape.topk = pick(random, {1, 2, 3, 4, 6, 8, 11, 16});
  c.shape.experts = pick<std::int64_t>(random, {1, 3, 8, 16, 64, 256, 384});
  c.shape.unused_percent = pick(random, {0, 0, 20, 90, 100});
  c.dtype = pick(random, {Dtype::f32, Dtype::bf16, Dtype::f16});
  const std::int64_t bytes =
      pick<std::int64_t>(random, {16, 48, 512, 528, 2048, 2064, 5760, 14336, 16384, 40000});
  c.columns = bytes / static_cast<std::int64_t>(size_of(c.dtype));
  const std::int64_t most = bytes > 10000 ? 40 : bytes > 2000 ? 150 : 400;
  const bool none = random.below(12) == 0;
  for (int r = 0; r < ranks; ++r) {
    c.shape.tokens.push_back(none || random.below(6) == 0 ? 0 : random.below(most) + 1);
  }
  for (bool& bias : c.bias) bias = random.below(3) == 0;
  c.weights = random.below(2) == 0;
  c.num_sms = std::min(pick(random, {1, 2, 3, 5, 11}), fair_sms(ranks));
  c.tuning.vectors = pick(random, {0, 1, 2, 4, 7, 8});
  c.tuning.warps = pick(random, {0, 1, 3, 16});
  c.tuning.stages = pick(random, {0, 0, 1, 2, 5});
  c.tuning.spread = random.below(2) == 0;
  c.tuning.pulls = pick(random, {0, 1, 8, 24, 64});
  return c;
}

conformance::ExpectedCombine expected_of(const CombineCase& c, const CombineSetup& setup,
                                         int rank) {
  conformance::CombineInput input;
  input.dtype = c.dtype;
  input.hidden = c.columns;
  input.row = [&](int d, std::int64_t row, std::byte* out) {
    std::copy_n(setup.rows[at(d)].data() + row * c.row_bytes(), c.row_bytes(), out);
  };
  input.weight = [&](int d, std::int64_t row, int k) {
    return setup.weights[at(d)][at(row * c.shape.topk + k)];
  };
  if (c.bias[0]) input.bias0 = &setup.biases[0][at(rank)];
  if (c.bias[1]) input.bias1 = &setup.biases[1][at(rank)];
  return conformance::expect_combine(setup.exchange.world(), rank, input);
}

void check_guard(const Bytes& bytes, std::size_t from, const std::string& what) {
  for (std::size_t i = from; i < bytes.size(); ++i) {
    if (bytes[i] != std::byte{0xCB}) stop("bytes behind " + what + " were written");
  }
}

void check_rank(KernelGroup& group, const CombineCase& c, const CombineSetup& setup, int rank) {
  const std::int64_t tokens = setup.exchange.tokens(rank), topk = c.shape.topk;
  const std::size_t bytes = at(tokens * c.row_bytes());
  const std::size_t weight_bytes = c.weights ? at(tokens * topk) * sizeof(float) : 0;
  const auto [expected, weights] = expected_of(c, setup, rank);
  const CombineParameters& p = setup.parameters[at(rank)];
  const Bytes got = group.download<std::byte>(rank, p.out, bytes + kGuard);
  const std::int64_t differs =
      first_difference(got.data(), expected.data(), c.dtype, tokens * c.columns);
  if (differs >= 0) {
    stop(c.text() + ": rank " + std::to_string(rank) + ", token " +
         std::to_string(differs / c.columns) + ", column " + std::to_string(differs % c.columns) +
         ": got " + std::to_string(conformance::load(got.data(), c.dtype, differs)) +
         ", expected " + std::to_string(conformance::load(expected.data(), c.dtype, differs)));
  }
  check_guard(got, bytes, "out: " + c.text());
  const Bytes got_weights = group.download<std::byte>(rank, p.out_weights, weight_bytes + kGuard);
  if (weight_bytes > 0 && std::memcmp(got_weights.data(), weights.data(), weight_bytes) != 0) {
    stop(c.text() + ": rank " + std::to_string(rank) + ": weights differ");
  }
  check_guard(got_weights, weight_bytes, "out_weights: " + c.text());
}

void run_case(KernelGroup& group, const CombineCase& c, Random& random) {
  const CombineSetup setup = make_combine(group, c, random);
  group.launch([&](int r) {
    FERRY_CUDA_CHECK(launch_combine(setup.parameters[at(r)], group.stream(r), c.tuning));
  });
  group.wait_well();
  for (int r = 0; r < c.shape.ranks; ++r) check_rank(group, c, setup, r);
}

/// Every path once, a few tokens each.
void run_small(std::uint64_t seed, int ranks) {
  Random random(seed);
  KernelGroup group({.ranks = ranks, .arena_bytes = std::size_t{16} << 20});
  for (const Dtype dtype : {Dtype::f32, Dtype::bf16, Dtype::f16}) {
    for (const std::int64_t bytes : {16, 528, 5760}) {
      CombineCase c = random_case(random, ranks);
      c.shape.topk = 4;
      c.dtype = dtype;
      c.columns = bytes / static_cast<std::int64_t>(size_of(dtype));
      c.num_sms = 2;
      c.tuning = {};
      for (std::int64_t& tokens : c.shape.tokens) tokens = 5 + tokens % 20;
      run_case(group, c, random);
    }
  }
  std::printf("%d ranks: small cases as expected\nPASSED\n", ranks);
}

CombineCase small_case(int ranks) {
  CombineCase c;
  c.shape = {ranks, 16, 4, std::vector<std::int64_t>(at(ranks), 20), 0};
  c.columns = 1032;
  c.num_sms = 2;
  return c;
}

void expect(bool is_so, const std::string& what, const Failure& failure) {
  if (!is_so) stop(what + ": " + describe(failure));
}

/// Ranks that disagree, or have too few rows, move nothing; the next call works.
void refuses_in_peace(Random& random) {
  KernelGroup group({.ranks = 3, .arena_bytes = std::size_t{16} << 20});
  const CombineCase c = small_case(3);
  for (const Reason reason : {Reason::mismatch, Reason::too_many, Reason::no_room}) {
    CombineSetup setup = make_combine(group, c, random);
    CombineParameters& odd = setup.parameters[1];
    if (reason == Reason::mismatch) odd.call.elements += 8;
    if (reason == Reason::too_many) odd.rows -= 1;
    if (reason == Reason::no_room) odd.status = StepStatus::no_room;
    group.launch(
        [&](int r) { FERRY_CUDA_CHECK(launch_combine(setup.parameters[at(r)], group.stream(r))); });
    group.wait();
    for (int r = 0; r < 3; ++r) {
      const Failure& failure = *group.failure(r);
      expect(failure.reason == reason && group.fatal(r).written == 0, "wrong refusal", failure);
      expect(r == 1 || failure.peer == 1, "wrong peer", failure);
      const auto got = group.download<std::byte>(r, setup.parameters[at(r)].out, kGuard);
      check_guard(got, 0, "nothing (a refused call)");
    }
    run_case(group, c, random);
  }
}

/// A rank that never comes is named when the deadline is over; later calls return at once.
void deadline_passes(Random& random) {
  KernelGroup group({.ranks = 2, .arena_bytes = std::size_t{16} << 20, .deadline_ns = 100'000'000});
  const CombineCase c = small_case(2);
  const CombineSetup setup = make_combine(group, c, random);
  for (int call = 0; call < 2; ++call) {
    FERRY_CUDA_CHECK(cudaSetDevice(group.device(0)));
    FERRY_CUDA_CHECK(launch_combine(setup.parameters[0], group.stream(0)));
    group.wait(5);
  }
  const Failure& fatal = group.fatal(0);
  expect(fatal.reason == Reason::deadline && fatal.stage == Stage::descriptors && fatal.peer == 1 &&
             fatal.written == 1,
         "wrong failure at the deadline", fatal);
}

/// A place outside the peer's segment is never read.
void reports_violations(Random& random) {
  KernelGroup group({.ranks = 2, .arena_bytes = std::size_t{16} << 20, .deadline_ns = 500'000'000});
  CombineSetup setup = make_combine(group, small_case(2), random);
  setup.parameters[1].offset = (std::size_t{16} << 20) - 16;
  group.launch(
      [&](int r) { FERRY_CUDA_CHECK(launch_combine(setup.parameters[at(r)], group.stream(r))); });
  group.wait();
  for (int r = 0; r < 2; ++r) {
    expect(group.fatal(r).reason == Reason::violation && group.fatal(r).peer == 1,
           "wrong failure for a violation", group.fatal(r));
  }
}

void test(int argc, char** argv) {
  const auto seed = static_cast<std::uint64_t>(option(argc, argv, "--seed", 1));
  const auto repeat = option(argc, argv, "--repeat", 40);
  const auto only = option(argc, argv, "--ranks", 0);
  std::printf("seed %llu, %lld cases for each number of ranks, %d GPUs\n",
              static_cast<unsigned long long>(seed), static_cast<long long>(repeat), gpu_count());
  for (const int ranks : {1, 2, 3, 4, 8}) {
    if (only != 0 && only != ranks) continue;
    Random random(seed * 1000003 + static_cast<std::uint64_t>(ranks));
    KernelGroup group({.ranks = ranks, .arena_bytes = std::size_t{96} << 20});
    for (std::int64_t i = 0; i < repeat; ++i) run_case(group, random_case(random, ranks), random);
    std::printf("%d ranks: all bytes as expected\n", ranks);
    std::fflush(stdout);
  }
  Random random(seed);
  refuses_in_peace(random);
  deadline_passes(random);
  reports_violations(random);
  std::printf("PASSED\n");
}

}  // namespace
}  // namespace ferry::cuda::test

int main(int argc, char** argv) {
  using namespace ferry::cuda;
  test::prepare_process();
  for (int device = 0; device < test::gpu_count(); ++device) {
    FERRY_CUDA_CHECK(cudaSetDevice(device));
    FERRY_CUDA_CHECK(load_combine_kernels());
    FERRY_CUDA_CHECK(load_barrier_kernels());
  }
  if (test::has_option(argc, argv, "--small")) {
    test::run_small(1, static_cast<int>(test::option(argc, argv, "--ranks", 1)));
  } else {
    test::test(argc, argv);
  }
  return 0;
}
