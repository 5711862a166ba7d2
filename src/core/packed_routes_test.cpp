#include "core/packed_routes.hpp"

#include <gtest/gtest.h>

#include <random>
#include <vector>

namespace ferry {
namespace {

TEST(PackedRoutes, ComeBackAsTheyWere) {
  std::mt19937 random(20);
  for (const std::int64_t experts : {1, 2, 3, 7, 8, 64, 255, 256, 257, 1 << 20}) {
    for (const int topk : {1, 2, 3, 8, 9, 64}) {
      const PackedRoutes form(experts, topk);
      for (const std::size_t rows : {0, 1, 5}) {
        std::vector<std::int32_t> ids(rows * static_cast<std::size_t>(topk));
        for (std::int32_t& id : ids) {
          id = static_cast<std::int32_t>(random() % static_cast<std::uint64_t>(experts + 1)) - 1;
        }
        if (!ids.empty()) ids.back() = static_cast<std::int32_t>(experts - 1);
        std::vector<std::byte> packed(rows * form.row_bytes() + 1, std::byte{0x5a});
        form.pack(ids.data(), rows, packed.data());
        EXPECT_EQ(packed.back(), std::byte{0x5a}) << "wrote too much";
        packed.back() = std::byte{0xff};
        std::vector<std::int32_t> back(ids.size() + 1, -7);
        form.unpack(packed.data(), rows, back.data());
        EXPECT_EQ(back.back(), -7) << "wrote too much";
        back.pop_back();
        EXPECT_EQ(back, ids) << experts << " experts, " << rows << " rows of " << topk;
      }
    }
  }
}

TEST(PackedRoutes, TakeFewerBytesOrStay) {
  EXPECT_EQ(PackedRoutes(256, 8).row_bytes(), 9u);  // 9 bits: 0 is an unused slot
  EXPECT_EQ(PackedRoutes(255, 8).row_bytes(), 8u);
  EXPECT_EQ(PackedRoutes(1, 3).row_bytes(), 1u);
  EXPECT_EQ(PackedRoutes(1 << 20, 1).row_bytes(), 3u);
  EXPECT_EQ(PackedRoutes((1 << 24) - 1, 1).row_bytes(), 3u);
  EXPECT_EQ(PackedRoutes(1 << 24, 1).row_bytes(), 4u);
  EXPECT_EQ(PackedRoutes(1 << 24, 1).bits, 32);
}

// A peer may send anything; ids that are none are found where routes are checked.
TEST(PackedRoutes, TakeAnyBytes) {
  const std::vector<std::byte> ones(64, std::byte{0xff});
  std::vector<std::int32_t> ids(8);
  PackedRoutes(200, 8).unpack(ones.data(), 1, ids.data());
  for (const std::int32_t id : ids) EXPECT_EQ(id, 254);
  PackedRoutes(1 << 24, 1).unpack(ones.data(), 1, ids.data());
  EXPECT_EQ(ids[0], -2);
}

}  // namespace
}  // namespace ferry
