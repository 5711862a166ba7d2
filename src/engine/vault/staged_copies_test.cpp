// Copies through two buffers: whatever the sizes, and with one under way in each at most.
#include "engine/vault/staged_copies.hpp"

#include <gtest/gtest.h>

#include <cstring>
#include <numeric>
#include <random>
#include <stdexcept>
#include <vector>

#include "engine/vault/test_wire.hpp"

namespace ferry::engine::test {
namespace {

using Copied = std::vector<std::byte>;

Copied random_bytes(std::mt19937& random, std::size_t count) {
  Copied bytes(count);
  for (std::byte& each : bytes) each = static_cast<std::byte>(random());
  return bytes;
}

TEST(StagedCopies, BothWaysInAnySizes) {
  std::mt19937 random(20261128);
  for (int round = 0; round < 50; ++round) {
    const std::size_t piece = 1 + random() % 64;
    std::array<Copied, 2> buffers{Copied(piece), Copied(piece)};
    std::vector<Copied> from, to;
    std::vector<DeviceCopy> copies;
    for (int i = 0; i < 6; ++i) {
      from.push_back(random_bytes(random, random() % 4 == 0 ? 0 : random() % 300));
      to.emplace_back(from.back().size());
    }
    for (std::size_t i = 0; i < from.size(); ++i) {
      copies.push_back({to[i].data(), from[i].data(), from[i].size(), random() % 2 == 0});
    }
    LateWire wire;
    StagedCopies(wire, {std::span(buffers[0]), std::span(buffers[1])}).run(copies);
    EXPECT_EQ(to, from) << "pieces of " << piece;
    EXPECT_FALSE(wire.any()) << "some have not ended";
  }
}

}  // namespace
}  // namespace ferry::engine::test
