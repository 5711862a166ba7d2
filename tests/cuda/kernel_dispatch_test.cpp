// plan, dispatch and routes on GPUs against a naive reading of their definition; failures; times.
//   kernel_dispatch_test [--seed N] [--repeat N]
//   kernel_dispatch_test --small [--ranks N]     a few short cases, for sanitize.sh
#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <string>

#include "cuda/kernels/base/barrier.hpp"
#include "cuda/kernels/base/load.hpp"
#include "dispatch_case.hpp"

namespace ferry::cuda::test {

namespace {

std::size_t body_bytes(int ranks) {
  return static_cast<std::size_t>(ranks + 10000) * 4;
}

void load_kernels() {
  for (int i = 0; i < gpu_count(); ++i) {
    FERRY_CUDA_CHECK(cudaSetDevice(i));
    for (const auto load : {load_plan_kernels, load_dispatch_kernels, load_routes_kernels,
                            load_barrier_kernels, load_combine_kernels}) {
      FERRY_CUDA_CHECK(load());
    }
  }
}

DispatchCase random_case(int ranks, int topk, std::int64_t row_bytes, Random& random) {
  DispatchCase c;
  c.ranks = ranks;
  c.topk = topk;
  c.row_bytes = row_bytes;
  const std::int64_t experts[] = {ranks * 8 + 3, 256, 1, 384, ranks > 1 ? ranks - 1 : 2, 10000};
  c.experts = experts[random.below(6)];
  c.scale_columns = random.below(2) == 0 ? 0 : 1 + random.below(60);
  if (c.scale_columns > 4 && random.below(2) == 0) c.scale_columns = c.scale_columns / 4 * 4;
  c.strided_scales = random.below(3) == 0;
  c.weights = random.below(2) == 0;
  c.wide = random.below(2) == 0;
  c.strided_ids = random.below(3) == 0;
  c.pattern = static_cast<Pattern>(random.below(8) > 3 ? 0 : 1 + random.below(4));
  const std::int64_t most = std::min<std::int64_t>(400, 3'000'000 / row_bytes + 8);
  for (int r = 0; r < ranks; ++r) {
    c.tokens.push_back(random.below(5) == 0 ? random.below(3) : random.below(most));
  }
  if (row_bytes <= 256 && random.below(3) == 0) c.tokens[0] += 9000;  // several rounds of a plan
  c.slack = random.below(2) == 0 ? 0 : random.below(40);
  c.num_sms = 1 + static_cast<int>(random.below(12));
  c.early = random.below(2) == 0;
  c.glued = c.early && random.below(2) == 0;
  return c;
}

void run_case(KernelGroup& group, const DispatchCase& c, std::uint64_t seed) {
  group.reset_arena();
  const World world = make_world(c, seed);
  DispatchRun run(group, world);
  run.launch_plans();
  run.launch_dispatches(true);
  run.launch_all_routes();
  group.wait_well();
  for (int r = 0; r < c.ranks; ++r) {
    run.check_plan(r);
    run.check_rows(r);
    run.check_side(r, true);
    run.check_more_routes(r, true);
  }
  run.poison();
  run.launch_dispatches(false);  // cached
  group.wait_well();
  for (int r = 0; r < c.ranks; ++r) {
    run.check_rows(r);
    run.check_side(r, false);
  }
}

void run_matrix(std::uint64_t seed, int repeat) {
  int cases = 0;
  for (const int ranks : {1, 2, 3, 4, 8}) {
    KernelGroup group({ranks, std::size_t{384} << 20, body_bytes(ranks), 20'000'000'000});
    for (int round = 0; round < repeat; ++round) {
      for (const int topk : {1, 2, 8, 16}) {
        for (const std::int64_t row : {16, 256, 5760, 14336, 16384, 40000}) {
          const std::uint64_t own = seed * 1000003 + static_cast<std::uint64_t>(cases++);
          Random random(own);
          run_case(group, random_case(ranks, topk, row, random), own);
        }
      }
    }
    std::printf("ranks %d: %d cases so far\n", ranks, cases);
    std::fflush(stdout);
  }
}

/// Every path once, a few tokens each.
void run_small(std::uint64_t seed, int ranks) {
  KernelGroup group({ranks, std::size_t{16} << 20, body_bytes(ranks), 20'000'000'000});
  int cases = 0;
  for (const int topk : {2, 8}) {
    for (const std::int64_t row : {16, 5760}) {
      for (const std::int64_t scales : {0, 3}) {
        const std::uint64_t own = seed * 1000003 + static_cast<std::uint64_t>(cases++);
        Random random(own);
        DispatchCase c = random_case(ranks, topk, row, random);
        c.experts = 8 * ranks + 3;
        c.scale_columns = scales;
        c.weights = scales > 0;
        c.num_sms = 2;
        for (std::int64_t& tokens : c.tokens) tokens = 5 + tokens % 20;
        run_case(group, c, own);
      }
    }
  }
  std::printf("ranks %d: %d small cases\n", ranks, cases);
}

/// Hidden sizes around blocks, steps and pieces; scales that suit the copy engine, and not.
void run_quantised(std::uint64_t seed, int repeat) {
  int cases = 0;
  for (const int ranks : {1, 3, 4}) {
    KernelGroup group({ranks, std::size_t{384} << 20, body_bytes(ranks), 20'000'000'000});
    for (int round = 0; round < repeat; ++round) {
      for (const Dtype dtype : {Dtype::bf16, Dtype::f16, Dtype::f32}) {
        for (const std::int64_t hidden :
             {16, 112, 128, 144, 512, 528, 640, 2048, 2880, 4096, 7168, 7184, 8192, 12304}) {
          const std::uint64_t own = seed * 1000037 + static_cast<std::uint64_t>(cases++);
          Random random(own);
          DispatchCase c = random_case(ranks, random.below(2) == 0 ? 2 : 8, hidden, random);
          for (std::int64_t& tokens : c.tokens) tokens = std::min<std::int64_t>(tokens, 300);
          c.scale_columns = (hidden + 127) / 128;
          c.strided_scales = false;
          c.quantize = true;
          c.round_scale = random.below(3) == 0;
          c.x_dtype = dtype;
          run_case(group, c, own);
        }
      }
    }
  }
  std::printf("quantised: %d cases good\n", cases);
  std::fflush(stdout);
}

/// Masks of several words, tokens with more than 32 destinations. Streams that share a hardware
/// queue would wait for each other, so this needs enough GPUs.
void run_many_ranks(std::uint64_t seed) {
  for (const int ranks : {40, kMaxDomain}) {
    if (ranks > 30 * gpu_count()) continue;
    KernelGroup group({ranks, std::size_t{64} << 20, body_bytes(ranks), 20'000'000'000});
    for (const int topk : {8, 64}) {
      for (const std::int64_t row : {16, 7168}) {
        const std::uint64_t own = seed * 1000033 + static_cast<std::uint64_t>(topk + row);
        Random random(own);
        DispatchCase c = random_case(ranks, topk, row, random);
        c.num_sms = 1;
        for (std::int64_t& tokens : c.tokens) tokens = std::min<std::int64_t>(tokens, 40);
        if (row == 16) c.tokens[1] = 3000;
        run_case(group, c, own);
      }
    }
    std::printf("ranks %d: good\n", ranks);
  }
}

DispatchCase small_case(int ranks) {
  DispatchCase c;
  c.ranks = ranks;
  c.topk = 2;
  c.experts = 4 * ranks;
  c.row_bytes = 256;
  c.tokens.assign(static_cast<std::size_t>(ranks), 50);
  return c;
}

void expect(const char* what, const Failure& got, Reason reason, Stage stage, int peer,
            std::int64_t detail = -1) {
  if (got.written != 0 && got.reason == reason && got.stage == stage &&
      (peer < 0 || got.peer == peer) && (detail < 0 || got.detail == detail)) {
    return;
  }
  stop(std::string(what) + ": " + describe(got) + "; expected reason " +
       std::to_string(static_cast<int>(reason)) + ", stage " +
       std::to_string(static_cast<int>(stage)) + ", peer " + std::to_string(peer) + ", detail " +
       std::to_string(detail));
}

/// Rank 1 is not launched: the others name it, and their later calls return at once. The deadline
/// is one for launches beside other programs on the same GPUs.
void test_missing_rank(bool plan_too, bool abort) {
  const World world = make_world(small_case(3), 7);
  KernelGroup group({3, std::size_t{8} << 20, body_bytes(3), 500'000'000});
  DispatchRun run(group, world);
  if (!plan_too) run.launch_plans();
  group.wait_well();
  if (abort) {
    group.set_deadline(10'000'000'000);
    group.set_abort(0, 1);
    group.set_abort(2, 1);
  }
  for (int again = 0; again < 2; ++again) {
    group.launch([&](int r) {
      if (r == 1) return;
      FERRY_CUDA_CHECK(plan_too
                           ? launch_plan(run.plan_parameters(r), group.stream(r))
                           : launch_dispatch(run.dispatch_parameters(r, true), group.stream(r)));
    });
    group.wait(5);
  }
  for (const int r : {0, 2}) {
    expect("missing rank", group.fatal(r), abort ? Reason::aborted : Reason::deadline,
           plan_too ? Stage::counts : Stage::grants, 1);
  }
}

/// `change` spoils one rank's dispatch; every rank reports the same, and the group goes on. What an
/// earlier dispatch brought stays.
template <class Change>
void test_refusal(const char* what, bool early, Reason reason, int peer, std::int64_t detail,
                  const Change& change) {
  DispatchCase c = small_case(3);
  c.early = c.glued = early;
  c.weights = true;
  c.slack = 7;
  const World world = make_world(c, 11);
  KernelGroup group({3, std::size_t{8} << 20, body_bytes(3), 5'000'000'000});
  DispatchRun run(group, world);
  const auto refused = [&](bool routes) {
    group.launch([&](int r) {
      DispatchParameters p = run.dispatch_parameters(r, routes);
      p.early = p.glued = routes && early;
      change(r, p);
      FERRY_CUDA_CHECK(launch_dispatch(p, group.stream(r)));
    });
    run.launch_all_routes();
    group.wait(10);
    for (int r = 0; r < 3; ++r) {
      if (group.fatal(r).written != 0) stop(std::string(what) + " is fatal");
      // In a mismatch the odd one names the lowest of the others.
      const int named = reason == Reason::mismatch && r == peer ? 0 : peer;
      expect(what, *group.failure(r), reason, Stage::grants, named, detail);
    }
    group.clear_failures();
  };
  run.launch_plans();
  refused(true);
  for (int r = 0; r < 3; ++r) {
    if (run.came(r)) stop(std::string(what) + ": the routes came");
    run.check_more_routes(r, false);
  }
  run.poison();
  run.launch_plans();
  run.launch_dispatches(true);
  group.wait_well();
  for (int r = 0; r < 3; ++r) run.check_rows(r), run.check_side(r, true);
  refused(false);
  for (int r = 0; r < 3; ++r) {
    run.check_rows(r), run.check_side(r, true), run.check_more_routes(r, true);
  }
}

void test_bad_route(bool early) {
  DispatchCase c = small_case(3);
  c.early = c.glued = early;
  World world = make_world(c, 13);
  world.inputs[1].ids[2 * 17 + 1] = world.c.experts;
  world.inputs[1].ids[2 * 30] = -2;
  KernelGroup group({3, std::size_t{8} << 20, body_bytes(3), 5'000'000'000});
  DispatchRun run(group, world);
  run.launch_plans();
  run.launch_dispatches(true);
  group.wait(10);
  for (int r = 0; r < 3; ++r) {
    if (run.came(r)) stop("bad route: the routes came");
    const HostCounts& counts = *run.placed().counts[KernelGroup::index(r)];
    if (counts.done != 1) stop("bad route: done is not set");
    expect("bad route", counts.failure, Reason::bad_route, Stage::counts, 1, 17 * 64 + 1);
    expect("bad plan", *group.failure(r), Reason::bad_plan, Stage::grants, 0);
    if (group.fatal(r).written != 0) stop("a bad route is fatal");
  }
}

/// A rank that is in a barrier sends no counts: the plans of the others end all the same.
void test_other_call() {
  const World world = make_world(small_case(3), 19);
  KernelGroup group({3, std::size_t{8} << 20, body_bytes(3), 5'000'000'000});
  DispatchRun run(group, world);
  group.launch([&](int r) {
    if (r != 1) {
      FERRY_CUDA_CHECK(launch_plan(run.plan_parameters(r), group.stream(r)));
      return;
    }
    BarrierParameters barrier;
    barrier.group = group.view(r);
    barrier.call.kind = CallKind::barrier;
    barrier.failure = group.failure(r);
    FERRY_CUDA_CHECK(launch_barrier(barrier, group.stream(r)));
  });
  group.wait(3);
  for (const int r : {0, 2}) {
    expect("other call", run.placed().counts[KernelGroup::index(r)]->failure, Reason::mismatch,
           Stage::counts, 1);
  }
  expect("other call", *group.failure(1), Reason::mismatch, Stage::barrier, 0);
}

void test_violation() {
  const World world = make_world(small_case(2), 17);
  KernelGroup group({2, std::size_t{8} << 20, body_bytes(2), 100'000'000});
  DispatchRun run(group, world);
  run.launch_plans();
  group.launch([&](int r) {
    DispatchParameters p = run.dispatch_parameters(r, true);
    if (r == 1) p.offset = (std::size_t{8} << 20) - 256;
    FERRY_CUDA_CHECK(launch_dispatch(p, group.stream(r)));
  });
  group.wait(10);
  expect("violation", group.fatal(0), Reason::violation, Stage::grants, 1);
}

void test_failures() {
  for (const bool plan_too : {true, false}) {
    for (const bool abort : {false, true}) test_missing_rank(plan_too, abort);
  }
  for (const bool early : {false, true}) {
    test_refusal("mismatch", early, Reason::mismatch, 2, -1, [](int r, DispatchParameters& p) {
      if (r == 2) p.call.elements = 999;
    });
    test_refusal("no room", early, Reason::no_room, 1, 12345, [](int r, DispatchParameters& p) {
      if (r == 1) p.status = StepStatus::no_room, p.need_bytes = 12345;
    });
    test_refusal("too many", early, Reason::too_many, 0, -1, [](int r, DispatchParameters& p) {
      if (r == 0) p.capacity -= 8;
    });
    test_bad_route(early);
  }
  test_other_call();
  test_violation();
  std::printf("failures: as expected\n");
}

}  // namespace

int run_main(int argc, char** argv) {
  const auto seed = static_cast<std::uint64_t>(option(argc, argv, "--seed", 1));
  const auto repeat = static_cast<int>(option(argc, argv, "--repeat", 1));
  const bool small = has_option(argc, argv, "--small");
  prepare_process();
  std::printf("seed %llu, %d GPUs\n", static_cast<unsigned long long>(seed), gpu_count());
  load_kernels();
  KernelLimits limits;
  FERRY_CUDA_CHECK(kernel_limits(limits));
  std::printf("paths of %s\n", limits.bulk_copies ? "sm_90" : "sm_80");
  if (small) {
    run_small(seed, static_cast<int>(option(argc, argv, "--ranks", 1)));
  } else {
    test_failures();
    run_quantised(seed, repeat);
    run_many_ranks(seed);
    run_matrix(seed, repeat);
  }
  std::printf("OK\n");
  return 0;
}

}  // namespace ferry::cuda::test

int main(int argc, char** argv) {
  return ferry::cuda::test::run_main(argc, argv);
}
