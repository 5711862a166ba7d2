// Sizes at the edges of what is allowed, and those at which the engine changes its ways.

#include "fleet_test.hpp"
#include "session.hpp"

namespace ferry::conformance {
namespace {

class Boundaries : public OnFabric {
 protected:
  void SetUp() override {
    OnFabric::SetUp();
    if (sanitized() && GetParam().fabric != FabricKind::local) {
      GTEST_SKIP() << "a row's length is the same to every fabric: under a sanitizer one is enough";
    }
  }
  /// Runs cases that differ in more than their number of ranks on one fleet.
  static void run_cases(int ranks, const std::vector<Case>& cases) {
    run(ranks, [&](Rank& rank) {
      Session session(rank);
      std::uint64_t number = 0;
      for (Case c : cases) {
        c.fabric = rank.fabric();
        c.ranks = rank.size();
        c.seed = mix(base_seed(), 111, ++number) >> 1;
        run_case(session, c);
      }
    });
  }
};
FERRY_ON_EVERY_FABRIC(Boundaries);

Case throughput(std::int64_t hidden, int topk, Dtype dtype, std::int64_t tokens) {
  Case c;
  c.hidden = hidden;
  c.topk = topk;
  c.dtype = dtype;
  c.tokens = tokens;
  c.weights = WeightKind::carried;
  c.rows = RowsKind::received;
  return c;
}

Case latency(std::int64_t hidden, int topk, Dtype dtype, WireKind wire) {
  Case c;
  c.mode = Mode::latency;
  c.hidden = hidden;
  c.topk = topk;
  c.dtype = dtype;
  c.wire = wire;
  c.tokens = 5;
  c.capacity = 10;
  c.special_values = true;
  c.hook = HookKind::both;
  return c;
}

TEST_P(Boundaries, EveryDtype) {
  std::vector<Case> cases;
  for (Dtype dtype : {Dtype::f32, Dtype::bf16, Dtype::f16, Dtype::e4m3, Dtype::e5m2, Dtype::i32,
                      Dtype::i64, Dtype::u8}) {
    for (RowOrder order : {RowOrder::rank_major, RowOrder::expert_major}) {
      Case c = throughput(48, 3, dtype, 10);
      c.order = order;
      c.combine_dtype = Dtype::f16;
      cases.push_back(c);
    }
  }
  run_cases(3, cases);
}

TEST_P(Boundaries, RowsOfEveryKindOfLength) {
  std::vector<Case> cases;
  // Bytes a row: the least, odd multiples of 16, both sides of a cache line, of a page and of the
  // 512 columns that are summed at a time.
  for (std::int64_t hidden :
       {4, 8, 12, 20, 28, 32, 36, 124, 132, 508, 512, 516, 1020, 1024, 1028}) {
    Case c = throughput(hidden, 4, Dtype::f32, 7);
    c.combine_dtype = hidden % 8 == 0 ? Dtype::bf16 : Dtype::f32;
    c.biases = 2;
    c.special_values = true;
    cases.push_back(c);
    c.order = RowOrder::expert_major;
    c.alignment = 3;
    c.weights = WeightKind::applied;
    cases.push_back(c);
  }
  run_cases(3, cases);
}

TEST_P(Boundaries, TopkFromOneToSixtyFour) {
  std::vector<Case> cases;
  for (int topk : {1, 9, 16, 31, 32, 33, 63, 64}) {
    for (RouteKind routes : {RouteKind::uniform, RouteKind::holes}) {
      Case c = throughput(16, topk, Dtype::bf16, 9);
      c.routes = routes;
      c.expert_kind = ExpertKind::many;
      cases.push_back(c);
      c.order = RowOrder::expert_major;
      c.weights = WeightKind::applied;
      c.alignment = 1 << 6;
      cases.push_back(c);
    }
    Case c = latency(16, topk, Dtype::bf16, WireKind::as_is);
    c.expert_kind = ExpertKind::many;
    cases.push_back(c);
  }
  run_cases(4, cases);
}

TEST_P(Boundaries, ExchangesPastTheCaches) {
  // More than 4 MiB a rank: stores go past the caches. Rows of an odd multiple of 16 bytes.
  std::vector<Case> cases;
  for (std::int64_t hidden : {7168, 7172}) {
    Case c = throughput(hidden, 8, Dtype::f32, only_threads() ? 50 : 70);
    c.expert_kind = ExpertKind::many;
    c.small_memory = hidden == 7172;
    cases.push_back(c);
  }
  run_cases(3, cases);
}

TEST_P(Boundaries, QuantisedRowsOfEveryKindOfLength) {
  std::vector<Case> cases;
  for (std::int64_t hidden : {8, 16, 120, 128, 136, 256, 504, 512, 520, 640, 1032}) {
    for (WireKind wire :
         {WireKind::as_is, WireKind::scale_f32, WireKind::scale_pow2, WireKind::scale_packed}) {
      cases.push_back(latency(hidden, 3, hidden % 16 == 0 ? Dtype::f16 : Dtype::bf16, wire));
    }
    cases.push_back(latency(hidden, 2, Dtype::f32, WireKind::scale_packed));
  }
  run_cases(3, cases);
}

TEST_P(Boundaries, DispatchQuantisesRowsOfEveryKindOfLength) {
  std::vector<Case> cases;
  for (std::int64_t hidden : {16, 112, 128, 144, 256, 496, 512, 528, 640, 1040, 4224}) {
    for (Dtype dtype : {Dtype::f32, Dtype::bf16, Dtype::f16}) {
      Case c = throughput(hidden, 3, dtype, 6);
      c.wire = hidden % 32 == 0 ? WireKind::scale_f32 : WireKind::scale_pow2;
      c.special_values = dtype != Dtype::bf16;
      cases.push_back(c);
      c.order = RowOrder::expert_major;
      c.alignment = 5;
      c.own_output = true;
      cases.push_back(c);
    }
  }
  run_cases(3, cases);
}

TEST_P(Boundaries, SixteenRanks) {
  std::vector<Case> cases;
  for (ExpertKind experts : {ExpertKind::few, ExpertKind::odd, ExpertKind::many}) {
    Case c = throughput(16, 20, Dtype::bf16, 6);
    c.expert_kind = experts;
    c.routes = RouteKind::zipf;
    cases.push_back(c);
    Case l = latency(16, 4, Dtype::bf16, WireKind::as_is);
    l.expert_kind = experts;
    cases.push_back(l);
  }
  run_cases(16, cases);
}

TEST_P(Boundaries, ManyTokens) {
  std::vector<Case> cases;
  for (RouteKind routes : {RouteKind::uniform, RouteKind::zipf, RouteKind::one_rank,
                           RouteKind::uneven, RouteKind::some_empty}) {
    Case c = throughput(8, 3, Dtype::bf16, 300);
    c.routes = routes;
    c.order = RowOrder::expert_major;
    c.alignment = 128;
    cases.push_back(c);
  }
  run_cases(3, cases);
}

}  // namespace
}  // namespace ferry::conformance
