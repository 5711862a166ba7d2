// Experts in places of the ranks that are left.
#include "ferry/experts.hpp"

#include <gtest/gtest.h>

#include <algorithm>
#include <set>

#include "core/test_errors.hpp"

namespace ferry::test {
namespace {

/// Each expert's ranks.
std::vector<std::set<int>> ranks_of(const ExpertPlacement& placement) {
  std::vector<std::set<int>> ranks(static_cast<std::size_t>(placement.experts()));
  for (int rank = 0; rank < placement.ranks(); ++rank) {
    for (const int expert : placement.held_by(rank)) {
      if (expert >= 0) ranks[static_cast<std::size_t>(expert)].insert(rank);
    }
  }
  return ranks;
}

TEST(ExpertPlacement, RoutesGoToPlacesThatHoldTheExpert) {
  ExpertPlacement placement(6, 4, 2);
  const std::vector<std::int64_t> ids{0, 1, 2, 3, 4, 5, -1, 0};
  const Tensor places = placement.places({ids.data(), Dtype::i64, {4, 2}}, 1);
  ASSERT_EQ(places.view().shape, (Extents{4, 2}));
  for (std::size_t i = 0; i < ids.size(); ++i) {
    const std::int64_t place = places.as<std::int64_t>()[i];
    if (ids[i] < 0) {
      EXPECT_EQ(place, -1);
    } else {
      const auto held = placement.held_by(static_cast<int>(place / 2));
      EXPECT_EQ(held[static_cast<std::size_t>(place % 2)], ids[i]);
    }
  }
}

TEST(ExpertPlacement, MaskedRanksGetNoTokens) {
  ExpertPlacement placement(6, 4, 3);
  placement.balance(std::vector<int>{0, 1, 2, 3}, {}, 2);
  std::vector<std::int64_t> ids(600);
  for (std::size_t i = 0; i < ids.size(); ++i) ids[i] = static_cast<std::int64_t>(i % 6);
  const ConstTensorView routes{ids.data(), Dtype::i64, {600, 1}};
  std::vector<int> rows(4);
  const Tensor places = placement.places(routes, 1, {false, false, true, false});
  for (std::size_t i = 0; i < ids.size(); ++i) {
    const std::int64_t place = places.as<std::int64_t>()[i];
    ++rows[static_cast<std::size_t>(place / 3)];
    EXPECT_EQ(placement.held_by(static_cast<int>(place / 3))[static_cast<std::size_t>(place % 3)],
              ids[i]);
  }
  EXPECT_EQ(rows[2], 0);
  EXPECT_TRUE(rows[0] > 0 && rows[1] > 0 && rows[3] > 0);
  expect_error(ErrorKind::invalid_argument,
               {"places", "token", "expert", "on masked ranks", "balance"},
               [&] { placement.places(routes, 1, {true, false, true, true}); });
  expect_error(ErrorKind::invalid_argument, {"places", "masked", "got 3 ranks", "expected 4"},
               [&] { placement.places(routes, 1, {true, false, true}); });
}

TEST(ExpertPlacement, ExpertsOfALostRankAreTakenInAndTheOthersStay) {
  ExpertPlacement placement(6, 4, 3);
  placement.balance(std::vector<int>{0, 1, 2, 3}, {}, 2);
  const auto before = ranks_of(placement);
  placement.balance(std::vector<int>{1, 2, 3}, std::vector<double>(6, 1.0));
  const auto after = ranks_of(placement);
  EXPECT_EQ(placement.held_by(0), (std::vector<std::int32_t>{-1, -1, -1}));
  for (std::size_t expert = 0; expert < 6; ++expert) {
    EXPECT_FALSE(after[expert].empty());
    EXPECT_FALSE(after[expert].contains(0));
    EXPECT_TRUE(std::ranges::any_of(after[expert], [&](int rank) {
      return before[expert].contains(rank);
    })) << expert;
  }
}

TEST(ExpertPlacement, DigestsTellPlacementsApart) {
  ExpertPlacement placement(6, 4, 3), same(6, 4, 3);
  std::set<std::uint64_t> digests{placement.digest(), ExpertPlacement(5, 4, 3).digest(),
                                  ExpertPlacement(6, 3, 4).digest()};
  for (int lost = 0; lost < 4; ++lost) {
    std::vector<int> ranks{0, 1, 2, 3};
    ranks.erase(ranks.begin() + lost);
    placement.balance(ranks);
    same.balance(ranks);
    EXPECT_EQ(placement.digest(), same.digest());
    digests.insert(placement.digest());
  }
  EXPECT_EQ(digests.size(), 7u);
}

TEST(ExpertPlacement, RefusesWhatCannotBe) {
  expect_error(ErrorKind::invalid_argument, {"slots", "6 on the 3 of 3 ranks", "at least 7"},
               [] { ExpertPlacement(7, 3, 2); });
  expect_error(ErrorKind::invalid_argument, {"slots", "got 0"}, [] { ExpertPlacement(7, 3, 0); });
  ExpertPlacement placement(4, 3, 2);
  const auto held = placement.held_by(1);
  expect_error(ErrorKind::invalid_argument, {"slots", "2 on the 1 of 3 ranks", "at least 4"},
               [&] { placement.balance(std::vector<int>{1}); });
  EXPECT_EQ(placement.held_by(1), held);
  expect_error(ErrorKind::invalid_argument, {"rank", "got 3", "0 … 2"},
               [&] { placement.balance(std::vector<int>{0, 3}); });
  expect_error(ErrorKind::invalid_argument, {"load", "3 numbers", "4"},
               [&] { placement.balance(std::vector<int>{0, 1}, std::vector<double>(3)); });
  expect_error(ErrorKind::invalid_argument, {"rank", "got -1"}, [&] { placement.held_by(-1); });
  const std::int64_t id = 4;
  expect_error(ErrorKind::invalid_argument, {"places", "topk_idx", "expert 4"},
               [&] { placement.places({&id, Dtype::i64, {1, 1}}, 0); });
}

}  // namespace
}  // namespace ferry::test
