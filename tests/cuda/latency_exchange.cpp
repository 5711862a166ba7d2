#include "latency_exchange.hpp"

namespace ferry::cuda::test {

GroupOptions options_for(const LatencyCase& c) {
  return {c.ranks, latency_arena_bytes(c) + (std::size_t{8} << 20), 4096, 20'000'000'000};
}

void launch_dispatch_all(KernelGroup& group, LatencyRun& run, int handle, Halves halves) {
  group.launch([&](int r) {
    LatencyDispatchParameters p = run.dispatch(r, handle);
    p.halves = halves;
    p.wait_ns = run.wait_ns(r);
    FERRY_CUDA_CHECK(launch_latency_dispatch(p, group.stream(r)));
  });
}

void launch_combine_all(KernelGroup& group, LatencyRun& run, int handle, CombinePath path,
                        Halves halves, bool timed) {
  group.launch([&](int r) {
    LatencyCombineParameters p = run.combine(r, handle, path);
    p.halves = halves;
    if (timed) p.wait_ns = run.wait_ns(r);
    FERRY_CUDA_CHECK(launch_latency_combine(p, group.stream(r)));
  });
}

CombinePath path_of(std::uint64_t bit) {
  return bit % 2 == 0 ? CombinePath::per_rank : CombinePath::per_slot;
}

void exchange_once(KernelGroup& group, LatencyRun& run, const LatencyCase& c, std::uint64_t seed) {
  const int handle = static_cast<int>(seed % 2);
  const LatencyWorld world = make_latency_world(c, seed);
  run.upload(world, handle);
  run.poison(handle);
  launch_dispatch_all(group, run, handle, Halves::both);
  group.wait_well();
  for (int r = 0; r < c.ranks; ++r) run.check_dispatch(world, r, handle);
  run.upload_results(world, handle);
  const CombinePath path = path_of(seed / 2);
  launch_combine_all(group, run, handle, path, Halves::both, seed / 4 % 2 == 0);
  group.wait_well();
  for (int r = 0; r < c.ranks; ++r) run.check_combine(world, r, handle, path);
}

}  // namespace ferry::cuda::test
