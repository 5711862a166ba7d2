// Rows that ranks read by themselves: which they get, what is refused, and who is told.
#include <array>
#include <atomic>
#include <numeric>
#include <vector>

#include "host/collectives/test_collectives.hpp"

namespace ferry::host::test {
namespace {

constexpr std::int64_t kColumns = 5;

std::int32_t value(int rank, std::int64_t row, std::int64_t column, int round) {
  return static_cast<std::int32_t>(100'000 * round + 1000 * rank + 10 * row + column);
}

/// Rank 1 has none.
std::int64_t rows_of(int rank) {
  return rank == 1 ? 0 : 3 + rank;
}

TensorView numbers_view(std::vector<std::int64_t>& numbers) {
  return {numbers.data(), Dtype::i64, {static_cast<std::int64_t>(numbers.size())}};
}

// Every rank reads all rows, a rank more often than the others, in two rounds.
TEST(Window, EveryRankReadsByItself) {
  for (const World& world : std::initializer_list<World>{
           {.ranks = 1}, {.ranks = 4}, {.ranks = 3, .fabric = FabricKind::shm}}) {
    with_collectives(world, [](Collectives& all) {
      const Window window = all.window(rows_of(all.rank()), kColumns, Dtype::i32);
      EXPECT_TRUE(all.is_registered(window.rows().data()) || rows_of(all.rank()) == 0);
      std::vector<std::int64_t> numbers(static_cast<std::size_t>(window.first(all.size())));
      std::iota(numbers.rbegin(), numbers.rend(), 0);
      std::vector<std::int32_t> got(numbers.size() * kColumns);
      const TensorView out(got.data(), Dtype::i32, {std::ssize(numbers), kColumns});
      for (int round = 0; round < 2; ++round) {
        auto* own = window.rows().as<std::int32_t>();
        for (std::int64_t i = 0; i < rows_of(all.rank()) * kColumns; ++i) {
          if (round == 0) {
            EXPECT_EQ(own[i], 0);
          }
          own[i] = value(all.rank(), i / kColumns, i % kColumns, round);
        }
        all.barrier();
        for (int again = 0; again <= all.rank(); ++again) {
          std::fill(got.begin(), got.end(), -1);
          window.get(numbers_view(numbers), out);
          std::size_t at = got.size();
          for (int r = 0; r < all.size(); ++r) {
            EXPECT_EQ(window.first(r + 1) - window.first(r), rows_of(r));
            for (std::int64_t row = 0; row < rows_of(r); ++row) {
              at -= kColumns;
              for (std::int64_t c = 0; c < kColumns; ++c) {
                ASSERT_EQ(got[at + static_cast<std::size_t>(c)], value(r, row, c, round));
              }
            }
          }
        }
        all.barrier();
      }
    });
  }
}

TEST(Window, ArgumentsAreRefused) {
  with_collectives({.ranks = 1}, [](Collectives& all) {
    expect_error(ErrorKind::invalid_argument, {"rows"}, [&] { all.window(-1, 4, Dtype::f32); });
    expect_error(ErrorKind::invalid_argument, {"columns"}, [&] { all.window(1, 0, Dtype::f32); });
    const Window window = all.window(2, 4, Dtype::f32);
    std::array<float, 8> out{};
    const TensorView two(out.data(), Dtype::f32, {2, 4});
    for (const std::int64_t wrong : {-1, 2}) {
      std::vector<std::int64_t> numbers{0, wrong};
      expect_error(ErrorKind::invalid_argument, {std::to_string(wrong), "0 … 1"},
                   [&] { window.get(numbers_view(numbers), two); });
    }
    std::vector<std::int64_t> one{0};
    expect_error(ErrorKind::invalid_argument, {"out"}, [&] { window.get(numbers_view(one), two); });
    const TensorView bytes(out.data(), Dtype::u8, {1, 4});
    expect_error(ErrorKind::invalid_argument, {"out", "f32"},
                 [&] { window.get(numbers_view(one), bytes); });
  });
}

TEST(Window, OtherColumnsAreNamed) {
  with_collectives({.ranks = 2}, [](Collectives& all) {
    expect_error(ErrorKind::mismatch, {"made different calls: columns is"},
                 [&] { all.window(2, all.rank() == 0 ? 4 : 5, Dtype::f32); });
  });
}

// What is written over a number while rows are copied is not taken for one.
TEST(Window, NumbersMayLieInTheOutput) {
  with_collectives({.ranks = 1}, [](Collectives& all) {
    const Window window = all.window(2, 2, Dtype::i64);
    const std::array<std::int64_t, 4> rows{1, 0, 2, 3};
    std::copy(rows.begin(), rows.end(), window.rows().as<std::int64_t>());
    std::array<std::int64_t, 4> out{0, 1, -1, -1};
    window.get(TensorView(out.data(), Dtype::i64, {2}), {out.data(), Dtype::i64, {2, 2}});
    EXPECT_EQ(out, rows);
  });
}

// All ranks learn it, and all goes on.
TEST(Window, ARankWithoutRoom) {
  with_collectives({.ranks = 3}, [](Collectives& all) {
    const std::int64_t rows = all.rank() == 1 ? std::int64_t{1} << 30 : 2;
    expect_error(ErrorKind::exhausted, {"rank 1", "memory_bytes"},
                 [&] { all.window(rows, 64, Dtype::u8); });
    EXPECT_EQ(all.window(1, 64, Dtype::u8).first(3), 3);
  });
}

TEST(Window, SeveralDomainsAreRefused) {
  with_collectives({.ranks = 4, .domain_size = 2}, [](Collectives& all) {
    expect_error(ErrorKind::unsupported, {"2 domains"}, [&] { all.window(1, 64, Dtype::u8); });
    all.barrier();
  });
}

}  // namespace
}  // namespace ferry::host::test
