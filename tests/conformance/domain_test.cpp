// Several domains: the same results as in one, and no pointer between them.
#include <gtest/gtest.h>

#include <algorithm>
#include <cstdio>
#include <map>

#include "domain_cases.hpp"
#include "exchange.hpp"
#include "fleet_test.hpp"
#include "random.hpp"
#include "session.hpp"

namespace ferry::conformance {
namespace {

/// Every pair of choices of the other axes, dealt out to the cells.
void run_cover(Mode mode) {
  const std::uint64_t seed = mix(base_seed(), 201);
  auto cover = pairwise_cover(mode, seed);
  if (sanitized()) cover.resize((cover.size() + 2) / 3);
  std::printf("FERRY_TEST_SEED=%llu, %zu cases\n", static_cast<unsigned long long>(base_seed()),
              cover.size());
  std::map<std::pair<Wires, int>, std::vector<Case>> dealt;
  for (std::size_t i = 0; i < cover.size(); ++i) {
    DomainCell cell = domain_cell(i);
    Case c = placed(make_case(mode, cover[i]), cell);
    if (mode == Mode::latency) {
      cell.wires.crossing = Crossing::automatic;  // it makes no difference
      // Buffers for many experts and long rows on many ranks fill memory, and show no more.
      if (c.ranks > 3 && c.expert_kind == ExpertKind::huge) c.expert_kind = ExpertKind::many;
      if (c.ranks > 3 && c.hidden > 128) c.hidden = 144;
    }
    size_case(c, mix(seed, i));
    dealt[{cell.wires, cell.ranks}].push_back(c);
  }
  for (auto& [key, cases] : dealt) {
    const DomainCell cell{key.second, key.first};
    std::stable_sort(cases.begin(), cases.end(), shares_before);
    run_on(cell, [&](Rank& rank) {
      Session session(rank);
      for (const Case& c : cases) run_case(session, c, to_string(cell) + ": ");
    });
  }
}

TEST(Domains, Throughput) {
  run_cover(Mode::throughput);
}

TEST(Domains, Latency) {
  run_cover(Mode::latency);
}

TEST(Domains, AreWhatTheConfigurationSays) {
  run_on({5, {FabricKind::local, 2, FabricKind::sim, Crossing::automatic}}, [](Rank& rank) {
    Group group(rank.bootstrap(), group_config(rank, 8));
    rank.equal(group.domains(), 3, "domains");
    for (int r = 0; r < 5; ++r) rank.equal(group.domain_of(r), r / 2, "domain_of");
    rank.check(group.fabric_name() == "local+sim", "fabric is " + group.fabric_name());
    const std::string text = expect_error(rank, ErrorKind::invalid_argument, "domain_of",
                                          [&] { (void)group.domain_of(5); });
    expect_text(rank, text, "0 … 4");
    group.barrier();
  });
}

TEST(Domains, CrossingsThatDoNotFitAreRefused) {
  run_on({4, {FabricKind::local, 2, FabricKind::sim, Crossing::direct}}, [](Rank& rank) {
    Case c = small_case(rank, mix(base_seed(), 205));
    Group group(rank.bootstrap(), group_config(rank, c.experts()));
    Exchange exchange(rank, group, c);
    exchange.run(0);  // direct, as the group says
    const Received received = exchange.dispatch(0);
    CombineOptions back{.crossing = Crossing::hierarchical};
    const auto text = expect_error(rank, ErrorKind::invalid_argument, "combine",
                                   [&] { (void)group.combine(received.x, exchange.plan(), back); });
    expect_text(rank, text, "crossing");
    expect_text(rank, text, "such a dispatch first");
    const RankInput& own = exchange.world(0).inputs[static_cast<std::size_t>(rank.rank())];
    DispatchOptions options;
    options.crossing = rank.rank() == 1 ? Crossing::hierarchical : Crossing::direct;
    const auto differs = expect_error(rank, ErrorKind::mismatch, "dispatch", [&] {
      (void)group.dispatch({own.x.data(), Dtype::bf16, {own.tokens, 64}}, exchange.plan(), options);
    });
    expect_text(rank, differs, "crossing is ");
    back.crossing = rank.rank() == 0 ? Crossing::hierarchical : Crossing::direct;
    const auto mixed = expect_error(rank, ErrorKind::mismatch, "combine", [&] {
      (void)group.combine(received.x, exchange.plan(), back);
    });
    expect_text(rank, mixed, "crossing is ");
    exchange.run(1);  // the group goes on
    group.barrier();
  });
}

TEST(Domains, ConfigurationsThatCannotBe) {
  run_on({2, FabricKind::local}, [](Rank& rank) {
    const auto refused = [&](const std::function<void(GroupConfig&)>& change, const char* part) {
      GroupConfig config = group_config(rank, 4);
      change(config);
      const std::string text = expect_error(rank, ErrorKind::invalid_argument, part,
                                            [&] { const Group group(rank.bootstrap(), config); });
      expect_text(rank, text, part);
    };
    refused([](GroupConfig& config) { config.domain_size = -1; }, "domain_size");
    refused([](GroupConfig& config) { config.network = FabricKind::shm; }, "network");
    refused(
        [](GroupConfig& config) {
          config.fabric = FabricKind::sim;
          config.domain_size = 1;
        },
        "fabric sim");
    GroupConfig config = group_config(rank, 4);
    config.domain_size = 1 + rank.rank();
    expect_text(rank,
                expect_error(rank, ErrorKind::mismatch, "domain_size",
                             [&] { const Group group(rank.bootstrap(), config); }),
                "domain_size is 2 on rank 1 but 1 on rank 0");
  });
}

}  // namespace
}  // namespace ferry::conformance
