// Several domains: what crosses from one to another, in bytes, writes and flags.
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <set>

#include "exchange.hpp"
#include "fleet_test.hpp"
#include "random.hpp"

namespace ferry::conformance {
namespace {

/// What this rank sends across in a call. A barrier sends what every step of a call sends: one
/// message to each rank of another domain.
class Sent {
 public:
  explicit Sent(Group& group) : group_(group), step_(all_by([&] { group.barrier(); })) {}
  NetworkStats all_by(const std::function<void()>& call) const {
    const NetworkStats before = group_.network();
    call();
    const NetworkStats after = group_.network();
    return {after.put_bytes - before.put_bytes, after.puts - before.puts,
            after.signals - before.signals};
  }
  std::uint64_t by(const std::function<void()>& call) const { return all_by(call).put_bytes; }
  std::uint64_t step() const { return step_.put_bytes; }
  const NetworkStats& whole_step() const { return step_; }

 private:
  Group& group_;
  NetworkStats step_;
};

/// Copies of this rank's tokens that cross to other domains of `size` ranks: one for each rank, or
/// one for each domain. From the definition.
std::set<std::pair<std::int64_t, int>> copies_of(const World& world, int rank, int size,
                                                 bool hierarchical) {
  std::set<std::pair<std::int64_t, int>> copies;
  const RankInput& own = world.inputs[static_cast<std::size_t>(rank)];
  for (std::int64_t i = 0; i < own.tokens * world.topk; ++i) {
    const std::int64_t id = own.topk_idx[static_cast<std::size_t>(i)];
    const int target = id < 0 ? rank : world.rank_of(id);
    if (target / size == rank / size) continue;
    copies.emplace(i / world.topk, hierarchical ? target / size : target);
  }
  return copies;
}
std::uint64_t crossings(const World& world, int rank, int size, bool hierarchical) {
  return copies_of(world, rank, size, hierarchical).size();
}

/// With each crosses its token, and its ids: of all experts to a domain, of its own to a rank, in
/// the bits of one more than there are, and in whole bytes.
std::uint64_t route_bytes(const World& world, int rank, int size, bool hierarchical) {
  std::uint64_t bytes = 0;
  for (const auto& [token, target] : copies_of(world, rank, size, hierarchical)) {
    const std::int64_t experts = hierarchical ? world.experts : world.local_experts(target);
    const auto bits = static_cast<std::uint64_t>(std::ceil(std::log2(experts + 1)));
    bytes += 4 + (static_cast<std::uint64_t>(world.topk) * bits + 7) / 8;
  }
  return bytes;
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
        const std::uint64_t row = 64 * 2, weights = 5 * 4;
        const std::uint64_t routes =
            route_bytes(exchange.world(0), rank.rank(), kSize, hierarchical);
        Received received;
        rank.equal(sent.by([&] { received = exchange.dispatch(0); }),
                   sent.step() + rows * (row + weights) + routes, "bytes of the first dispatch");
        exchange.check(received, 0);
        rank.equal(sent.by([&] { received = exchange.dispatch(1); }),
                   sent.step() + rows * (row + weights), "bytes of a cached dispatch");
        exchange.check(received, 1);
        // Back come as many rows as the others sent here, or, for a domain, as crossed to here; in
        // chunks of at most 64, so that they may be summed while others are on their way.
        std::uint64_t back = 0, chunks = 0;
        for (int peer = 0; peer < rank.size(); ++peer) {
          if (peer / kSize == rank.rank() / kSize) continue;
          const std::size_t here = static_cast<std::size_t>(rank.rank() % kSize);
          const std::size_t members = rank.rank() / kSize == 0 ? 4 : 2;
          const bool mine = static_cast<std::size_t>(peer % kSize) % members == here;
          if (!hierarchical) {
            const auto came = static_cast<std::uint64_t>(
                exchange.plan().recv_rows_per_rank()[static_cast<std::size_t>(peer)]);
            back += came;
            chunks += (came + 63) / 64;
          } else if (mine) {
            back += crossings(exchange.world(0), peer, kSize, true);
          }
        }
        const NetworkStats use = sent.all_by([&] { exchange.combine_and_check(1); });
        rank.equal(use.put_bytes, sent.step() + back * (row + weights), "bytes of a combine");
        if (!hierarchical) {
          rank.check(chunks > 2, "few chunks");
          rank.equal(use.puts, sent.whole_step().puts + 2 * chunks, "writes of a combine");
          rank.equal(use.signals, sent.whole_step().signals + chunks, "flags of a combine");
        }
        group.barrier();
      });
    }
  }
}

// Latency mode: one write for each token and rank of another domain, which brings row, scales,
// route and count, and one flag a rank. A rank that gets no token gets the count alone.
TEST(Domains, LatencyModeCrossesInOneWriteForEachTokenAndRank) {
  constexpr std::int64_t kTokens = 5, kHidden = 264;  // e4m3: 3 scales, no multiple of 16 bytes
  constexpr int kTopk = 3, kSize = 2;
  constexpr std::uint64_t kHeader = 32;  // of a source
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
            up(kHeader + 4 * (1 + 2 * kTopk)) + (codes ? up(kHidden) + up(3 * 4) : up(kHidden * 2));
        NetworkStats expected{};
        for (int peer = 0; peer < 5; ++peer) {
          if (peer / kSize == rank.rank() / kSize) continue;
          const std::uint64_t n = tokens[static_cast<std::size_t>(peer)];
          expected.puts += std::max<std::uint64_t>(n, 1);
          expected.put_bytes += n > 0 ? n * record : kHeader;
          expected.signals += 1;
        }
        LatencyDispatchOptions options{.format = format};
        const NetworkStats before = group.network();
        const LatencyReceived received =
            exchange.dispatch({x.data(), Dtype::bf16, {kTokens, kHidden}},
                              {ids.data(), Dtype::i64, {kTokens, kTopk}}, options);
        const NetworkStats after = group.network();
        rank.equal(after.puts - before.puts, expected.puts, "writes");
        rank.equal(after.put_bytes - before.put_bytes, expected.put_bytes, "bytes");
        rank.equal(after.signals - before.signals, expected.signals, "flags");
        group.barrier();
      }
    });
  }
}

// The way back: what a rank says of its combine, then its rows of one owner in one write, one for
// each slot or, summed, for each token, in any format; a flag behind each of the two.
TEST(Domains, LatencyCombineCrossesInFewWrites) {
  constexpr std::int64_t kTokens = 7, kHidden = 256, kExperts = 10;
  constexpr int kTopk = 4, kSize = 2, kRanks = 5;
  constexpr std::uint64_t kHead = 24, kWeights = kTokens * kTopk * 4;
  const auto routes = [](int rank) {
    Random random(mix(base_seed(), 206, static_cast<std::uint64_t>(rank)));
    std::vector<std::int64_t> ids(kTokens * kTopk);
    for (std::int64_t& id : ids) id = random.below(kExperts + 1) - 1;
    return ids;
  };
  const auto row_bytes = [](CombineFormat format) -> std::uint64_t {
    switch (format) {
      case CombineFormat::e4m3: return kHidden + 2 * 4;
      case CombineFormat::logfmt10: return kHidden + kHidden / 4 + 2 * 8;
      default: return kHidden * 2;
    }
  };
  run_on(
      {kRanks, {FabricKind::local, kSize, FabricKind::sim, Crossing::automatic}}, [&](Rank& rank) {
        Group group(rank.bootstrap(), group_config(rank, kExperts));
        LatencyExchange exchange(group, {kTokens, kHidden, kTopk, Dtype::bf16});
        const Sent sent(group);
        const std::vector<std::int64_t> ids = routes(rank.rank());
        const std::vector<std::uint16_t> x(kTokens * kHidden, 0x3f80);
        const std::vector<float> weights(kTokens * kTopk, 1.0f);
        for (const CombinePath path : {CombinePath::per_slot, CombinePath::per_rank}) {
          const bool by_rank = path == CombinePath::per_rank;
          for (const CombineFormat format :
               {CombineFormat::as_is, CombineFormat::e4m3, CombineFormat::logfmt10}) {
            NetworkStats expected{};
            for (int owner = 0; owner < kRanks; ++owner) {
              if (owner / kSize == rank.rank() / kSize) continue;
              std::set<std::int64_t> mine;  // tokens, or slots
              const std::vector<std::int64_t> theirs = routes(owner);
              for (std::int64_t i = 0; i < kTokens * kTopk; ++i) {
                const std::int64_t id = theirs[static_cast<std::size_t>(i)];
                if (id >= 0 && id / 2 == rank.rank()) mine.insert(by_rank ? i / kTopk : i);
              }
              expected.puts += 1 + (by_rank ? kTokens : 0) + (mine.empty() ? 0 : 1);
              expected.put_bytes +=
                  kHead + (by_rank ? kWeights : 0) + mine.size() * row_bytes(format);
              expected.signals += 2;
            }
            const LatencyReceived received =
                exchange.dispatch({x.data(), Dtype::bf16, {kTokens, kHidden}},
                                  {ids.data(), Dtype::i64, {kTokens, kTopk}});
            LatencyCombineOptions options{.path = path, .format = format};
            const NetworkStats use = sent.all_by([&] {
              (void)exchange.combine(received.x, received,
                                     ConstTensorView(weights.data(), Dtype::f32, {kTokens, kTopk}),
                                     options);
            });
            rank.equal(use.puts, expected.puts, "writes");
            rank.equal(use.put_bytes, expected.put_bytes, "bytes");
            rank.equal(use.signals, expected.signals, "flags");
          }
        }
        group.barrier();
      });
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
    DispatchOptions direct{.crossing = Crossing::direct};
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

}  // namespace
}  // namespace ferry::conformance
