#include "core/collective_shares.hpp"

#include <gtest/gtest.h>

#include <algorithm>
#include <map>
#include <random>
#include <string>

namespace ferry {
namespace {

constexpr unsigned kSharesSeed = 20;

struct Shape {
  int ranks, domain_size;
  std::vector<int> weights;
};

std::vector<Shape> shapes() {
  std::vector<Shape> all{{1, 0, {}},
                         {4, 0, {}},
                         {4, 1, {}},
                         {8, 3, {}},
                         {4, 1, {0, 1, 1, 1}},
                         {4, 1, {0, 0, 0, 7}},
                         {8, 2, {3, 0, 65535, 1}},
                         {5, 2, {1, 2, 3}},
                         {9, 4, {5, 0, 1}}};
  std::mt19937 random(kSharesSeed);
  for (int i = 0; i < 20; ++i) {
    const int size = 1 + static_cast<int>(random() % 4),
              domains = 2 + static_cast<int>(random() % 6);
    Shape shape{
        size * domains - static_cast<int>(random() % static_cast<unsigned>(size)), size, {}};
    for (int d = 0; d < domains; ++d) shape.weights.push_back(static_cast<int>(random() % 5));
    shape.weights[random() % shape.weights.size()] = 1;
    all.push_back(shape);
  }
  return all;
}

std::string to_string(const Shape& shape) {
  std::string text = std::to_string(shape.ranks) + " ranks, " + std::to_string(shape.domain_size);
  for (const int weight : shape.weights) text += " " + std::to_string(weight);
  return text;
}

TEST(ShareCutter, SharesCoverTheTensorInProportion) {
  for (const Shape& shape : shapes()) {
    SCOPED_TRACE(to_string(shape));
    const Domains domains = Domains::blocks(shape.ranks, shape.domain_size);
    const ShareCutter cutter(domains, shape.weights);
    for (const std::int64_t count : {0, 1, 127, 128, 129, 5000, 1'000'001}) {
      std::int64_t next = 0;
      std::vector<double> of_domain(index(domains.count()));
      for (const Share& share : cutter.cut(count)) {
        ASSERT_EQ(share.first, next);
        ASSERT_GT(share.count(), 0);
        EXPECT_EQ(share.first % kShareUnit, 0);
        next = share.end;
        of_domain[index(share.domain)] += static_cast<double>(share.count());
      }
      ASSERT_EQ(next, count);
      double all = 0;
      for (int d = 0; d < domains.count(); ++d) {
        all += shape.weights.empty() ? 1 : shape.weights[index(d)];
      }
      for (int d = 0; d < domains.count(); ++d) {
        const double weight = shape.weights.empty() ? 1 : shape.weights[index(d)];
        EXPECT_NEAR(of_domain[index(d)], static_cast<double>(count) * weight / all, 2 * kShareUnit);
        if (weight == 0) {
          EXPECT_EQ(of_domain[index(d)], 0);
        }
      }
    }
  }
}

// What crosses to an owner lies apart and in its inbox, in rounds of any length up to the longest,
// and rounds of different lengths put the same source's part in the same place.
TEST(ShareCutter, InboxesHoldAnyRound) {
  std::mt19937 random(kSharesSeed);
  for (const Shape& shape : shapes()) {
    SCOPED_TRACE(to_string(shape));
    const Domains domains = Domains::blocks(shape.ranks, shape.domain_size);
    if (domains.count() == 1) continue;
    const ShareCutter cutter(domains, shape.weights);
    const std::int64_t least = smallest_inbox(domains);
    for (const std::int64_t inbox : {least, least + 1000, 20 * least}) {
      const std::int64_t round = cutter.longest_round(100'000, inbox);
      ASSERT_GE(round, kShareUnit);
      ASSERT_LE(round, 100'000);
      EXPECT_EQ(round % kShareUnit, 0);
      std::map<int, std::map<std::int64_t, std::int64_t>> places;  // of each owner: begin to end
      for (int i = 0; i < 30; ++i) {
        const std::int64_t count = i == 0 ? round : 1 + static_cast<std::int64_t>(random()) % round;
        for (const Share& share : cutter.cut(count)) {
          for (int d = 0; d < domains.count(); ++d) {
            if (d == share.domain) continue;
            const std::int64_t at = cutter.inbox_place(share, d, round);
            std::int64_t& end = places[rank_of(share, share.domain, domains)][at];
            end = std::max(end, at + share.count());
          }
        }
      }
      for (const auto& [owner, parts] : places) {
        std::int64_t used = 0;
        for (const auto& [at, end] : parts) {
          ASSERT_GE(at, used) << "of rank " << owner;
          used = end;
        }
        ASSERT_LE(used, inbox) << "of rank " << owner;
      }
    }
  }
}

TEST(ShareCutter, ARoundIsAsLongAsTheInboxAllows) {
  const Domains domains = Domains::blocks(4, 1);
  const ShareCutter equal(domains), one(domains, std::vector<int>{0, 0, 1, 0});
  EXPECT_EQ(equal.longest_round(1 << 17, 1 << 20), 1 << 17);  // the window is the border
  EXPECT_NEAR(static_cast<double>(equal.longest_round(1 << 17, 60'000)), 80'000, 1000);
  EXPECT_NEAR(static_cast<double>(one.longest_round(1 << 17, 60'000)), 20'000, 1000);
}

// In the tree every rank but the root is below exactly one other.
TEST(Tree, HasAllRanks) {
  for (const int ranks : {1, 2, 3, 8, 31}) {
    for (const int size : {0, 1, 2, 5}) {
      const Domains domains = Domains::blocks(ranks, size);
      std::vector<int> seen{0};
      for (std::size_t i = 0; i < seen.size(); ++i) {
        for (const int child : tree_children(seen[i], domains)) {
          EXPECT_EQ(tree_parent(child, domains), seen[i]);
          seen.push_back(child);
        }
      }
      EXPECT_EQ(tree_parent(0, domains), -1);
      std::sort(seen.begin(), seen.end());
      std::vector<int> every(index(ranks));
      for (int r = 0; r < ranks; ++r) every[index(r)] = r;
      EXPECT_EQ(seen, every) << ranks << " ranks in domains of " << size;
    }
  }
}

}  // namespace
}  // namespace ferry
