// Several domains: the same results as in one, and no pointer across the line.
#include <gtest/gtest.h>

#include <algorithm>
#include <cstdio>
#include <map>
#include <set>

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

/// What this rank sends across in a call. A barrier sends what every step of a call sends: one
/// message to each rank of another domain.
class Sent {
 public:
  explicit Sent(Group& group) : group_(group), step_(by([&] { group.barrier(); })) {}
  std::uint64_t by(const std::function<void()>& call) const {
    const std::uint64_t before = group_.network().put_bytes;
    call();
    return group_.network().put_bytes - before;
  }
  std::uint64_t step() const { return step_; }

 private:
  Group& group_;
  std::uint64_t step_;
};

/// Copies of this rank's tokens that cross to other domains of `size` ranks: one for each rank, or
/// one for each domain. From the definition.
std::uint64_t crossings(const World& world, int rank, int size, bool hierarchical) {
  std::set<std::pair<std::int64_t, int>> copies;
  const RankInput& own = world.inputs[static_cast<std::size_t>(rank)];
  for (std::int64_t i = 0; i < own.tokens * world.topk; ++i) {
    const std::int64_t id = own.topk_idx[static_cast<std::size_t>(i)];
    const int target = id < 0 ? rank : world.rank_of(id);
    if (target / size == rank / size) continue;
    copies.emplace(i / world.topk, hierarchical ? target / size : target);
  }
  return copies.size();
}

TEST(Domains, BytesThatCrossEqualTheFormula) {
  constexpr int kSize = 4;
  for (const Crossing crossing : {Crossing::direct, Crossing::hierarchical}) {
    for (const FabricKind network : {FabricKind::sim, FabricKind::automatic}) {
      run_on({6, {FabricKind::local, kSize, network, crossing}}, [&](Rank& rank) {
        Case c = small_case(rank, mix(base_seed(), 202));
        c.topk = 5;
        c.tokens = 150;  // several chunks
        Group group(rank.bootstrap(), group_config(rank, c.experts()));
        const Sent sent(group);
        Exchange exchange(rank, group, c);
        const bool hierarchical = crossing == Crossing::hierarchical;
        const std::uint64_t rows = crossings(exchange.world(0), rank.rank(), kSize, hierarchical);
        rank.check(sent.step() > 0 && rows > 0, "nothing crosses");
        const std::uint64_t row = 64 * 2, weights = 5 * 4, routes = 4 + 5 * 4;
        Received received;
        rank.equal(sent.by([&] { received = exchange.dispatch(0); }),
                   sent.step() + rows * (row + weights + routes), "bytes of the first dispatch");
        exchange.check(received, 0);
        rank.equal(sent.by([&] { received = exchange.dispatch(1); }),
                   sent.step() + rows * (row + weights), "bytes of a cached dispatch");
        exchange.check(received, 1);
        // Back come as many rows as the others sent here, or, for a domain, as crossed to here.
        std::uint64_t back = 0;
        for (int peer = 0; peer < rank.size(); ++peer) {
          if (peer / kSize == rank.rank() / kSize) continue;
          const std::size_t here = static_cast<std::size_t>(rank.rank() % kSize);
          const std::size_t members = rank.rank() / kSize == 0 ? 4 : 2;
          const bool mine = static_cast<std::size_t>(peer % kSize) % members == here;
          if (!hierarchical) {
            back += static_cast<std::uint64_t>(
                exchange.plan().recv_rows_per_rank()[static_cast<std::size_t>(peer)]);
          } else if (mine) {
            back += crossings(exchange.world(0), peer, kSize, true);
          }
        }
        rank.equal(sent.by([&] { exchange.combine_and_check(1); }),
                   sent.step() + back * (row + weights), "bytes of a combine");
        group.barrier();
      });
    }
  }
}

// Latency mode: one write for each token and rank beyond the line, which brings row, scales, route
// and count, and one flag a rank. A rank that gets no token gets the count alone.
TEST(Domains, LatencyModeCrossesInOneWriteForEachTokenAndRank) {
  constexpr std::int64_t kTokens = 5, kHidden = 264;  // e4m3: 3 scales, no multiple of 16 bytes
  constexpr int kTopk = 3, kSize = 2;
  const auto up = [](std::uint64_t bytes) { return (bytes + 15) / 16 * 16; };
  for (const FabricKind network : {FabricKind::sim, FabricKind::automatic}) {
    run_on({5, {FabricKind::local, kSize, network, Crossing::automatic}}, [&](Rank& rank) {
      Group group(rank.bootstrap(), group_config(rank, 10));  // two experts a rank
      LatencyExchange exchange(group, {kTokens, kHidden, kTopk, Dtype::bf16});
      // Tokens of rank r: the first to ranks 0 and 1, the second to 2 and 3, the others
      // to rank r + 1 of the first four. The last rank gets nothing.
      std::vector<std::int64_t> ids{0, 1, 2, 4, 5, 6};
      const std::int64_t next = 2 * ((rank.rank() + 1) % 4);
      while (ids.size() < kTokens * kTopk) ids.insert(ids.end(), {next, -1, next + 1});
      std::vector<std::uint64_t> tokens(5, 0);
      for (const int target : {0, 1}) ++tokens[static_cast<std::size_t>(target)];
      for (const int target : {2, 3}) ++tokens[static_cast<std::size_t>(target)];
      tokens[static_cast<std::size_t>(next / 2)] += kTokens - 2;
      const std::vector<std::uint16_t> x(kTokens * kHidden, 0x3f80);
      for (const WireFormat format : {WireFormat::as_is, WireFormat::e4m3}) {
        const bool codes = format == WireFormat::e4m3;
        const std::uint64_t record =
            up(24 + 4 * (1 + 2 * kTopk)) + (codes ? up(kHidden) + up(3 * 4) : up(kHidden * 2));
        NetworkUse expected{};
        for (int peer = 0; peer < 5; ++peer) {
          if (peer / kSize == rank.rank() / kSize) continue;
          const std::uint64_t n = tokens[static_cast<std::size_t>(peer)];
          expected.puts += std::max<std::uint64_t>(n, 1);
          expected.put_bytes += n > 0 ? n * record : 24;
          expected.signals += 1;
        }
        LatencyDispatchOptions options;
        options.format = format;
        const NetworkUse before = group.network();
        const LatencyReceived received =
            exchange.dispatch({x.data(), Dtype::bf16, {kTokens, kHidden}},
                              {ids.data(), Dtype::i64, {kTokens, kTopk}}, options);
        const NetworkUse after = group.network();
        rank.equal(after.puts - before.puts, expected.puts, "writes");
        rank.equal(after.put_bytes - before.put_bytes, expected.put_bytes, "bytes");
        rank.equal(after.signals - before.signals, expected.signals, "flags");
        group.barrier();
      }
    });
  }
}

// Routes limited to so many domains bound what crosses: a copy for each, whatever topk is.
TEST(Domains, GroupLimitedRoutesBoundTheCrossings) {
  run_on({8, {FabricKind::local, 2, FabricKind::sim, Crossing::hierarchical}}, [](Rank& rank) {
    constexpr std::int64_t kTokens = 90, kHidden = 64;
    constexpr int kTopk = 8, kDomains = 2;  // of four
    Group group(rank.bootstrap(), group_config(rank, 64));
    Random random(mix(base_seed(), 203, static_cast<std::uint64_t>(rank.rank())));
    std::vector<std::int64_t> ids;
    for (std::int64_t t = 0; t < kTokens; ++t) {
      const std::int64_t first = random.below(4);
      for (int k = 0; k < kTopk; ++k) {
        const std::int64_t domain = (first + k % kDomains) % 4;
        ids.push_back(domain * 16 + random.below(16));
      }
    }
    const std::vector<float> x(kTokens * kHidden, 1.0f);
    const Sent sent(group);
    const Plan plan = group.plan({ids.data(), Dtype::i64, {kTokens, kTopk}});
    const ConstTensorView rows{x.data(), Dtype::f32, {kTokens, kHidden}};
    {
      const Received first = group.dispatch(rows, plan);
    }
    const std::uint64_t bytes = sent.by([&] { const Received again = group.dispatch(rows, plan); });
    rank.check(bytes <= sent.step() + kTokens * kDomains * kHidden * 4,
               "more crosses than a copy of each token for each of two domains");
    DispatchOptions direct;
    direct.crossing = Crossing::direct;
    const std::uint64_t copies =
        sent.by([&] { const Received again = group.dispatch(rows, plan, direct); });
    rank.check(copies > bytes, "the direct mode sends no more");
    group.barrier();
  });
}

TEST(Domains, TheChoiceIsSeenAndCanBeForced) {
  run_on({4, {FabricKind::local, 2, FabricKind::automatic, Crossing::automatic}}, [](Rank& rank) {
    Case c = small_case(rank, mix(base_seed(), 204));
    c.expert_kind = ExpertKind::even;
    c.topk = 8;
    c.tokens = 30;
    Group group(rank.bootstrap(), group_config(rank, c.experts()));
    Exchange many(rank, group, c);  // most tokens go to both ranks of the other domain
    rank.check(many.plan().crossing() == Crossing::hierarchical, "top-8 does not save by domains");
    std::vector<std::int64_t> evenly;  // one expert a token, all ranks alike: nothing to save
    for (std::int64_t t = 0; t < 32; ++t) evenly.push_back(t % 8);
    const Plan one = group.plan({evenly.data(), Dtype::i64, {32, 1}});
    rank.check(one.crossing() == Crossing::direct, "top-1 does not go directly");
    const Sent sent(group);
    const RankInput& own = many.world(0).inputs[static_cast<std::size_t>(rank.rank())];
    const ConstTensorView x{own.x.data(), Dtype::bf16, {own.tokens, 64}};
    DispatchOptions options;
    const auto bytes = [&](Crossing crossing) {
      options.crossing = crossing;
      {
        const Received first = group.dispatch(x, many.plan(), options);
      }
      return sent.by([&] { const Received again = group.dispatch(x, many.plan(), options); });
    };
    rank.equal(bytes(Crossing::automatic), bytes(Crossing::hierarchical), "bytes by choice");
    rank.check(bytes(Crossing::direct) > bytes(Crossing::hierarchical), "it cannot be forced");
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
    CombineOptions back;
    back.crossing = Crossing::hierarchical;
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
