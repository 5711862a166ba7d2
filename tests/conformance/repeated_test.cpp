// Many exchanges on one buffer: whatever lies there from before must never show.
#include "case.hpp"
#include "exchange.hpp"
#include "fleet_test.hpp"
#include "session.hpp"

namespace ferry::conformance {
namespace {

class Repeated : public OnFabric {};
FERRY_ON_EVERY_FABRIC(Repeated);

int repetitions() {
  return sanitized() ? 50 : 1000;
}

/// A case that differs from the last in routes, sizes, order and values, on the same group.
Case vary(const Rank& rank, int i) {
  Case c = small_case(rank, mix(base_seed(), 71, static_cast<std::uint64_t>(i)) >> 1);
  Random random(c.seed);
  c.routes = static_cast<RouteKind>(random.below(8));
  c.tokens = 1 + random.below(12);
  c.order = random.one_in(2) ? RowOrder::expert_major : RowOrder::rank_major;
  c.alignment = c.order == RowOrder::expert_major ? 1 + random.below(8) : 1;
  c.rows = static_cast<RowsKind>(random.below(3));
  c.weights = random.one_in(2) ? WeightKind::carried : WeightKind::none;
  c.combine_dtype = random.one_in(2) ? Dtype::bf16 : Dtype::f32;
  c.dtype = random.one_in(3) ? Dtype::e4m3 : Dtype::bf16;
  c.special_values = random.one_in(4);
  c.stream = random.one_in(4);
  c.size = static_cast<SizeKind>(random.below(3));
  return c;
}

TEST_P(Repeated, ThroughputOnPoisonedMemory) {
  run(4, [](Rank& rank) {
    Session session(rank);
    std::size_t arena = 0;
    for (int i = 0; i < repetitions() && rank.failures() == 0; ++i) {
      const Case c = vary(rank, i);
      run_case(session, c);
      const MemoryStats memory = session.group(c).memory();
      if (i == 0) arena = memory.arena_bytes;
      rank.equal(memory.arena_bytes, arena, "bytes of the one buffer");
      rank.equal(memory.arena_used_bytes, std::size_t{0}, "bytes in use between exchanges");
    }
    session.group(vary(rank, 0)).barrier();
  });
}

TEST_P(Repeated, LatencyOnPoisonedMemory) {
  run(3, [](Rank& rank) {
    Session session(rank);
    for (int i = 0; i < repetitions() && rank.failures() == 0; ++i) {
      Case c = small_case(rank, mix(base_seed(), 72, static_cast<std::uint64_t>(i)) >> 1);
      Random random(c.seed);
      c.mode = Mode::latency;
      c.routes = static_cast<RouteKind>(random.below(8));
      c.tokens = 1 + random.below(6);
      c.capacity = 12;
      c.wire = static_cast<WireKind>(random.below(4));
      c.hook = static_cast<HookKind>(random.below(4));
      c.two_alive = random.one_in(3);
      c.stream = random.one_in(4);
      c.results = static_cast<RowOrder>(random.below(2));
      c.path = static_cast<CombinePath>(random.below(2));
      c.combine_format = static_cast<CombineFormat>(random.below(3));
      c.weights_ahead = random.one_in(2);
      run_case(session, c);
    }
  });
}

}  // namespace
}  // namespace ferry::conformance
