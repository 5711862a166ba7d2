// What crosses between domains in latency mode, without GPUs: threads do what kernels do, and the
// proxies of several ranks carry it over networks that keep no order.
#include <bit>

#include "cuda/latency/proxy/test_ranks.hpp"
#include "engine/test_network.hpp"

namespace ferry::cuda::test {
namespace {

TEST(LatencyCrossing, CarriesAllThatKernelsWrite) {
  for (const int domain_size : {1, 2}) {
    FakeConfig config = small();
    config.domain_size = domain_size;  // of 3 ranks: even and uneven domains
    with_ranks(3, config, over_sim, [](FakeRank& rank, Bootstrap&) {
      const std::uint32_t kinds[] = {0, kPerSlot, 1, kPerSlot | 2, 2, kPerSlot | 1};
      for (Generation g = 1; g <= 24; ++g) exchange(rank, g, kinds[g % 6]);
    });
  }
}

TEST(LatencyCrossing, TwoResultsAreAliveAndCombinesComeLater) {
  with_ranks(2, small(), over_sim, [](FakeRank& rank, Bootstrap&) {
    for (Generation g = 1; g <= 20; g += 2) {
      rank.send_dispatch(g);
      rank.send_dispatch(g + 1);
      rank.receive_dispatch(g + 1);
      rank.receive_dispatch(g);
      for (const Generation of : {g + 1, g}) {
        rank.push_weights(of);
        rank.receive_weights(of);
        rank.send_sums(of, 0);
        rank.receive_sums(of, 0);
      }
      rank.release(g + 1);
    }
  });
}

/// Results that nobody receives: their rows land before others take their place.
TEST(LatencyCrossing, DroppedResultsKeepTheirPlaceUntilTheyHaveLanded) {
  with_ranks(2, small(), over_sim, [](FakeRank& rank, Bootstrap&) {
    for (Generation g = 1; g <= 40; ++g) {
      rank.send_dispatch(g);
      if (g % 4 == 0) {
        rank.receive_dispatch(g);
        rank.send_sums(g, 0);
        if (g % 8 == 0) rank.receive_sums(g, 0);
      }
      rank.release(g);
    }
    rank.receive_dispatch(40);
  });
}

TEST(LatencyCrossing, ExtentsAndCountsAreThoseOfTheFormula) {
  FakeConfig config = small();
  with_ranks(3, config, over_sim, [](FakeRank& rank, Bootstrap& bootstrap) {
    bootstrap.all_gather({}, 20s);
    const NetworkStats before = rank.network_use();
    NetworkStats expected = before;
    const auto topk = static_cast<std::size_t>(rank.view().topk);
    constexpr Generation kLast = 9;
    for (Generation g = 1; g <= kLast; ++g) {
      const std::uint32_t kind = g % 2 == 0 ? 0 : kPerSlot;
      exchange(rank, g, kind);
      // Credits that nobody has looked at go together: none of these may.
      for (const int peer : rank.beyond()) rank.await_credit(peer, g + 2);
      bootstrap.all_gather({}, 20s);
      const FakeBatch mine = rank.batch(rank.rank(), g);
      for (const int peer : rank.beyond()) {
        const FakeBatch theirs = rank.batch(peer, g);
        std::uint64_t rows = 0, weights = 0, sums = 0, sent_sums = 0;
        for (std::uint32_t token = 0; token < mine.tokens; ++token) {
          const std::uint32_t slots = rank.slots_at(mine, token, peer);
          rows += slots != 0 ? 1 : 0;
          weights += static_cast<std::uint64_t>(std::popcount(slots));
        }
        for (std::uint32_t token = 0; token < theirs.tokens; ++token) {
          const std::uint32_t slots = rank.slots_at(theirs, token, rank.rank());
          sums += slots != 0 ? 1 : 0;
          sent_sums +=
              kind == 0 ? (slots != 0 ? 1u : 0u) : static_cast<std::uint64_t>(std::popcount(slots));
        }
        // One write for each token and rank, with all that belongs to it; or the count alone.
        const std::size_t record = round_up(24 + 8 * topk, 32);
        expected.puts += std::max<std::uint64_t>(rows, 1);
        expected.put_bytes += rows > 0 ? rows * (record + rank.row_bytes(mine.format)) : 24;
        expected.put_bytes += sent_sums * rank.sum_bytes(kind);
        expected.puts += sent_sums;
        const bool pushes = (mine.format & kWithWeights) == 0 && kind == 0;
        if (pushes && weights > 0) {
          expected.put_bytes += weights * 4;
          expected.puts += 1;
        }
        // Of the dispatch, its credit, and for weights and sums, where there are any: a flag there
        // and an acknowledgement back.
        expected.signals += 2;
        expected.signals += (pushes && weights > 0 ? 1u : 0u) + (sums > 0 ? 1u : 0u);
        const bool pushed = pushes && sums > 0;
        expected.signals += (pushed ? 1u : 0u) + (weights > 0 ? 1u : 0u);
      }
    }
    bootstrap.all_gather({}, 20s);
    rank.proxy().stop();  // what is left to acknowledge
    bootstrap.all_gather({}, 20s);
    EXPECT_EQ(rank.network_use().put_bytes, expected.put_bytes);
    EXPECT_EQ(rank.network_use().puts, expected.puts);
    EXPECT_EQ(rank.network_use().signals, expected.signals);
  });
}

TEST(LatencyCrossing, ARankThatGoesOnWithoutAnotherTellsItAndTakesItBack) {
  with_ranks(3, small(true), over_sim, [](FakeRank& rank, Bootstrap& bootstrap) {
    for (Generation g = 1; g <= 3; ++g) exchange(rank, g, 0);
    bootstrap.all_gather({}, 20s);
    // Ranks 0 and 1 go without rank 2, which does what it did, without them.
    const bool masked = rank.rank() == 2;
    for (const int peer : rank.beyond()) {
      if (masked || peer == 2) rank.set_gone(peer, Gone::without_us);
    }
    const auto sees = [&](Gone gone) {
      const auto end = Clock::now() + 20s;
      for (const int peer : rank.beyond()) {
        if (!masked && peer != 2) continue;
        while (!rank.sees_gone(peer, gone) && Clock::now() < end) std::this_thread::yield();
        EXPECT_TRUE(rank.sees_gone(peer, gone)) << "rank " << rank.rank() << " of " << peer;
      }
    };
    sees(Gone::without_us);
    rank.leave_out(masked ? std::set{0, 1} : std::set{2});
    for (Generation g = 4; g <= 12; ++g) {
      rank.send_dispatch(g);
      rank.receive_dispatch(g);
      rank.release(g);
      if (masked) continue;
      // The other one's credit does not wait for the masked rank.
      const int other = 1 - rank.rank();
      const auto end = Clock::now() + 20s;
      while (!rank.has_credit(other, g + 2) && Clock::now() < end) std::this_thread::yield();
      EXPECT_TRUE(rank.has_credit(other, g + 2));
    }
    bootstrap.all_gather({}, 20s);
    for (const int peer : rank.beyond()) rank.set_gone(peer, Gone::no);
    rank.leave_out({});
    sees(Gone::no);
    for (Generation g = 13; g <= 18; ++g) exchange(rank, g, 0);
  });
}

TEST(LatencyCrossing, NobodyWaitsForARankThatNeverAnswers) {
  with_ranks(3, small(true), over_sim, [](FakeRank& rank, Bootstrap&) {
    if (rank.rank() == 2) return;  // sends and releases nothing
    for (Generation g = 1; g <= 10; ++g) {
      rank.send_dispatch(g);
      rank.leave_out({2});  // its first rows miss the deadline
      rank.receive_dispatch(g);
      rank.release(g);
    }
  });
}

TEST(LatencyCrossing, OverLibfabric) {
  if (!engine::test::has_network()) GTEST_SKIP() << "no libfabric here";
  with_ranks(2, small(), over_libfabric, [](FakeRank& rank, Bootstrap&) {
    for (Generation g = 1; g <= 12; ++g) exchange(rank, g, g % 2 == 0 ? 0 : kPerSlot);
  });
}

}  // namespace
}  // namespace ferry::cuda::test
