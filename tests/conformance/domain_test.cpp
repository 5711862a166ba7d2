// Several domains: the same results as in one, and no pointer across the line.
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

void run_on(const DomainCell& cell, const std::function<void(Rank&)>& body) {
  const auto failures = run_fleet({cell.wires, cell.ranks}, body);
  EXPECT_TRUE(failures.empty()) << to_string(cell) << "\nFERRY_TEST_SEED=" << base_seed() << "\n"
                                << joined(failures);
}

/// Every pair of choices of the other axes, dealt out to the cells.
void run_cover(Mode mode) {
  const std::uint64_t seed = mix(base_seed(), 201);
  const auto cover = pairwise_cover(mode, seed);
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

/// What a barrier sends is what every step of a call sends: one message to each rank of another
/// domain.
TEST(Domains, BytesOfDirectDispatchEqualTheFormula) {
  for (const FabricKind network : {FabricKind::sim, FabricKind::automatic}) {
    run_on({6, {FabricKind::local, 4, network, Crossing::direct}}, [](Rank& rank) {
      Case c = small_case(rank, mix(base_seed(), 202));
      c.tokens = 40;
      Group group(rank.bootstrap(), group_config(rank, c.experts()));
      const auto sent = [&](const std::function<void()>& call) {
        const std::uint64_t before = group.network().put_bytes;
        call();
        return group.network().put_bytes - before;
      };
      const std::uint64_t step = sent([&] { group.barrier(); });
      Exchange exchange(rank, group, c);
      std::uint64_t rows = 0;
      const std::vector<std::int64_t> to = exchange.plan().send_rows_per_rank();
      for (int peer = 0; peer < rank.size(); ++peer) {
        if (peer / 4 != rank.rank() / 4)
          rows += static_cast<std::uint64_t>(to[static_cast<std::size_t>(peer)]);
      }
      rank.check(step > 0 && rows > 0, "nothing crosses");
      const std::uint64_t row = 64 * 2, weights = 3 * 4, routes = 4 + 3 * 4;
      Received received;
      rank.equal(sent([&] { received = exchange.dispatch(0); }),
                 step + rows * (row + weights + routes), "bytes of the first dispatch");
      rank.equal(sent([&] { received = exchange.dispatch(1); }), step + rows * (row + weights),
                 "bytes of a cached dispatch");
      group.barrier();
    });
  }
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
