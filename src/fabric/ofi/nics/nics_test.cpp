// Several NICs for each rank: addresses of loopback stand for them.
#include <algorithm>
#include <numeric>
#include <random>

#include "fabric/ofi/ofi.hpp"
#include "fabric/test_ranks.hpp"

namespace ferry::fabric::test {
namespace {

constexpr Setting kOfiThreads{"ofi", "ofi", false};
constexpr std::array<const char*, 3> kNics{"127.0.0.1", "127.0.0.1,127.0.0.2",
                                           "127.0.0.1,127.0.0.2,127.0.0.3"};

class OfiNics : public ::testing::Test {
 protected:
  void SetUp() override {
    if (const std::string why = no_ofi(); !why.empty()) GTEST_SKIP() << why;
  }
};

/// `nics` for each rank.
OfiOptions with_nics(int nics, int endpoints = 1) {
  OfiOptions options = ofi_options();
  options.nics = kNics[std::size_t(nics - 1)];
  options.nics_per_rank = nics;
  options.endpoints = endpoints;
  return options;
}

std::byte byte_of(int source, int target, std::uint64_t round, std::size_t at) {
  return static_cast<std::byte>(std::size_t(source * 7 + target * 31) + round * 5 + at * 13 +
                                (at >> 8));
}

/// Rows of 1000 bytes, each of another value than those beside it.
Bytes bytes_of(int source, int target, std::uint64_t round, std::size_t count) {
  constexpr std::size_t kRow = 1000;
  Bytes all(count);
  for (std::size_t at = 0; at < count; at += kRow) {
    const std::byte value = byte_of(source, target, round, at / kRow);
    std::memset(all.data() + at, static_cast<int>(value), std::min(kRow, count - at));
  }
  return all;
}

constexpr std::size_t kLarge = (1 << 20) + 54321;  // a few chunks and a part of one
constexpr std::size_t kRoom = std::size_t{2} << 20;

/// Everybody puts to everybody, with a flag behind it; small and large.
void exchange(Rank& me, Fabric& fabric, const Segment& mine, std::uint64_t round, std::size_t bytes,
              std::uint64_t space) {
  // A place of its own for each round: nothing is overwritten.
  const auto at = [&](int source) {
    return 4096 + ((round - 1) * std::uint64_t(me.size()) + std::uint64_t(source)) * kRoom;
  };
  const std::uint64_t tag = space << 40 | round;
  for (int peer = 0; peer < me.size(); ++peer) {
    if (peer == me.rank()) continue;
    const Bytes data = bytes_of(me.rank(), peer, round, bytes);
    fabric.put(peer, {mine.id, at(me.rank())}, data.data(), bytes, tag);
    fabric.publish(peer, {mine.id, 64 * std::uint64_t(me.rank())}, round, bytes, tag);
  }
  for (int peer = 0; peer < me.size(); ++peer) {
    if (peer == me.rank()) continue;
    ASSERT_TRUE(await_flag(mine, 64 * std::uint64_t(peer), round));
    const Bytes expected = bytes_of(peer, me.rank(), round, bytes);
    ASSERT_EQ(std::memcmp(mine.data + at(peer), expected.data(), bytes), 0) << "rank " << peer;
  }
  me.barrier();
}

std::uint64_t sum_of(const std::vector<NicStats>& nics) {
  return std::accumulate(nics.begin(), nics.end(), std::uint64_t{0},
                         [](std::uint64_t sum, const NicStats& nic) { return sum + nic.bytes; });
}

TEST_F(OfiNics, LargeTransfersGoOverAllAndSmallOnesOverOne) {
  run_ranks(kOfiThreads, 2, [](Rank& me) {
    const auto fabric = make_ofi_fabric(me.bootstrap, with_nics(2), kDeadline);
    const Segment mine = me.connect(*fabric, 4096 + 4 * 2 * kRoom);
    exchange(me, *fabric, mine, 1, 3000, 0);
    std::vector<NicStats> nics = fabric->nics();
    ASSERT_EQ(nics.size(), 2u);
    EXPECT_EQ(nics[0].address, "127.0.0.1");
    EXPECT_EQ(nics[1].address, "127.0.0.2");
    EXPECT_EQ(nics[0].bytes, 3000u);
    EXPECT_EQ(nics[1].bytes, 0u);
    for (std::uint64_t round = 2; round <= 4; ++round)
      exchange(me, *fabric, mine, round, kLarge, 0);
    nics = fabric->nics();
    EXPECT_EQ(sum_of(nics), 3000 + 3 * kLarge);
    EXPECT_EQ(sum_of(nics), fabric->network_use().put_bytes);
    for (const NicStats& nic : nics) {
      EXPECT_GE(nic.bytes, std::size_t{256} << 10) << nic.address;  // a chunk: else by load
      EXPECT_NE(nic.why.find("one of 2 as near"), std::string::npos) << nic.why;
      EXPECT_NE(nic.why.find("shared by 2 ranks"), std::string::npos) << nic.why;
    }
  });
}

TEST_F(OfiNics, RanksMayHaveDifferentNumbersAndSeveralEndpoints) {
  run_ranks(kOfiThreads, 3, [](Rank& me) {
    const int own = 1 + (me.rank() + 1) % 3;  // 2, 3, 1
    const auto fabric = make_ofi_fabric(me.bootstrap, with_nics(own, 2), kDeadline);
    EXPECT_EQ(fabric->nics().size(), std::size_t(own));
    const Segment mine = me.connect(*fabric, 4096 + 6 * 3 * kRoom);
    std::uint64_t round = 0;
    for (const std::uint64_t space : {0, 1}) {
      for (const std::size_t bytes : {std::size_t{40}, std::size_t{20'000}, kLarge}) {
        exchange(me, *fabric, mine, ++round, bytes, space);
        EXPECT_EQ(fabric->peer_state((me.rank() + 1) % 3), PeerState::alive);
      }
    }
    EXPECT_EQ(sum_of(fabric->nics()), fabric->network_use().put_bytes);
  });
}

TEST_F(OfiNics, ScatteredRowsOfSeveralThreadsArriveBehindTheirFlags) {
  run_ranks(kOfiThreads, 2, [](Rank& me) {
    constexpr std::size_t kRows = 300, kRow = 5000, kThreads = 3;
    const auto fabric = make_ofi_fabric(me.bootstrap, with_nics(3), kDeadline);
    const Segment mine = me.connect(*fabric, 4096 + kThreads * kRows * kRow);
    const int peer = 1 - me.rank();
    std::vector<std::thread> threads;
    for (std::size_t t = 0; t < kThreads; ++t) {
      threads.emplace_back([&, t] {
        std::vector<std::size_t> order(kRows);
        std::iota(order.begin(), order.end(), 0u);
        std::shuffle(order.begin(), order.end(), std::mt19937(kSeed + unsigned(t)));
        for (const std::size_t row : order) {
          const Bytes data(kRow, byte_of(me.rank(), peer, t, row));
          const std::uint64_t to = 4096 + (t * kRows + row) * kRow;
          fabric->put(peer, {mine.id, to}, data.data(), kRow, t + 1);
        }
        fabric->publish(peer, {mine.id, 64 * t}, 1, kRows * kRow, t + 1);
      });
    }
    for (std::size_t t = 0; t < kThreads; ++t) {
      ASSERT_TRUE(await_flag(mine, 64 * t, 1));
      for (std::size_t row = 0; row < kRows; ++row) {
        const std::byte* came = mine.data + 4096 + (t * kRows + row) * kRow;
        ASSERT_EQ(came[0], byte_of(peer, me.rank(), t, row));
        ASSERT_EQ(came[kRow - 1], came[0]);
      }
    }
    for (std::thread& thread : threads) thread.join();
    for (const NicStats& nic : fabric->nics()) EXPECT_GT(nic.bytes, 0u) << nic.address;
    me.barrier();
  });
}

TEST_F(OfiNics, OptionsThatCannotBe) {
  run_ranks(kOfiThreads, 1, [](Rank& me) {
    const auto refused = [&](ErrorKind kind, const OfiOptions& options, const char* words) {
      expect_error(kind, {words}, [&] { make_ofi_fabric(me.bootstrap, options, kDeadline); });
    };
    refused(ErrorKind::invalid_argument, {.nics_per_rank = 9}, "NICs of a rank are 9");
    refused(ErrorKind::invalid_argument, {.nics_per_rank = -1}, "NICs of a rank are -1");
    refused(ErrorKind::invalid_argument, {.endpoints = 4, .nics_per_rank = 3}, "3 NICs of a rank");
    refused(ErrorKind::unsupported, {.nics = "127.0.0.1,wlan7"}, "no NIC wlan7");
    refused(ErrorKind::unsupported, {.nics = "192.0.2.99"}, "no NIC 192.0.2.99");
  });
}

TEST_F(OfiNics, ARankThatIsKilledIsDeadByAllItsNics) {
  const Setting processes{"ofi", "ofi", true};
  Processes ranks(processes, 3, [](Rank& me) {
    const auto fabric = make_ofi_fabric(me.bootstrap, with_nics(2), kDeadline);
    const std::uint64_t after = 4096 + 3 * kRoom;  // the exchange
    const Segment mine = me.connect(*fabric, after + kRoom);
    exchange(me, *fabric, mine, 1, kLarge, 0);
    if (me.rank() == 1) raise(SIGKILL);
    EXPECT_TRUE(eventually([&] { return fabric->peer_state(1) == PeerState::dead; }, 5s));
    const Bytes data(kLarge, std::byte{1});
    for (int i = 0; i < 4; ++i) fabric->put(1, {mine.id, after}, data.data(), data.size(), 5);
    fabric->publish(1, {mine.id, 64}, 1, 4 * data.size(), 5);
    const int other = 2 - me.rank();  // all goes on with the others
    fabric->put(other, {mine.id, after}, data.data(), data.size(), 6);
    fabric->publish(other, {mine.id, 128}, 1, data.size(), 6);
    EXPECT_TRUE(await_flag(mine, 128, 1));
  });
  ranks.expect_success({1});
}

}  // namespace
}  // namespace ferry::fabric::test
