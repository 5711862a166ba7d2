#include "doctor/waits.hpp"

#include <gtest/gtest.h>

#include <cstdint>
#include <fstream>
#include <random>
#include <stdexcept>

namespace ferry::cli {
namespace {

/// Everybody waited about 20 us for everybody.
WaitMatrix usual(std::size_t ranks, unsigned seed = 20261121) {
  std::mt19937 random(seed);
  WaitMatrix waits(ranks, std::vector<double>(ranks, 0));
  for (auto& row : waits) {
    for (double& value : row) value = 15'000 + random() % 10'000;
  }
  for (std::size_t r = 0; r < ranks; ++r) waits[r][r] = random() % 100;
  return waits;
}

TEST(Waits, NothingOdd) {
  for (std::size_t ranks : {1, 2, 3, 4, 8, 64}) {
    EXPECT_TRUE(slow_parts(usual(ranks)).empty()) << ranks;
    EXPECT_NE(describe_waits(usual(ranks)).find("Nothing odd"), std::string::npos);
  }
}

TEST(Waits, NamesASlowSender) {
  for (std::size_t ranks : {3, 4, 8, 64}) {
    for (const std::size_t slow : {std::size_t{0}, ranks / 2, ranks - 1}) {
      WaitMatrix waits = usual(ranks);
      // The others wait for it; it waits for nobody.
      for (std::size_t r = 0; r < ranks; ++r) waits[r][slow] = r == slow ? 0 : 2e6;
      for (std::size_t r = 0; r < ranks; ++r) waits[slow][r] = 10;
      const auto parts = slow_parts(waits);
      ASSERT_EQ(parts.size(), 1u) << describe_waits(waits);
      EXPECT_EQ(parts[0].kind, SlowPart::Kind::sender);
      EXPECT_EQ(parts[0].from, static_cast<int>(slow));
      EXPECT_EQ(parts[0].waited_ns, 2e6);
      const std::string text = describe_waits(waits);
      EXPECT_NE(text.find("Rank " + std::to_string(slow) + " is a slow sender"), std::string::npos);
      EXPECT_NE(text.find("2.00 ms"), std::string::npos);
    }
  }
}

TEST(Waits, NamesASlowReceiver) {
  for (std::size_t ranks : {3, 4, 8, 64}) {
    WaitMatrix waits = usual(ranks);
    const std::size_t slow = ranks - 2;
    for (std::size_t r = 0; r < ranks; ++r) waits[slow][r] = r == slow ? 0 : 500'000;
    const auto parts = slow_parts(waits);
    ASSERT_EQ(parts.size(), 1u) << describe_waits(waits);
    EXPECT_EQ(parts[0].kind, SlowPart::Kind::receiver);
    EXPECT_EQ(parts[0].to, static_cast<int>(slow));
  }
}

TEST(Waits, NamesASlowLink) {
  for (std::size_t ranks : {3, 4, 8, 64}) {
    WaitMatrix waits = usual(ranks);
    waits[2][0] = 300'000;
    const auto parts = slow_parts(waits);
    ASSERT_EQ(parts.size(), 1u) << describe_waits(waits);
    EXPECT_EQ(parts[0].kind, SlowPart::Kind::link);
    EXPECT_EQ(parts[0].from, 0);
    EXPECT_EQ(parts[0].to, 2);
    EXPECT_NE(describe_waits(waits).find("from rank 0 to rank 2"), std::string::npos);
  }
}

TEST(Waits, TwoSlowSendersAndALink) {
  WaitMatrix waits = usual(8);
  for (std::size_t r = 0; r < 8; ++r) {
    if (r != 1) waits[r][1] = 1e6;
    if (r != 5) waits[r][5] = 1e6;
  }
  waits[3][4] = 4e5;
  const auto parts = slow_parts(waits);
  ASSERT_EQ(parts.size(), 3u) << describe_waits(waits);
  EXPECT_EQ(parts[0].from, 1);
  EXPECT_EQ(parts[1].from, 5);
  EXPECT_EQ(parts[2].kind, SlowPart::Kind::link);
}

/// Four ranks on two cores: who was off the CPU is waited for, and waits longer.
TEST(Waits, NobodyIsBlamedForTimeWithoutACpu) {
  WaitMatrix late = usual(4), early = usual(4), link = usual(4);
  for (std::size_t r = 0; r < 4; ++r) {
    if (r != 1) late[r][1] = 12e6;
    if (r != 2) early[2][r] = 12e6;
  }
  link[3][0] = 12e6;
  for (WaitMatrix* waits : {&late, &early, &link}) {
    ASSERT_EQ(slow_parts(*waits).size(), 1u);
    EXPECT_TRUE(slow_parts(*waits)[0].by_itself);
    EXPECT_NE(describe_waits(*waits).find("No rank says"), std::string::npos);
    for (std::size_t r = 0; r < 4; ++r) (*waits)[r][r] = 6e6;
    ASSERT_EQ(slow_parts(*waits).size(), 1u);
    EXPECT_FALSE(slow_parts(*waits)[0].by_itself);
    const std::string text = describe_waits(*waits);
    EXPECT_NE(text.find("had no CPU for 12.00 ms"), std::string::npos) << text;
    EXPECT_EQ(text.find("is slow"), text.find("is slow by that")) << text;
    EXPECT_EQ(text.find("is a slow"), std::string::npos) << text;
  }
}

TEST(Waits, WhoIsSlowBesidesIsNamed) {
  WaitMatrix waits = usual(4);
  for (std::size_t r = 0; r < 4; ++r) {
    waits[r][1] = 100e6;
    waits[r][r] = 6e6;
  }
  const auto parts = slow_parts(waits);
  ASSERT_EQ(parts.size(), 1u);
  EXPECT_TRUE(parts[0].by_itself);
  EXPECT_NE(describe_waits(waits).find("Rank 1 is a slow sender"), std::string::npos);
}

TEST(Waits, WhatIsSmallBesideTheWorstIsLeftOut) {
  WaitMatrix waits = usual(8);
  for (std::size_t r = 0; r < 8; ++r) waits[r][1] = r == 1 ? 0 : 1e8;
  waits[3][4] = 4e5;
  EXPECT_EQ(slow_parts(waits).size(), 1u) << describe_waits(waits);
}

TEST(Waits, TwoRanksTellNoMoreThanTheirLink) {
  const WaitMatrix waits{{0, 1e6}, {1e4, 0}};
  const auto parts = slow_parts(waits);
  ASSERT_EQ(parts.size(), 1u);
  EXPECT_EQ(parts[0].from, 1);
  EXPECT_NE(describe_waits(waits).find("look alike"), std::string::npos);
}

TEST(Waits, ShortWaitsAreNotLong) {
  WaitMatrix waits(4, std::vector<double>(4, 100));
  for (auto& row : waits) row[1] = 900;  // nine times as long, but who cares
  EXPECT_TRUE(slow_parts(waits).empty());
}

TEST(WaitsFile, TextJsonAndNumpy) {
  const WaitMatrix expected{{0, 5.5}, {7, 1}};
  EXPECT_EQ(parse_waits("a", "# ns\n0, 5.5\n\n7 1 # last\n"), expected);
  EXPECT_EQ(parse_waits("a", " [[0, 5.5], [7, 1]]"), expected);
  const auto npy = [](const std::string& dtype, const std::string& shape) {
    std::string header =
        "{'descr': '" + dtype + "', 'fortran_order': False, 'shape': " + shape + ", }";
    header.resize(118, ' ');
    return std::string("\x93NUMPY\x01\x00", 8) + static_cast<char>(header.size()) + '\0' + header;
  };
  std::string file = npy("<i8", "(2, 2)");
  for (const std::int64_t value : {0, 3, 7, 1}) {
    file.append(reinterpret_cast<const char*>(&value), sizeof(value));
  }
  EXPECT_EQ(parse_waits("a.npy", file), (WaitMatrix{{0, 3}, {7, 1}}));
  EXPECT_THROW(parse_waits("a.npy", file.substr(0, file.size() - 1)), std::runtime_error);
  EXPECT_THROW(parse_waits("a.npy", file.substr(0, 11)), std::runtime_error);
  EXPECT_THROW(parse_waits("a.npy", npy("<i8", "(99999999999, 2)")), std::runtime_error);
  EXPECT_THROW(parse_waits("a.npy", npy("<f4", "(0, 0)")), std::runtime_error);
  EXPECT_THROW(parse_waits("a.npy", npy("<i8", "(-2, 1)") + std::string(16, 0)),
               std::runtime_error);
  EXPECT_THROW(parse_waits("a", "1 two"), std::runtime_error);
  try {
    parse_waits("a", "1 \033[2J\a");
    ADD_FAILURE() << "not refused";
  } catch (const std::runtime_error& error) {
    EXPECT_EQ(std::string(error.what()).find_first_of("\033\a"), std::string::npos);
  }
  EXPECT_THROW(parse_waits("a", "[[1, \"two\"]]"), std::runtime_error);
}

TEST(WaitsFile, OneFileOrOneForEachRank) {
  const std::string base = testing::TempDir() + "ferry-waits-";
  const auto write = [&](const std::string& name, const std::string& content) {
    std::ofstream(base + name) << content;
    return base + name;
  };
  const std::string whole = write("whole", "0 5\n7 1\n"), first = write("0", "0 5\n"),
                    second = write("1", "7 1\n"), odd = write("odd", "1 2 3\n4 5 6\n");
  EXPECT_EQ(read_waits({whole}), (WaitMatrix{{0, 5}, {7, 1}}));
  EXPECT_EQ(read_waits({first, second}), read_waits({whole}));
  EXPECT_THROW(read_waits({first}), std::runtime_error);
  EXPECT_THROW(read_waits({whole, second}), std::runtime_error);
  EXPECT_THROW(read_waits({odd}), std::runtime_error);
  EXPECT_THROW(read_waits({write("minus", "0 -5\n7 1\n")}), std::runtime_error);
  EXPECT_THROW(read_waits({write("long", "0 1e308\n7 1\n")}), std::runtime_error);
  EXPECT_THROW(read_waits({"/dev/zero"}), std::runtime_error);
  EXPECT_THROW(read_waits({write("empty", "")}), std::runtime_error);
  EXPECT_THROW(read_waits({base + "none"}), std::runtime_error);
}

}  // namespace
}  // namespace ferry::cli
