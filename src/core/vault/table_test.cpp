#include "core/vault/table.hpp"

#include <gtest/gtest.h>

#include <cstring>

namespace ferry {
namespace {

std::vector<std::byte> memory_with(std::uint64_t version, std::span<const VersionPart> table,
                                   std::size_t room) {
  std::vector<std::byte> memory(room);
  const VersionHead head{version, table.size(), {}};
  std::memcpy(memory.data(), &head, sizeof(head));
  std::memcpy(memory.data() + sizeof(head), table.data(), table.size_bytes());
  return memory;
}

TEST(VaultTable, IsReadAsItWasLaidOut) {
  const std::vector<PartOutline> parts{{7, 100, "f32[5, 5]"}, {-1, 0, "u8[0]"}, {7, 64, "f64[8]"}};
  const auto table = lay_out(parts);
  EXPECT_EQ(table[0].offset, 64u + 3 * 128u);
  EXPECT_EQ(table[1].offset, table[0].offset + 128);
  EXPECT_EQ(version_bytes(table), table[0].offset + 128 + 64);
  const auto memory = memory_with(4, table, version_bytes(table));
  std::string wrong;
  const auto read = read_table(memory.data(), memory.size(), memory.size(), 4, wrong);
  ASSERT_TRUE(read) << wrong;
  ASSERT_EQ(read->size(), 3u);
  EXPECT_EQ((*read)[2].key, 7);
  EXPECT_EQ((*read)[2].bytes, 64u);
  EXPECT_EQ(type_of((*read)[2]), "f64[8]");
  EXPECT_EQ(version_bytes({}), 64u);
}

TEST(VaultTable, WhatCannotBeIsRefused) {
  const auto good = lay_out(std::vector<PartOutline>{{1, 128, "f32[32]"}, {2, 64, "f32[16]"}});
  const std::size_t room = version_bytes(good);
  const auto refused = [&](std::vector<VersionPart> table, std::uint64_t version,
                           std::size_t bytes) {
    const auto memory = memory_with(version, table, room);
    std::string wrong;
    const bool none = !read_table(memory.data(), bytes, bytes, 9, wrong);
    return none && !wrong.empty();
  };
  EXPECT_FALSE(refused(good, 9, room));
  EXPECT_TRUE(refused(good, 8, room)) << "another version";
  EXPECT_TRUE(refused(good, 9, room - 64)) << "the last part is not inside";
  EXPECT_TRUE(refused(good, 9, 64 + 255)) << "more parts than there is room";
  EXPECT_TRUE(refused(good, 9, 63)) << "no head";
  auto table = good;
  table[1].offset = ~std::uint64_t{0} - 8;
  EXPECT_TRUE(refused(table, 9, room)) << "an offset beyond all";
  table = good;
  table[1].bytes = ~std::uint64_t{0};
  EXPECT_TRUE(refused(table, 9, room)) << "a sum that overflows";
  table = good;
  table[0].offset = 64;
  EXPECT_TRUE(refused(table, 9, room)) << "bytes over the table";
  table = good;
  table[0].type.fill('x');
  EXPECT_TRUE(refused(table, 9, room)) << "a type without an end";
}

}  // namespace
}  // namespace ferry
