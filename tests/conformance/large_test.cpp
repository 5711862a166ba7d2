// Receive memory past 4 GiB: offsets must be 64-bit. In the full run alone, where memory allows.
#include <gtest/gtest.h>

#include <cstdlib>
#include <cstring>
#include <fstream>
#include <span>
#include <string>

#include "compare.hpp"
#include "ferry/ferry.hpp"
#include "fleet.hpp"
#include "inputs.hpp"
#include "platform/posix/test_memory.hpp"

namespace ferry::conformance {
namespace {

constexpr std::int64_t kLargeHidden = 1 << 20;  // f32: 4 MiB a row
constexpr std::size_t kRowBytes = 4 * kLargeHidden;
constexpr std::int64_t kTokens = 560;  // a rank: 2.2 GiB
/// Distinct rows of a rank. The pattern's length divides neither 2 nor 4 GiB.
constexpr std::int64_t kPattern = 15;

std::size_t available_bytes() {
  std::ifstream file("/proc/meminfo");
  std::string name;
  std::size_t kib = 0;
  while (file >> name) {
    if (name == "MemAvailable:" && file >> kib) return kib << 10;
  }
  return 0;
}

/// A tensor of kTokens rows that takes the memory of kPattern: the same pages, many times.
class PatternRows {
 public:
  explicit PatternRows(int rank)
      : rows_(make_rows(static_cast<std::uint64_t>(rank) + 1, Dtype::f32, false, kPattern,
                        kLargeHidden)),
        memory_(std::as_bytes(std::span(rows_)), kBytes) {}
  const void* data() const { return memory_.data(); }
  const std::byte* row(std::int64_t token) const {
    return rows_.data() + static_cast<std::size_t>(token % kPattern) * kRowBytes;
  }

 private:
  static constexpr std::size_t kBytes = static_cast<std::size_t>(kTokens) * kRowBytes;
  Bytes rows_;
  test::PatternMemory memory_;
};

TEST(Large, RowsPastFourGibibytes) {
  const char* mode = std::getenv("FERRY_CONFORMANCE");
  if (mode == nullptr || std::string(mode) != "full") {
    GTEST_SKIP() << "only with FERRY_CONFORMANCE=full";
  }
  if (available_bytes() < std::size_t{12} << 30) GTEST_SKIP() << "needs 12 GiB of free memory";
  // Both ranks send everything to rank 0: rank 1's rows begin past 2 GiB and end past 4 GiB.
  const auto failures =
      run_fleet({FabricKind::local, 2, std::chrono::seconds(300)}, [](Rank& rank) {
        GroupConfig config = group_config(rank, 2);
        config.deadline = std::chrono::seconds(120);
        Group group(rank.bootstrap(), config);
        const PatternRows mine(rank.rank());
        const PatternRows theirs(1 - rank.rank());
        const std::vector<std::int64_t> routes(kTokens, 0);
        const Plan plan = group.plan({routes.data(), Dtype::i64, {kTokens, 1}});
        const Received received =
            group.dispatch({mine.data(), Dtype::f32, {kTokens, kLargeHidden}}, plan);
        rank.equal(received.x.rows(), rank.rank() == 0 ? 2 * kTokens : 0, "rows");
        for (std::int64_t r = 0; r < received.x.rows(); ++r) {
          const std::byte* expected = r < kTokens ? mine.row(r) : theirs.row(r - kTokens);
          const std::byte* got =
              received.x.as<std::byte>() + static_cast<std::size_t>(r) * kRowBytes;
          rank.check(std::memcmp(got, expected, kRowBytes) == 0, "row " + std::to_string(r));
        }
        const Combined combined = group.combine(received.x, plan);
        for (std::int64_t t = 0; t < kTokens; ++t) {
          const std::byte* got =
              combined.x.as<std::byte>() + static_cast<std::size_t>(t) * kRowBytes;
          rank.check(std::memcmp(got, mine.row(t), kRowBytes) == 0, "token " + std::to_string(t));
        }
        group.barrier();
      });
  EXPECT_TRUE(failures.empty()) << joined(failures);
}

}  // namespace
}  // namespace ferry::conformance
