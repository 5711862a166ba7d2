// Plans, tensors and memory that live at the same time, grow, and outlive their group.
#include <cstring>

#include "compare.hpp"
#include "exchange.hpp"
#include "fleet_test.hpp"

namespace ferry::conformance {
namespace {

class Lifetime : public OnFabric {};
FERRY_ON_EVERY_FABRIC_AND_DOMAINS(Lifetime);

std::uint64_t lifetime_seed(std::uint64_t which) {
  return mix(base_seed(), 81, which) >> 1;
}

TEST_P(Lifetime, TwoLivePlansInterleaved) {
  run(4, [](Rank& rank) {
    Case a = small_case(rank, lifetime_seed(1)), b = small_case(rank, lifetime_seed(2));
    b.topk = 8;
    b.hidden = 128;
    b.dtype = Dtype::f32;
    b.routes = RouteKind::duplicates;
    b.order = RowOrder::expert_major;
    b.alignment = 4;
    Group group(rank.bootstrap(), group_config(rank, a.experts()));
    Exchange first(rank, group, a), second(rank, group, b);
    const Received b0 = second.dispatch(0);
    const Received a0 = first.dispatch(0);
    second.check(b0, 0);
    first.check(a0, 0);
    first.combine_and_check(0);
    const Received a1 = first.dispatch(1);
    second.combine_and_check(0);
    const Received b1 = second.dispatch(1);
    first.combine_and_check(1);
    // All four results are alive: none may have touched another.
    first.check(a0, 0);
    first.check(a1, 1);
    second.check(b0, 0);
    second.check(b1, 1);
    second.combine_and_check(1);
    group.barrier();
  });
}

TEST_P(Lifetime, ManyPlansUsedInAnyOrder) {
  run(3, [](Rank& rank) {
    const Case base = small_case(rank, lifetime_seed(3));
    Group group(rank.bootstrap(), group_config(rank, base.experts()));
    std::vector<std::unique_ptr<Exchange>> all;
    Random random(lifetime_seed(4));  // the same on all ranks
    for (std::uint64_t i = 0; i < 40; ++i) {
      Case c = small_case(rank, lifetime_seed(100 + i));
      c.topk = 1 + static_cast<int>(random.below(6));
      c.order = random.one_in(2) ? RowOrder::expert_major : RowOrder::rank_major;
      all.push_back(std::make_unique<Exchange>(rank, group, c));
      Exchange& any =
          *all[static_cast<std::size_t>(random.below(static_cast<std::int64_t>(i) + 1))];
      any.run(i % 3);
      if (all.size() > 6 && random.one_in(2)) all.front()->run(1);
    }
    group.barrier();
  });
}

TEST_P(Lifetime, GrowthWithLiveTensors) {
  run(3, [](Rank& rank) {
    Case c = small_case(rank, lifetime_seed(5));
    Group group(rank.bootstrap(), group_config(rank, c.experts(), 4096));
    rank.equal(group.memory().arena_bytes, std::size_t{4096}, "arena at creation");
    std::vector<std::unique_ptr<Exchange>> all;
    std::vector<Received> alive;
    std::size_t last = 0, grown = 0;
    const std::uint64_t sizes = sanitized() ? 5 : 6;  // the reference takes its time there
    for (std::uint64_t i = 0; i < sizes; ++i) {
      c.seed = lifetime_seed(200 + i);
      c.hidden = 64 << (2 * i);  // up to 64 Ki channels: 128 KiB a row
      c.tokens = 20;
      c.order = i % 2 == 0 ? RowOrder::rank_major : RowOrder::expert_major;
      all.push_back(std::make_unique<Exchange>(rank, group, c));
      alive.push_back(all.back()->dispatch_and_check(0));
      all.back()->combine_and_check(0);
      grown += group.memory().arena_bytes > last ? 1 : 0;
      last = group.memory().arena_bytes;
      for (std::size_t k = 0; k < all.size(); ++k) all[k]->check(alive[k], 0);
    }
    rank.check(grown > sizes - 4, "the arena did not grow several times");
    rank.check(group.memory().arena_used_bytes > 0, "live tensors are not counted");
    alive.clear();
    rank.equal(group.memory().arena_used_bytes, std::size_t{0}, "bytes in use at the end");
    for (auto& exchange : all) exchange->run(1);
    group.barrier();
  });
}

TEST_P(Lifetime, GrowthOfOneRankAlone) {
  // All rows go to one rank: it alone runs out of room, and all have to follow.
  run(4, [](Rank& rank) {
    Case c = small_case(rank, lifetime_seed(6));
    c.routes = RouteKind::one_rank;
    c.hidden = 4096;
    Group group(rank.bootstrap(), group_config(rank, c.experts(), 4096));
    for (std::uint64_t i = 0; i < 3; ++i) {
      c.seed = lifetime_seed(300 + i);
      Exchange(rank, group, c).run();
    }
    group.barrier();
  });
}

TEST_P(Lifetime, TensorsOutliveTheGroup) {
  run(3, [](Rank& rank) {
    const Case c = small_case(rank, lifetime_seed(7));
    auto group = std::make_unique<Group>(rank.bootstrap(), group_config(rank, c.experts()));
    Exchange exchange(rank, *group, c);
    const Received received = exchange.dispatch_and_check(0);
    const Tensor own = group->empty({4, 16}, Dtype::f32);
    std::memset(own.data(), 1, own.view().bytes());
    const ExpectedDispatch expected =
        expect_dispatch(exchange.world(0), rank.rank(), c.order, c.alignment);
    group->barrier();
    group->destroy();
    expect_error(rank, ErrorKind::destroyed, "plan after destroy",
                 [&] { (void)exchange.plan().recv_rows(); });
    expect_error(rank, ErrorKind::destroyed, "dispatch after destroy",
                 [&] { (void)exchange.dispatch(0); });
    group.reset();
    same_bytes(rank, "x after the group", received.x.data(), expected.x.data(),
               static_cast<std::size_t>(expected.rows), exchange.world(0).row_bytes());
    poison(received.x);  // still writable
    poison(own);
  });
}

TEST_P(Lifetime, TwoGroupsAtOnce) {
  run(3, [](Rank& rank) {
    const Case a = small_case(rank, lifetime_seed(20));
    Case b = small_case(rank, lifetime_seed(21));
    b.expert_kind = ExpertKind::many;
    b.order = RowOrder::expert_major;
    Group first(rank.bootstrap(), group_config(rank, a.experts()));
    Group second(rank.bootstrap(), group_config(rank, b.experts()));
    Stream streams[2];
    for (std::uint64_t i = 0; i < 20; ++i) {
      // Ranks enter the two groups in different orders: one never waits for the other.
      Exchange one(rank, first, a, &streams[0]), two(rank, second, b, &streams[1]);
      Received x, y;
      Combined u, v;
      const auto use_first = [&] {
        x = one.dispatch(i, 200);
        u = one.combine(i);
      };
      const auto use_second = [&] {
        y = two.dispatch(i, 200);
        v = two.combine(i);
      };
      if (rank.rank() == 1) {
        use_second();
        use_first();
      } else {
        use_first();
        use_second();
      }
      one.check(x, i);
      one.check(u, i);
      two.check(y, i);
      two.check(v, i);
    }
    first.barrier();
    second.barrier();
  });
}

TEST_P(Lifetime, TensorsDroppedOnAnotherThread) {
  run(2, [](Rank& rank) {
    const Case c = small_case(rank, lifetime_seed(22));
    Group group(rank.bootstrap(), group_config(rank, c.experts(), 1 << 16));
    Exchange exchange(rank, group, c);
    {
      Stream janitor;
      for (std::uint64_t i = 0; i < 100; ++i) {
        auto received = std::make_shared<Received>(exchange.dispatch_and_check(i % 3));
        exchange.combine_and_check(i % 3);
        janitor.submit([received = std::move(received)] { poison(received->x); });
      }
      janitor.synchronize();
    }
    rank.equal(group.memory().arena_used_bytes, std::size_t{0}, "bytes in use at the end");
    group.barrier();
  });
}

TEST_P(Lifetime, HintsEqualWhatIsAllocated) {
  run(3, [](Rank& rank) {
    for (std::size_t memory :
         {std::size_t{0}, std::size_t{1}, std::size_t{4097}, std::size_t{3} << 20}) {
      for (std::int64_t experts : {1, 7, 1000}) {
        const GroupConfig config = group_config(rank, experts, memory);
        Group group(rank.bootstrap(), config);
        const MemoryStats before = group.memory();
        rank.check(before == Group::memory_hint(config, rank.size()), "memory_hint of a group");
        const LatencyConfig shape{3 + experts % 5, 48, 3, Dtype::f16};
        const LatencyExchange exchange(group, shape);
        rank.equal(group.memory().latency_bytes,
                   LatencyExchange::memory_hint(shape, experts, rank.size(), DeviceKind::cpu,
                                                group.domains()),
                   "memory_hint of a latency exchange");
        rank.equal(group.memory().arena_bytes, before.arena_bytes, "arena");
        group.barrier();
      }
    }
  });
}

TEST_P(Lifetime, EmptyTensorsAndTime) {
  run(2, [](Rank& rank) {
    const Case c = small_case(rank, lifetime_seed(8));
    Group group(rank.bootstrap(), group_config(rank, c.experts(), 8192));
    const Tensor tensor = group.empty({2, 64}, Dtype::f32);
    rank.check(group.is_registered(tensor.data()), "empty() is not registered");
    int local = 0;
    rank.check(!group.is_registered(&local), "the stack is registered");
    expect_text(rank,
                expect_error(rank, ErrorKind::exhausted, "empty",
                             [&] { (void)group.empty({1024, 1024}, Dtype::f32); }),
                "memory_bytes");
    const TimeStats before = group.time();
    Exchange(rank, group, c).run();
    const TimeStats after = group.time();
    rank.check(after.exchange_ns > before.exchange_ns, "exchange_ns does not grow");
    rank.check(after.wait_ns <= after.exchange_ns, "more time waiting than exchanging");
    group.barrier();
  });
}

TEST_P(Lifetime, AutomaticFabric) {
  run(2, [](Rank& rank) {
    GroupConfig config = group_config(rank, 4);
    if (rank.fabric() != FabricKind::sim) config.fabric = FabricKind::automatic;
    Group group(rank.bootstrap(), config);
    const std::string expected = rank.wires().domain_size == 1        ? "local+sim"
                                 : rank.fabric() == FabricKind::local ? "local"
                                 : rank.fabric() == FabricKind::shm   ? "shm"
                                                                      : "sim";
    rank.check(group.fabric_name() == expected, "fabric is " + group.fabric_name());
    Case c = small_case(rank, lifetime_seed(9));
    c.expert_kind = ExpertKind::even;
    Exchange(rank, group, c).run();
    group.barrier();
  });
}

}  // namespace
}  // namespace ferry::conformance
