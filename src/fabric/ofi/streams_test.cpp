// Streams of the network fabric, and pre-announced signals over it.
#include "fabric/ofi/streams.hpp"

#include <array>
#include <cstring>
#include <random>
#include <set>

#include "fabric/test_ranks.hpp"

namespace ferry::fabric::test {
namespace {

using ofi::kForecast;
using ofi::kStreamMask;
using ofi::Streams;

TEST(OfiStreams, ComeAroundWithoutThoseThatWereTold) {
  Streams streams;
  EXPECT_EQ(streams.next(), 0u);
  const auto told = streams.tell();
  ASSERT_TRUE(told);
  EXPECT_EQ(*told % kForecast, 0u);
  streams.share(*told);
  std::set<std::uint32_t> seen;
  for (std::uint32_t i = 0; i < 2 * (kStreamMask + 1); ++i) seen.insert(streams.next());
  EXPECT_EQ(seen.size(), kStreamMask + 1 - kForecast);
  EXPECT_FALSE(seen.contains(*told) || seen.contains(*told + kForecast - 1));
  streams.give_back(*told);
  for (std::uint32_t i = 0; i < kStreamMask + 1; ++i) EXPECT_NE(streams.next(), *told);
  streams.give_back(*told);  // who shared them is done, too, but their writes may be under way
  for (std::uint32_t i = 0; i < kStreamMask + 1 - kForecast; ++i) EXPECT_NE(streams.next(), *told);
  for (std::uint32_t i = 0; i < kStreamMask + 1; ++i) seen.insert(streams.next());
  EXPECT_EQ(seen.size(), kStreamMask + 1);
}

TEST(OfiStreams, SomeAreAlwaysLeft) {
  Streams streams;
  std::set<std::uint32_t> told;
  while (const auto first = streams.tell()) EXPECT_TRUE(told.insert(*first).second);
  EXPECT_EQ(told.size(), (kStreamMask + 1) / kForecast / 2);
  const std::uint32_t stream = streams.next();
  EXPECT_FALSE(told.contains(stream - stream % kForecast));
}

/// Rows of two exchanges at once and their credits, mostly one write for each flag and by equal
/// steps, as calls make them; now and then otherwise.
class Traffic {
 public:
  Traffic(Fabric& fabric, const Segment& mine, int rank, int exchange)
      : fabric_(fabric),
        mine_(mine),
        peer_(1 - rank),
        base_(static_cast<std::size_t>(exchange) << 22),
        out_(kSeed + static_cast<unsigned>(2 * rank + exchange)),
        in_(kSeed + static_cast<unsigned>(2 * peer_ + exchange)) {}

  void send() {
    const Call call = next(out_, sent_);
    ASSERT_TRUE(
        await_flag(mine_, base_ + kCredit, sent_.credits[2]));  // of the call before the last
    const Bytes rows(call.bytes, call.pattern);
    const std::uint64_t tag = base_ | sent_.number;
    std::size_t at = 0;
    for (const std::size_t piece : {call.bytes - call.apart, call.apart}) {
      const std::size_t gap = at > 0 ? 64 : 0;
      if (piece > 0) fabric_.put(peer_, place(sent_.number, at + gap), rows.data(), piece, tag);
      at += piece;
    }
    fabric_.publish(peer_, {mine_.id, base_ + kArrived}, sent_.value, call.bytes, tag);
  }

  void receive() {
    const Call call = next(in_, came_);
    ASSERT_TRUE(await_flag(mine_, base_ + kArrived, came_.value));
    const std::byte* rows = mine_.data + place(came_.number, 0).offset;
    const std::size_t first = call.bytes - call.apart;
    const Bytes expected(call.bytes, call.pattern);
    ASSERT_EQ(std::memcmp(rows, expected.data(), first), 0);
    const std::size_t gap = first > 0 && call.apart > 0 ? 64 : 0;
    ASSERT_EQ(std::memcmp(rows + first + gap, expected.data(), call.apart), 0);
    fabric_.publish(peer_, {mine_.id, base_ + kCredit}, came_.credits[0], 0, base_ | came_.number);
  }

 private:
  static constexpr std::size_t kArrived = 0, kCredit = 64, kRows = 4096, kRoom = 1 << 20;
  struct Call {
    std::size_t bytes, apart;  // the last `apart` bytes are a write of their own
    std::byte pattern;
  };
  struct Count {
    std::uint64_t number = 0, value = 0;
    std::array<std::uint64_t, 3>
        credits{};  // what says that this call is read, the last, the one before
  };

  Address place(std::uint64_t number, std::size_t at) const {
    return {mine_.id, base_ + kRows + number % 2 * kRoom + at};
  }

  /// Both ends draw the same.
  static Call next(std::mt19937& random, Count& count) {
    ++count.number;
    count.value += random() % 40 == 0 ? 2 : 1;
    const std::uint64_t credit = count.credits[0] + (random() % 50 == 0 ? 3 : 1);
    count.credits = {credit, count.credits[0], count.credits[1]};
    Call call{};
    const std::size_t sizes[] = {1, 200, 14 << 10, 40 << 10, 256 << 10, 600 << 10};
    call.bytes = sizes[random() % 20 == 0 ? random() % 6 : 2 + count.number / 100 % 3];
    if (random() % 30 == 0) call.apart = call.bytes / 2;
    call.pattern = static_cast<std::byte>(random());
    return call;
  }

  Fabric& fabric_;
  const Segment& mine_;
  int peer_;
  std::size_t base_;
  std::mt19937 out_, in_;
  Count sent_{}, came_{};
};

TEST(OfiSignals, PreAnnouncedTheySayTheSame) {
  if (const std::string why = no_ofi(); !why.empty()) GTEST_SKIP() << why;
  run_ranks({"ofi", "ofi", true}, 2, [](Rank& me) {
    const auto fabric = me.make();
    const Segment mine = me.connect(*fabric, 2 << 22);
    Traffic first(*fabric, mine, me.rank(), 0), second(*fabric, mine, me.rank(), 1);
    std::mt19937 turn(kSeed);
    for (int i = 0; i < 1200 && !::testing::Test::HasFatalFailure(); ++i) {
      Traffic& one = turn() % 4 == 0 ? second : first;
      one.send();
      one.receive();
    }
    me.barrier();
  });
}

}  // namespace
}  // namespace ferry::fabric::test
