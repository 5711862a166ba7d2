// Domain tokens, carried by plain exchanges inside the domains, land where the whole group's order
// says, and sums come together in the right order: tried on random routes.
#include "core/crossing_lists.hpp"

#include <gtest/gtest.h>

#include <algorithm>
#include <map>

#include "core/crossing_layout.hpp"
#include "core/test_crossings.hpp"

namespace ferry::test {
namespace {

constexpr unsigned kListsSeed = 20261121;

/// What all ranks make of it.
struct Crossed {
  std::vector<CrossingLists> lists{};
  std::vector<DomainTokens> tokens{};
  std::vector<std::vector<int>> owners{};  ///< of each domain token
};

Crossed cross(const World& world, Crossing how) {
  Crossed all;
  for (int r = 0; r < world.placement.ranks; ++r) {
    all.lists.push_back(
        world.has(r) ? make_crossing_lists(world.plans[index(r)], world.crossings[index(r)], how)
                     : CrossingLists{});
  }
  for (int r = 0; r < world.placement.ranks; ++r) {
    std::vector<std::vector<std::int32_t>> names, ids;
    for (const CrossingBlock& block : all.lists[index(r)].in) {
      const CrossingLists& theirs = all.lists[index(block.rank)];
      std::int64_t first = 0;
      for (const CrossingBlock& sent : theirs.out) {
        if (sent.rank < r) first += sent.rows;
      }
      names.emplace_back(theirs.tokens.begin() + first, theirs.tokens.begin() + first + block.rows);
      ids.emplace_back();
      for (const std::int32_t token : names.back()) {
        const auto from = world.routes[index(block.rank)].begin() + token * world.topk;
        ids.back().insert(ids.back().end(), from, from + world.topk);
      }
    }
    std::vector<CrossedRoutes> routes;
    for (std::size_t i = 0; i < names.size(); ++i) routes.push_back({names[i], ids[i]});
    all.owners.emplace_back();
    all.tokens.emplace_back();
    if (!world.has(r)) continue;
    all.tokens.back() =
        make_domain_tokens(world.plans[index(r)], world.crossings[index(r)],
                           world.seats.members(world.seats.of(r)), all.lists[index(r)], routes);
    const DomainTokens& made = all.tokens.back();
    all.owners.back().resize(index(made.count()));
    for (std::size_t s = 0; s + 1 < made.first.size(); ++s) {
      std::fill(all.owners.back().begin() + made.first[s],
                all.owners.back().begin() + made.first[s + 1], made.sources[s]);
    }
  }
  return all;
}

/// The destinations of a domain token, as an exchange inside its domain numbers them.
std::set<int> members_of(const DomainTokens& made, std::int64_t v, int topk,
                         const Placement& inside) {
  std::set<int> members;
  for (int k = 0; k < topk; ++k) {
    const std::int32_t id = made.ids[index(v * topk + k)];
    if (id >= 0) members.insert(inside.rank_of(id));
  }
  return members;
}

Placement inside_of(const World& world, int domain) {
  Placement inside{0, static_cast<int>(world.seats.members(domain).size())};
  for (const int member : world.seats.members(domain)) {
    inside.experts += world.placement.local_experts(member);
  }
  return inside;
}

TEST(CrossingLists, RowsLandInTheOrderOfTheWholeGroup) {
  std::mt19937 random(kListsSeed);
  for (int round = 0; round < 300; ++round) {
    const World world = any_world(random, round % 2 == 1);
    for (const Crossing how : {Crossing::direct, Crossing::hierarchical}) {
      const Crossed all = cross(world, how);
      // At each rank: which token lies in each row.
      std::map<int, std::map<std::int64_t, std::pair<int, std::int32_t>>> landed;
      for (int r = 0; r < world.placement.ranks; ++r) {
        if (!world.has(r)) continue;
        const DomainTokens& made = all.tokens[index(r)];
        ASSERT_EQ(made.offender, -1);
        const int domain = world.seats.of(r);
        const auto& members = world.seats.members(domain);
        const Placement inside = inside_of(world, domain);
        std::vector<std::int64_t> ordinal(members.size());
        for (std::int64_t v = 0; v < made.count(); ++v) {
          const auto source = index(std::upper_bound(made.first.begin(), made.first.end(), v) -
                                    made.first.begin() - 1);
          for (const int m : members_of(made, v, world.topk, inside)) {
            const std::int64_t row =
                ordinal[index(m)]++ + made.shift[source * members.size() + index(m)];
            const bool fresh =
                landed[members[index(m)]]
                    .emplace(row, std::pair(made.sources[source], made.names[index(v)]))
                    .second;
            ASSERT_TRUE(fresh) << "two rows at the same place";
          }
        }
      }
      for (int d = 0; d < world.placement.ranks; ++d) {
        std::int64_t row = 0;
        for (int s = 0; s < world.placement.ranks; ++s) {
          const auto tokens = static_cast<std::int64_t>(world.routes[index(s)].size()) / world.topk;
          for (std::int64_t t = 0; t < tokens; ++t) {
            if (!world.targets(s, t).contains(d)) continue;
            const auto at = landed[d].find(row++);
            ASSERT_NE(at, landed[d].end());
            ASSERT_EQ(at->second, std::pair(s, static_cast<std::int32_t>(t)));
          }
        }
        ASSERT_EQ(landed[d].size(), index(row));
      }
    }
  }
}

TEST(CrossingLists, OwnTokensComeFirstThenTheStagingBufferAsItLies) {
  std::mt19937 random(kListsSeed + 2);
  for (int round = 0; round < 100; ++round) {
    const World world = any_world(random, round % 2 == 1);
    for (const Crossing how : {Crossing::direct, Crossing::hierarchical}) {
      const Crossed all = cross(world, how);
      for (int r = 0; r < world.placement.ranks; ++r) {
        if (!world.has(r)) continue;
        const DomainTokens& made = all.tokens[index(r)];
        EXPECT_EQ(made.sources.front(), r);
        EXPECT_EQ(made.count() - made.own(), all.lists[index(r)].in_rows());
        for (std::int64_t v = 0; v < made.own(); ++v) EXPECT_GE(made.from[index(v)], 0);
        for (std::int64_t v = made.own(); v < made.count(); ++v) {
          EXPECT_EQ(made.from[index(v)], -1 - (v - made.own()));
        }
      }
    }
  }
}

TEST(CrossingLists, WithAPortionCameAllOfTheTokensBeforeItsEnd) {
  std::mt19937 random(kListsSeed + 3);
  bool early = false;
  for (int round = 0; round < 100; ++round) {
    const World world = any_world(random);
    for (const Crossing how : {Crossing::direct, Crossing::hierarchical}) {
      const Crossed all = cross(world, how);
      CrossingLayout layout = make_crossing_layout({16, 0, 0});
      layout.chunk_rows = 1 + static_cast<std::int64_t>(random() % 3);
      for (int r = 0; r < world.placement.ranks; ++r) {
        const CrossingLists& lists = all.lists[index(r)];
        const auto tokens = static_cast<std::int64_t>(world.routes[index(r)].size()) / world.topk;
        const int portions = 1 + static_cast<int>(random() % 4);
        const auto ends = tokens_after(lists, layout, tokens, portions);
        ASSERT_EQ(ends.size(), index(portions));
        EXPECT_EQ(ends.back(), tokens);
        for (int portion = 0; portion < portions; ++portion) {
          // The first token of which some row has not come.
          std::int64_t first = 0, missing = tokens;
          for (const CrossingBlock& block : lists.out) {
            const std::int64_t chunks = layout.chunks(block.rows) * (portion + 1) / portions;
            for (std::int64_t row = 0; row < block.rows; ++row) {
              if (row / layout.chunk_rows < chunks) continue;
              missing = std::min(missing, std::int64_t{lists.tokens[index(first + row)]});
            }
            first += block.rows;
          }
          EXPECT_EQ(ends[index(portion)], missing);
          early = early || (missing > 0 && missing < tokens);
        }
      }
    }
  }
  EXPECT_TRUE(early) << "no case in which some tokens can be summed before others have come";
}

TEST(CrossingLists, SumsComeTogetherInOrder) {
  std::mt19937 random(kListsSeed + 1);
  for (int round = 0; round < 300; ++round) {
    const World world = any_world(random, round % 2 == 1);
    for (const Crossing how : {Crossing::direct, Crossing::hierarchical}) {
      const Crossed all = cross(world, how);
      for (int r = 0; r < world.placement.ranks; ++r) {
        if (!world.has(r)) continue;
        const DomainTokens& made = all.tokens[index(r)];
        const CrossingLists& lists = all.lists[index(r)];
        const auto tokens = static_cast<std::int64_t>(world.routes[index(r)].size()) / world.topk;
        ASSERT_EQ(made.sum_offset.size(), index(tokens) + 1);
        for (std::int64_t t = 0; t < tokens; ++t) {
          std::set<int> wanted;  // ranks or domains
          for (const int d : world.targets(r, t)) {
            wanted.insert(how == Crossing::direct ? d : world.domains.of(d));
          }
          std::vector<int> got;
          for (auto i = made.sum_offset[index(t)]; i < made.sum_offset[index(t) + 1]; ++i) {
            const std::int32_t part = made.sums[index(i)];
            if (part >= 0) {
              ASSERT_EQ(made.from[index(part)], t);
              const auto members =
                  members_of(made, part, world.topk, inside_of(world, world.seats.of(r)));
              ASSERT_FALSE(members.empty());
              const int rank = world.seats.members(world.seats.of(r))[index(*members.begin())];
              got.push_back(how == Crossing::direct ? rank : world.domains.of(rank));
              continue;
            }
            ASSERT_EQ(lists.tokens[index(-1 - part)], t);
            std::int64_t row = -1 - part;
            auto block = lists.out.begin();
            for (; row >= block->rows; ++block) row -= block->rows;
            got.push_back(how == Crossing::direct ? block->rank : world.domains.of(block->rank));
          }
          ASSERT_EQ(got, std::vector<int>(wanted.begin(), wanted.end()));
        }
      }
    }
  }
}

TEST(CrossingLists, OtherRoutesThanWereCountedAreSeen) {
  // Two ranks, each a domain: rank 1's one token is for rank 0.
  const Placement placement{2, 2};
  const Domains domains = Domains::blocks(2, 1);
  const RouteCounts none = count_routes({}, 0, 1, placement);
  const std::vector<std::int32_t> counts{0, 0, 0, 0, 1, 0, 1, 0};
  const ExchangePlan plan = make_plan(none, counts, placement, 0);
  const CrossingPlan crossing = make_crossing_plan(plan, domains, {0, 0, 1, 0});
  for (const Crossing how : {Crossing::direct, Crossing::hierarchical}) {
    const CrossingLists lists = make_crossing_lists(plan, crossing, how);
    ASSERT_EQ(lists.in.size(), 1u);
    const std::int32_t token = 0;
    for (const std::int32_t id : {0, 1, -1, 2, -2}) {
      const CrossedRoutes routes{{&token, 1}, {&id, 1}};
      const DomainTokens made =
          make_domain_tokens(plan, crossing, domains.members(0), lists, {&routes, 1});
      EXPECT_EQ(made.offender, id == 0 ? -1 : 1) << id;
    }
  }
}

TEST(CrossingLayout, PortionsShareTheChunks) {
  EXPECT_EQ(crossing_portions(0), 1);
  EXPECT_EQ(crossing_portions(7), 1);
  EXPECT_EQ(crossing_portions(8), 2);
  EXPECT_EQ(crossing_portions(1000), 8);
  const CrossingLayout layout = make_crossing_layout({16 * 1024, 0, 0});
  for (const std::int64_t rows : {0, 1, 16, 17, 100, 1000}) {
    for (const int portions : {1, 3, 8}) {
      EXPECT_EQ(rows_after(layout, rows, -1, portions), 0);
      EXPECT_EQ(rows_after(layout, rows, portions - 1, portions), rows);
      for (int portion = 0; portion < portions; ++portion) {
        const std::int64_t end = rows_after(layout, rows, portion, portions);
        EXPECT_GE(end, rows_after(layout, rows, portion - 1, portions));
        EXPECT_TRUE(end == rows || end % layout.chunk_rows == 0);
      }
    }
  }
}

TEST(CrossingLayout, ChunksOfAllBlocksLeaveInTurn) {
  const CrossingLayout layout = make_crossing_layout({16 * 1024, 0, 0});
  std::mt19937 random(kListsSeed + 4);
  for (int round = 0; round < 50; ++round) {
    std::vector<std::int64_t> first{0};
    const int blocks = 1 + static_cast<int>(random() % 5);
    std::int64_t all = 0;
    for (int b = 0; b < blocks; ++b) {
      const auto rows = static_cast<std::int64_t>(random() % 200);
      first.push_back(first.back() + rows);
      all += layout.chunks(rows);
    }
    std::vector<std::int64_t> wanted(index(blocks));  // the next chunk of each block
    CrossingChunk last{blocks, -1};
    for (std::int64_t number = 0; number < all; ++number) {
      const CrossingChunk got = chunk_in_turn(layout, first.data(), blocks, number);
      ASSERT_LT(got.block, blocks);
      ASSERT_EQ(got.chunk, wanted[index(got.block)]++);
      ASSERT_TRUE(got.chunk == last.chunk ? got.block > last.block : got.chunk == last.chunk + 1);
      last = got;
    }
    for (int b = 0; b < blocks; ++b) {
      EXPECT_EQ(wanted[index(b)], layout.chunks(first[index(b + 1)] - first[index(b)]));
    }
  }
}

TEST(CrossingLayout, ChunksHoldWhatCrossesAndNoMore) {
  const CrossingLayout layout = make_crossing_layout({16 * 1024, 3, 2});
  EXPECT_EQ(layout.chunk_rows, 16);
  EXPECT_EQ(layout.each(), 16 * 1024u + 20);
  EXPECT_EQ(layout.chunks(33), 3);
  std::vector<bool> used(layout.block_bytes(33));
  for (std::int64_t row = 0; row < 33; ++row) {
    const CrossingPlace place = crossing_place(layout, 33, row);
    EXPECT_EQ(place.row % 16, 0u);
    for (const auto& [at, bytes] :
         {std::pair(place.row, layout.row_bytes), std::pair(place.scales, layout.scale_bytes),
          std::pair(place.weights, layout.weight_bytes)}) {
      for (std::size_t i = at; i < at + bytes; ++i) {
        ASSERT_FALSE(used.at(i));
        used[i] = true;
      }
    }
  }
  // Each chunk's bytes lie at its beginning, without gaps.
  for (std::int64_t chunk = 0; chunk < 3; ++chunk) {
    const std::size_t begin = index(chunk) * layout.chunk_bytes;
    const std::size_t full = index(layout.rows_of(33, chunk)) * layout.each();
    for (std::size_t i = begin; i < begin + full; ++i) ASSERT_TRUE(used[i]);
  }
}

}  // namespace
}  // namespace ferry::test
