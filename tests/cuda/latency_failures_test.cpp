// Latency kernels: ranks, rows and sums that do not come, calls that differ, routes that are
// refused.
#include <cstdio>
#include <vector>

#include "latency_exchange.hpp"

namespace ferry::cuda::test {

namespace {

/// For ranks that do not come.
GroupOptions hasty_options(const LatencyCase& c) {
  GroupOptions options = options_for(c);
  options.deadline_ns = 30'000'000;
  return options;
}

/// For ranks that all come and do not agree.
GroupOptions patient_options(const LatencyCase& c) {
  GroupOptions options = options_for(c);
  options.deadline_ns = 5'000'000'000;
  return options;
}

/// Rank 1 does not come, or its rows do not: the others mask it, and go on.
void test_masks(bool header_comes, int ll, bool ll128) {
  LatencyCase c = small_latency_case();
  c.ll = ll;
  c.ll128 = ll128;
  if (ll > 0) c.capacity = ll;
  KernelGroup group(hasty_options(c));
  LatencyRun run(group, c);
  exchange_once(group, run, c, 3);  // all is well
  const Absent absent{header_comes ? -1 : 1, header_comes ? 1 : -1};
  std::vector<std::int64_t> tokens{c.capacity / 2, header_comes ? c.capacity / 3 : 0, c.capacity};
  for (const std::uint64_t again : {0, 1, 2}) {
    const CombinePath path = path_of(again);
    const LatencyWorld world = make_latency_world(c, 40 + again, tokens);
    run.upload(world, 0);
    run.poison(0);
    group.launch([&](int r) {
      if (r == 1 && (!header_comes || again > 0)) return;
      LatencyDispatchParameters p = run.dispatch(r, 0);
      if (r == 1) {  // its tags go astray, or its rows
        p.halves = Halves::send;
        p.view.layout.row_tags = p.view.layout.bytes;
        p.view.layout.ll_rows = p.view.layout.bytes;
        for (int d = 0; ll128 && d < c.ranks; ++d) {
          p.view.rows[d] = p.view.peers[d] + p.view.layout.bytes;
        }
      }
      FERRY_CUDA_CHECK(launch_latency_dispatch(p, group.stream(r)));
    });
    group.wait(5);
    if (again > 0) tokens[1] = 0;  // masked before: it has no rows at all
    LatencyWorld seen = world;
    if (again > 0) {
      seen.inputs[1] = {};
    }
    for (const int r : {0, 2}) {
      expect("a mask is fatal", group.fatal(r).written == 0, describe(group.fatal(r)));
      expect("masked", run.masked(r, 1) && !run.masked(r, 0) && !run.masked(r, 2));
      expect("alarm", run.alarm(r).masked == 1, std::to_string(run.alarm(r).masked));
      run.check_dispatch(seen, r, 0, absent);
    }
    run.upload_results(seen, 0);
    group.launch([&](int r) {
      if (r == 1) return;
      FERRY_CUDA_CHECK(launch_latency_combine(run.combine(r, 0, path), group.stream(r)));
    });
    group.wait(5);
    for (const int r : {0, 2}) run.check_combine(seen, r, 0, path, absent);
  }
  std::printf("masks, %s, ll %d, ll128 %d: as expected\n",
              header_comes ? "rows missing" : "rank missing", ll, ll128);
}

/// Rank 1 sends its rows and then no sums.
void test_missing_sums(int ll) {
  LatencyCase c = small_latency_case();
  c.ll = ll;
  if (ll > 0) c.capacity = ll;
  KernelGroup group(hasty_options(c));
  LatencyRun run(group, c);
  const LatencyWorld world = make_latency_world(c, 9, {c.capacity, c.capacity / 3, c.capacity - 2});
  run.upload(world, 1);
  launch_dispatch_all(group, run, 1, Halves::both);
  group.wait_well();
  for (int r = 0; r < 3; ++r) run.check_dispatch(world, r, 1);
  run.upload_results(world, 1);
  group.launch([&](int r) {
    LatencyCombineParameters p = run.combine(r, 1, CombinePath::per_rank);
    if (r == 1) {
      p.halves = Halves::send;
      // The tags of the first halves of its rows come, those of the second go astray.
      p.view.layout.sum_tags = p.view.layout.bytes;
      p.view.layout.ll_sums = p.view.layout.bytes;
    }
    FERRY_CUDA_CHECK(launch_latency_combine(p, group.stream(r)));
  });
  group.wait(5);
  for (const int r : {0, 2}) {
    expect("missing sums", run.masked(r, 1) && run.alarm(r).masked == 1);
    run.check_combine(world, r, 1, CombinePath::per_rank, {-1, 1});
  }
  std::printf("missing sums, ll %d: as expected\n", ll);
}

void expect_failure(const char* what, const Failure& got, Reason reason, int peer) {
  if (got.written != 0 && got.reason == reason && got.peer == peer) return;
  stop(std::string(what) + ": " + describe(got));
}

/// Without masks a missing rank ends the group.
void test_missing_rank_without_masks() {
  const LatencyCase c = small_latency_case();
  KernelGroup group(hasty_options(c));
  LatencyRun run(group, c);
  exchange_once(group, run, c, 2);
  run.upload(make_latency_world(c, 1, {3, 4, 5}), 0);
  for (int again = 0; again < 2; ++again) {
    group.launch([&](int r) {
      if (r == 1) return;
      LatencyDispatchParameters p = run.dispatch(r, 0);
      p.view.alarm = nullptr;
      FERRY_CUDA_CHECK(launch_latency_dispatch(p, group.stream(r)));
    });
    group.wait(5);
  }
  for (const int r : {0, 2}) expect_failure("deadline", group.fatal(r), Reason::deadline, 1);
  // None of the group's calls has ended: latency calls do not count among them.
  for (const int r : {0, 2}) expect("calls ended", group.fatal(r).written == 1);
}

void test_formats_that_differ() {
  const LatencyCase c = small_latency_case();
  KernelGroup group(patient_options(c));
  LatencyRun run(group, c);
  run.upload(make_latency_world(c, 1, {3, 4, 5}), 0);
  group.launch([&](int r) {
    LatencyDispatchParameters p = run.dispatch(r, 0);
    if (r == 2) p.format = LatencyFormat::e4m3_pow2;
    FERRY_CUDA_CHECK(launch_latency_dispatch(p, group.stream(r)));
  });
  group.wait(10);
  expect_failure("mismatch", group.fatal(0), Reason::mismatch, 2);
}

/// One rank brings weights with its dispatch, the others do not.
void test_weights_of_one_rank() {
  const LatencyCase c = small_latency_case();
  KernelGroup group(patient_options(c));
  LatencyRun run(group, c);
  run.upload(make_latency_world(c, 1, {3, 4, 5}), 0);
  group.launch([&](int r) {
    LatencyDispatchParameters p = run.dispatch(r, 0);
    if (r == 2) p.slot_weights = run.slot_weights(r, 0);
    FERRY_CUDA_CHECK(launch_latency_dispatch(p, group.stream(r)));
  });
  group.wait(10);
  expect_failure("weights", group.fatal(0), Reason::mismatch, 2);
}

/// One rank against two.
void test_paths_that_differ(int ll) {
  LatencyCase c = small_latency_case();
  c.ll = ll;
  KernelGroup group(options_for(c));
  LatencyRun run(group, c);
  const LatencyWorld world =
      ll > 0 ? make_latency_world(c, 1, {4, 4, 4}) : make_latency_world(c, 1, {20, 20, 20});
  run.upload(world, 0);
  launch_dispatch_all(group, run, 0, Halves::both);
  group.wait_well();
  group.launch([&](int r) {
    const CombinePath path = r == 2 ? CombinePath::per_slot : CombinePath::per_rank;
    LatencyCombineParameters p = run.combine(r, 0, path);
    p.view.alarm = nullptr;
    p.view.group.deadline_ns = 300'000'000;
    FERRY_CUDA_CHECK(launch_latency_combine(p, group.stream(r)));
  });
  group.wait(10);
  for (int r = 0; r < 3; ++r) {
    const Reason reason = group.fatal(r).reason;
    expect(
        "paths that differ",
        group.fatal(r).written != 0 && (reason == Reason::mismatch || reason == Reason::deadline),
        describe(group.fatal(r)));
  }
  expect("which is told", group.fatal(0).reason == Reason::mismatch ||
                              group.fatal(1).reason == Reason::mismatch ||
                              group.fatal(2).reason == Reason::mismatch);
}

/// A route that is none, or one expert named too often: its rank sends nothing, all are told, the
/// next call is whole.
void test_refused_routes() {
  const LatencyCase c = small_latency_case();
  KernelGroup group(patient_options(c));
  LatencyRun run(group, c);
  LatencyWorld world = make_latency_world(c, 1, {3, 4, 5});
  world.inputs[1].topk_idx[3 * 3 + 1] = c.experts;
  run.upload(world, 0);
  run.poison(0);
  launch_dispatch_all(group, run, 0, Halves::both);
  group.wait(10);
  LatencyWorld seen = world;
  seen.inputs[1] = {};
  for (int r = 0; r < 3; ++r) {
    expect_failure("bad route", *group.failure(r), Reason::bad_route, 1);
    expect("detail", group.failure(r)->detail == 3 * 64 + 1);
    run.check_dispatch(seen, r, 0);
  }
  launch_combine_all(group, run, 0, CombinePath::per_rank, Halves::both);
  group.clear_failures();
  // Of two such ranks the first is told of.
  LatencyWorld two = world;
  two.inputs[2].topk_idx[0] = c.experts;
  run.upload(two, 0);
  launch_dispatch_all(group, run, 0, Halves::both);
  group.wait(10);
  for (int r = 0; r < 3; ++r) {
    expect_failure("two bad routes", *group.failure(r), Reason::bad_route, 1);
    expect("detail", group.failure(r)->detail == 3 * 64 + 1);
  }
  launch_combine_all(group, run, 0, CombinePath::per_rank, Halves::both);
  group.clear_failures();
  exchange_once(group, run, c, 6);
  // One expert named more often than its block has places.
  world.inputs[1] = make_latency_world(c, 2, {0, c.capacity, 0}).inputs[1];
  for (std::int64_t t = 0; t < c.capacity; ++t) {
    world.inputs[1].topk_idx[KernelGroup::index(static_cast<int>(t * 3))] = 4;
    if (t == 5) world.inputs[1].topk_idx[KernelGroup::index(static_cast<int>(t * 3 + 1))] = 4;
  }
  run.upload(world, 0);
  run.poison(0);
  launch_dispatch_all(group, run, 0, Halves::both);
  group.wait(10);
  for (int r = 0; r < 3; ++r) {
    expect_failure("crowded", *group.failure(r), Reason::too_many, 1);
    run.check_dispatch(seen, r, 0);
  }
  group.clear_failures();
  exchange_once(group, run, c, 8);
  for (int r = 0; r < 3; ++r) expect("no masks", run.alarm(r).masked == 0);
}

}  // namespace

void run_missing_tests() {
  for (const int ll : {0, kLLTokens}) {
    test_masks(false, ll, false);
    test_masks(true, ll, false);
    test_missing_sums(ll);
  }
  test_masks(false, 0, true);
  test_masks(true, 0, true);
}

void run_failure_tests() {
  test_missing_rank_without_masks();
  test_formats_that_differ();
  test_weights_of_one_rank();
  for (const int ll : {0, 8}) test_paths_that_differ(ll);
  test_refused_routes();
  std::printf("failures: as expected\n");
}

}  // namespace ferry::cuda::test
