// A fan-out beside its dispatch: every byte, with all mixtures of ranks that tell, with slots that
// are known and that are not; two groups at once; and calls that end badly, which must end it too.
#include <algorithm>
#include <cstdio>

#include "core/number/quantize.hpp"
#include "cuda/kernels/base/entry.cuh"
#include "following_case.hpp"

namespace ferry::cuda::test {
namespace {

ExpertCase random_case(Random& random, int ranks) {
  ExpertCase c;
  c.shape.ranks = ranks;
  c.shape.topk = pick(random, {1, 2, 4, 8, 33});
  c.shape.experts = pick<std::int64_t>(random, {1, 3, 8, 64, 256, 2000});
  c.shape.unused_percent = pick(random, {0, 20, 90});
  c.row_bytes = pick<std::int64_t>(random, {16, 512, 528, 4112, 14336, 40000});
  c.scale_columns = pick<std::int64_t>(random, {0, 3, 56});  // 3 do not ride with the rows
  c.quantize = random.below(3) == 0;
  if (c.quantize) {
    c.scale_columns = static_cast<std::int64_t>(scale_count(static_cast<std::size_t>(c.row_bytes)));
  }
  c.alignment = pick<std::int64_t>(random, {1, 8, 128});
  if (c.shape.experts / ranks * c.alignment * c.row_bytes > 4 << 20) c.alignment = 1;
  c.spare = pick<std::int64_t>(random, {0, 77});
  c.out_spare = pick<std::int64_t>(random, {0, 77});
  const std::int64_t most =
      std::clamp<std::int64_t>((8 << 20) / (c.row_bytes * c.shape.topk * ranks), 1, 3000);
  for (int r = 0; r < ranks; ++r) {
    const std::int64_t few = random.below(3);
    c.shape.tokens.push_back(few == 0 ? random.below(std::min<std::int64_t>(20, 4 * most))
                                      : random.below(most) + 1);
  }
  // Ranks that share a GPU must all find room for their dispatch.
  const int fair = fair_sms(ranks);
  c.num_sms = std::min(std::max(1, fair / 2), pick(random, {1, 2, 5, 16}));
  c.beside_sms = std::min(std::max(1, fair - c.num_sms), pick(random, {1, 3, 16, 60}));
  c.fan_out.piece_bytes = pick(random, {0, 16, 1040, 4096});
  c.fan_out.group_bytes = pick(random, {0, 1, 9000, 200000});
  return c;
}

/// One call of all ranks, in which some do not tell how far they are. `known`: of the slots an
/// earlier call has made, or has failed to.
void run_call(KernelGroup& group, Following& following, std::uint64_t seed, bool known) {
  group.launch([&](int r) {
    Random own(seed + static_cast<std::uint64_t>(r));
    FollowingRank& mine = following.rank(r);
    mine.dispatch.parts = pick(own, {0, 1, 2, 7, kProgressParts, kProgressParts});
    mine.fan_out.may_be_made = known;
    following.launch(r);
  });
}

void run_case(KernelGroup& group, const ExpertCase& c, Random& random) {
  group.reset_arena();
  for (const bool routes : {true, false}) {
    Following following(group, c, random, routes);
    for (const bool known : {false, true, true}) {
      run_call(group, following, random.next(), known);
      group.wait_well();
      following.check_and_poison(!routes);
    }
  }
}

ExpertCase small_case(int ranks) {
  ExpertCase c;
  c.shape = {ranks, 16, 4, std::vector<std::int64_t>(KernelGroup::index(ranks), 200), 0};
  c.row_bytes = 4112;
  c.num_sms = 2;
  c.beside_sms = 5;
  return c;
}

/// A call that is refused ends its fan-out, and the next is well.
void refused() {
  KernelGroup group({.ranks = 2, .arena_bytes = std::size_t{64} << 20});
  run_barrier(group);
  Random random(5);
  Following following(group, small_case(2), random, false);
  following.rank(1).dispatch.status = StepStatus::no_room;
  group.launch([&](int r) { following.launch(r); });
  group.wait(5);
  for (int r = 0; r < 2; ++r) {
    if (group.failure(r)->reason != Reason::no_room || group.fatal(r).written != 0) {
      stop("a refused call that is followed: " + describe(*group.failure(r)));
    }
    following.check_nothing_copied(r);
  }
  group.clear_failures();
  following.rank(1).dispatch.status = StepStatus::ok;
  // The slots were to be made by the call that was refused.
  run_call(group, following, 1, true);
  group.wait_well();
  following.check_and_poison(true);
  run_call(group, following, 2, true);
  group.wait_well();
  following.check_and_poison(true);
}

/// Two groups on the same GPUs, from streams of their own.
void two_groups() {
  const int ranks = std::min(2, gpu_count());
  KernelGroup a({.ranks = ranks, .arena_bytes = std::size_t{256} << 20});
  KernelGroup b({.ranks = ranks, .arena_bytes = std::size_t{256} << 20});
  run_barrier(a);
  run_barrier(b);
  Random random(7);
  ExpertCase c = small_case(ranks);
  c.shape.tokens.assign(KernelGroup::index(ranks), 1500);
  c.num_sms = 16;
  c.beside_sms = 40;
  Following in_a(a, c, random, true), in_b(b, c, random, true);
  for (int call = 0; call < 20; ++call) {
    // In opposite orders on the ranks.
    for (int r = 0; r < ranks; ++r) {
      FERRY_CUDA_CHECK(cudaSetDevice(a.device(r)));
      (r % 2 == 0 ? in_a : in_b).launch(r);
      (r % 2 == 0 ? in_b : in_a).launch(r);
    }
    a.wait_well();
    b.wait_well();
    in_a.check_and_poison();
    in_b.check_and_poison();
  }
}

/// Enters a call and grants all, and then never sends a row.
__global__ void enter_only(const __grid_constant__ DispatchParameters p) {
  using namespace device;
  std::byte* control = first_control(p.group);
  std::uint64_t generation;
  if (!begin_call(p.group, generation)) return;
  post_entry(p.group, control, generation, p.call, [&](DeviceHead& head) {
    head.segment = p.segment;
    head.offset = p.offset;
    head.side_segment = p.side_segment;
    head.side_offset = p.side_offset;
    head.rows = p.capacity;
    head.blocks = 1;
  });
}

enum class Death { before, within, aborted };

/// Rank 1 does not come, or dies among the rows: rank 0's fan-out ends, and so does the next
/// call's.
void dies(Death death) {
  KernelGroup group({.ranks = 2, .arena_bytes = std::size_t{64} << 20, .deadline_ns = 300'000'000});
  run_barrier(group);
  Random random(6);
  Following following(group, small_case(2), random, false);
  if (death == Death::aborted) {
    group.set_deadline(20'000'000'000);
    group.set_abort(0, 1);
  }
  for (int again = 0; again < 2; ++again) {
    if (death != Death::before && again == 0) {
      FERRY_CUDA_CHECK(cudaSetDevice(group.device(1)));
      enter_only<<<1, 64, 0, group.stream(1)>>>(following.rank(1).dispatch);
      FERRY_CUDA_CHECK(cudaGetLastError());
    }
    FERRY_CUDA_CHECK(cudaSetDevice(group.device(0)));
    following.launch(0);
    group.wait(5);
  }
  const Failure& fatal = group.fatal(0);
  const Stage stage = death == Death::before ? Stage::grants : Stage::rows;
  const Reason reason = death == Death::aborted ? Reason::aborted : Reason::deadline;
  if (fatal.reason != reason || fatal.stage != stage || fatal.peer != 1) {
    stop("a death in a call that is followed: " + describe(fatal));
  }
  following.check_nothing_copied(0, 0);
}

}  // namespace

void test_following(std::uint64_t seed, std::int64_t repeat) {
  refused();
  for (const Death death : {Death::before, Death::within, Death::aborted}) dies(death);
  std::printf("beside: all ends as it should\n");
  two_groups();
  std::printf("beside: two groups at once\n");
  std::fflush(stdout);
  for (const int ranks : {1, 2, 3, 4, 8}) {
    Random random(seed * 1000033 + static_cast<std::uint64_t>(ranks));
    KernelGroup group({.ranks = ranks, .arena_bytes = std::size_t{512} << 20});
    run_barrier(group);
    for (std::int64_t i = 0; i < repeat; ++i) run_case(group, random_case(random, ranks), random);
    std::printf("%d ranks: all bytes as expected of fan-outs that follow\n", ranks);
    std::fflush(stdout);
  }
}

}  // namespace ferry::cuda::test
