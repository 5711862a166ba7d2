// launch_fan_out and launch_sum_slots against the definition, every byte.
//   kernel_expert_major_test [--seed n] [--repeat n] [--following]
//   kernel_expert_major_test --small [--ranks n] a few short cases, for sanitize.sh
#include <algorithm>
#include <cstdio>
#include <string>

#include "cuda/kernels/base/load.hpp"
#include "expert_major_case.hpp"

namespace ferry::cuda::test {
namespace {

ExpertCase random_case(Random& random, int ranks) {
  ExpertCase c;
  c.shape.ranks = ranks;
  c.shape.topk = pick(random, {1, 2, 3, 4, 8, 16, 33, 64});
  // 5000 local experts do not fit the counters in shared memory.
  c.shape.experts = pick<std::int64_t>(random, {1, 3, 8, 64, 256, 384, 2000, 5000});
  c.shape.unused_percent = pick(random, {0, 0, 20, 90});
  c.dtype = pick(random, {Dtype::f32, Dtype::bf16, Dtype::f16});
  c.row_bytes =
      pick<std::int64_t>(random, {16, 48, 512, 528, 2048, 4096, 4112, 5760, 14336, 40000});
  c.scale_columns = pick<std::int64_t>(random, {0, 1, 3, 56, 112});
  c.alignment = pick<std::int64_t>(random, {1, 1, 8, 16, 128});
  // Padding and slots stay small enough for the CPU's arithmetic.
  if (c.shape.experts / ranks * c.alignment * c.row_bytes > 4 << 20) c.alignment = 1;
  c.spare = pick<std::int64_t>(random, {0, 1, 77});
  c.out_spare = pick<std::int64_t>(random, {0, 1, 77});
  const std::int64_t most =
      std::clamp<std::int64_t>((12 << 20) / (c.row_bytes * c.shape.topk * ranks), 1, 120);
  for (int r = 0; r < ranks; ++r) {
    c.shape.tokens.push_back(random.below(6) == 0 ? 0 : random.below(most) + 1);
  }
  c.weighted = random.below(2) == 0;
  c.num_sms = pick(random, {1, 2, 5, 16, 132});
  c.sum.vectors = pick(random, {0, 1, 2, 4, 7, 8});
  c.sum.warps = pick(random, {0, 1, 3, 16});
  c.sum.stages = pick(random, {0, 1, 2, 5});
  c.sum.spread = random.below(2) == 0;
  c.fan_out.piece_bytes = pick(random, {0, 16, 512, 1040, 4096});
  c.fan_out.stages = pick(random, {0, 3, 5});
  return c;
}

FanOutParameters fan_out_parameters(KernelGroup& group, const ExpertCase& c,
                                    const ExpertRows& local, int rank, const Bytes& rows,
                                    const std::vector<float>& scales) {
  FanOutParameters p;
  p.group = group.view(rank);
  p.plan = local.plan;
  const std::int64_t topk = c.shape.topk;
  auto* ids = take<std::int32_t>(group, rank, local.capacity * topk);
  group.copy_in(rank, ids, local.ids.data(), local.ids.size() * sizeof(std::int32_t));
  p.ids = ids;
  p.rows = group.upload(rank, rows).data;
  p.row_bytes = c.row_bytes;
  p.capacity = local.capacity;
  p.alignment = c.alignment;
  p.out_capacity = local.out_capacity;
  p.out = take<std::byte>(group, rank, local.out_capacity * c.row_bytes);
  if (c.scale_columns > 0) {
    p.scales = reinterpret_cast<const float*>(group.upload(rank, scales).data);
    p.scale_columns = c.scale_columns;
    p.out_scales = take<float>(group, rank, local.out_capacity * c.scale_columns);
  }
  p.slot_rows = take<std::int64_t>(group, rank, local.capacity * topk);
  p.expert_offsets = take<std::int64_t>(group, rank, local.experts + 1);
  const auto scratch = static_cast<std::int64_t>(fan_out_scratch_bytes(p.capacity, local.experts));
  p.scratch = reinterpret_cast<std::int32_t*>(take<std::byte>(group, rank, scratch));
  p.num_sms = c.num_sms;
  return p;
}

/// With the slot rows that the fan-out has made.
SumSlotsParameters sum_parameters(KernelGroup& group, const ExpertCase& c, const ExpertRows& local,
                                  int rank, const FanOutParameters& fan_out, const Bytes& rows,
                                  const std::vector<float>& weights) {
  SumSlotsParameters p;
  p.group = group.view(rank);
  p.plan = local.plan;
  p.slot_rows = fan_out.slot_rows;
  p.rows = group.upload(rank, rows).data;
  p.input_rows = local.out_capacity;
  if (c.weighted) p.weights = reinterpret_cast<const float*>(group.upload(rank, weights).data);
  p.dtype = c.dtype;
  p.columns = c.row_bytes / static_cast<std::int64_t>(size_of(c.dtype));
  p.capacity = local.capacity;
  p.out = take<std::byte>(group, rank, local.capacity * c.row_bytes);
  p.num_sms = c.num_sms;
  return p;
}

void check_sums(KernelGroup& group, const ExpertCase& c, const ExpertRows& local, int rank,
                const SumSlotsParameters& p, const Bytes& expected) {
  const std::int64_t count = local.received * p.columns;
  const Bytes got = group.download<std::byte>(rank, p.out, expected.size() + kGuard);
  const std::int64_t differs = first_difference(got.data(), expected.data(), c.dtype, count);
  if (differs >= 0) {
    stop("sum of slots, " + c.text() + ": rank " + std::to_string(rank) + ", row " +
         std::to_string(differs / p.columns) + ", column " + std::to_string(differs % p.columns) +
         ": got " + std::to_string(conformance::load(got.data(), c.dtype, differs)) +
         ", expected " + std::to_string(conformance::load(expected.data(), c.dtype, differs)));
  }
  for (std::size_t i = expected.size(); i < got.size(); ++i) {
    if (got[i] != std::byte{0xCB}) stop("sum of slots wrote rows that have not come: " + c.text());
  }
}

void run_case(KernelGroup& group, const ExpertCase& c, Random& random) {
  group.reset_arena();
  const Exchange x = make_exchange(c.shape, random);
  for (int r = 0; r < c.shape.ranks; ++r) {  // local work: one rank after another
    FERRY_CUDA_CHECK(cudaSetDevice(group.device(r)));
    const ExpertRows local = make_expert_rows(group, c, x, r);
    const Bytes rows = random_elements(random, Dtype::f32, local.capacity * c.row_bytes / 4);
    const auto scales = random_floats(random, local.capacity * c.scale_columns);
    const FanOutParameters p = fan_out_parameters(group, c, local, r, rows, scales);
    FERRY_CUDA_CHECK(launch_fan_out(p, group.stream(r), c.fan_out));
    group.wait_well();
    check_fan_out(group, c, local, r, p, rows, scales);
    const auto element = static_cast<std::int64_t>(size_of(c.dtype));
    const Bytes outputs =
        random_elements(random, c.dtype, local.out_capacity * c.row_bytes / element);
    const auto weights = random_floats(random, local.capacity * c.shape.topk);
    const auto sums = sum_parameters(group, c, local, r, p, outputs, weights);
    FERRY_CUDA_CHECK(launch_sum_slots(sums, group.stream(r), c.sum));
    group.wait_well();
    check_sums(group, c, local, r, sums, expect_sums(c, local, outputs, weights));
  }
}

/// Every path once, a few tokens each.
void run_small(std::uint64_t seed, int ranks) {
  Random random(seed);
  KernelGroup group({.ranks = ranks, .arena_bytes = std::size_t{32} << 20});
  run_barrier(group);
  for (const std::int64_t bytes : {16, 528, 5760}) {
    for (const std::int64_t scales : {0, 3}) {
      ExpertCase c = random_case(random, ranks);
      c.shape.topk = 4;
      c.shape.experts = 8 * ranks;
      c.row_bytes = bytes;
      c.scale_columns = scales;
      c.alignment = scales > 0 ? 8 : 1;
      c.weighted = scales > 0;
      c.num_sms = 3;
      c.sum = {};
      c.fan_out = {};
      for (std::int64_t& tokens : c.shape.tokens) tokens = 5 + tokens % 20;
      run_case(group, c, random);
    }
  }
  std::printf("%d ranks: small cases as expected\nPASSED\n", ranks);
}

/// A peer that sends ids of no expert, or other routes than it counted, is caught; nothing is
/// written outside `out`.
void reports_violations(Random& random, std::int32_t claim) {
  KernelGroup group({.ranks = 2, .arena_bytes = std::size_t{32} << 20});
  run_barrier(group);
  ExpertCase c;
  c.shape = {2, 16, 4, {50, 50}, 0};
  c.row_bytes = 4112;
  c.num_sms = 3;
  const Exchange x = make_exchange(c.shape, random);
  ExpertRows local = make_expert_rows(group, c, x, 0);
  std::int32_t& last = local.ids.back();  // rank 1 sent it
  last = last == claim ? claim + 1 : claim;
  const Bytes rows = random_elements(random, Dtype::f32, local.capacity * c.row_bytes / 4);
  const FanOutParameters p = fan_out_parameters(group, c, local, 0, rows, {});
  group.settle();
  FERRY_CUDA_CHECK(cudaSetDevice(group.device(0)));
  FERRY_CUDA_CHECK(launch_fan_out(p, group.stream(0)));
  group.wait();
  const Failure& fatal = group.fatal(0);
  const int peer = claim < -1 || claim >= local.experts ? 1 : -1;
  if (fatal.reason != Reason::violation || fatal.peer != peer) {
    stop("the claim " + std::to_string(claim) + " was not found: " + describe(fatal));
  }
  const Bytes guard =
      group.download<std::byte>(0, p.out + local.out_capacity * c.row_bytes, kGuard);
  for (const std::byte b : guard) {
    if (b != std::byte{0xCB}) stop("bytes behind out were written");
  }
}

void test(int argc, char** argv) {
  const auto seed = static_cast<std::uint64_t>(option(argc, argv, "--seed", 1));
  const auto repeat = option(argc, argv, "--repeat", 40);
  if (has_option(argc, argv, "--following")) {
    test_following(seed, repeat);
    std::printf("PASSED\n");
    return;
  }
  std::printf("seed %llu, %lld cases for each number of ranks, %d GPUs\n",
              static_cast<unsigned long long>(seed), static_cast<long long>(repeat), gpu_count());
  for (const int ranks : {1, 2, 3, 4, 8}) {
    Random random(seed * 1000003 + static_cast<std::uint64_t>(ranks));
    KernelGroup group({.ranks = ranks, .arena_bytes = std::size_t{384} << 20});
    run_barrier(group);
    for (std::int64_t i = 0; i < repeat; ++i) run_case(group, random_case(random, ranks), random);
    std::printf("%d ranks: all bytes as expected\n", ranks);
    std::fflush(stdout);
  }
  Random random(seed);
  for (const std::int32_t claim : {8, -2, 0x7fffffff, 3}) reports_violations(random, claim);
  test_combine_beside_sums(seed, repeat);
  test_following(seed, repeat);
  std::printf("PASSED\n");
}

}  // namespace
}  // namespace ferry::cuda::test

int main(int argc, char** argv) {
  using namespace ferry::cuda;
  test::prepare_process();
  for (int device = 0; device < test::gpu_count(); ++device) {
    FERRY_CUDA_CHECK(cudaSetDevice(device));
    FERRY_CUDA_CHECK(load_throughput_kernels());
  }
  if (test::has_option(argc, argv, "--small")) {
    test::run_small(1, static_cast<int>(test::option(argc, argv, "--ranks", 1)));
  } else {
    test::test(argc, argv);
  }
  return 0;
}
