// Properties that hold for any routes; RapidCheck shrinks what breaks them. FERRY_TEST_SEED, or
// RC_PARAMS with what a failure prints, repeats a run.
#include <gtest/gtest.h>
#include <rapidcheck/gtest.h>  // after gtest.h

#include <algorithm>
#include <cstdlib>
#include <functional>
#include <map>
#include <numeric>

#include "ferry/ferry.hpp"
#include "fleet_test.hpp"

namespace ferry::conformance {
namespace {

constexpr std::int64_t kHidden = 8;

/// RapidCheck reads RC_PARAMS at its first property; it prints the seed itself.
const bool kSeeded = [] {
  return setenv("RC_PARAMS", ("seed=" + std::to_string(base_seed())).c_str(), 0) == 0;
}();

/// The routes of all ranks.
struct Setting {
  int ranks = 1;
  std::int64_t experts = 1;
  int topk = 1;
  std::vector<std::vector<std::int64_t>> routes{};  // of each rank, [tokens, topk]

  std::int64_t tokens(int rank) const {
    return static_cast<std::int64_t>(routes[static_cast<std::size_t>(rank)].size()) / topk;
  }
  std::int64_t id(int rank, std::int64_t token, int slot) const {
    return routes[static_cast<std::size_t>(rank)][static_cast<std::size_t>(token * topk + slot)];
  }
  int rank_of(std::int64_t expert) const {
    for (int r = 0; r < ranks; ++r) {
      expert -= experts / ranks + (r < experts % ranks ? 1 : 0);
      if (expert < 0) return r;
    }
    return -1;
  }
  bool goes(int source, std::int64_t token, int target) const {
    for (int k = 0; k < topk; ++k) {
      const std::int64_t e = id(source, token, k);
      if (e >= 0 && rank_of(e) == target) return true;
    }
    return false;
  }
};

std::ostream& operator<<(std::ostream& out, const Setting& s) {
  out << s.ranks << " ranks, " << s.experts << " experts, topk " << s.topk << ", routes";
  for (const auto& routes : s.routes) {
    out << " [";
    for (std::int64_t e : routes) out << e << " ";
    out << "]";
  }
  return out;
}

Setting any_setting() {
  Setting s;
  s.ranks = *rc::gen::inRange(1, 6);
  s.experts = *rc::gen::inRange<std::int64_t>(1, 13);
  s.topk = *rc::gen::inRange(1, 7);
  for (int r = 0; r < s.ranks; ++r) {
    const auto tokens = *rc::gen::inRange<std::size_t>(0, 13);
    s.routes.push_back(*rc::gen::container<std::vector<std::int64_t>>(
        tokens * static_cast<std::size_t>(s.topk), rc::gen::inRange<std::int64_t>(-1, s.experts)));
  }
  return s;
}

std::vector<std::int64_t> any_permutation(std::int64_t count) {
  std::vector<std::int64_t> order(static_cast<std::size_t>(count));
  std::iota(order.begin(), order.end(), 0);
  for (std::size_t n = order.size(); n > 1; --n) {
    std::swap(order[n - 1], order[*rc::gen::inRange<std::size_t>(0, n)]);
  }
  return order;
}

/// What one rank got.
struct Got {
  std::vector<std::vector<float>> rows;  // received, rank-major
  std::vector<std::int32_t> source_token;
  std::vector<std::int64_t> rows_per_source;
  std::vector<std::vector<float>> combined;         // of the received rows themselves
  std::vector<std::vector<float>> expert_combined;  // the same by way of expert-major rows
};

using Values = std::function<float(int rank, std::int64_t token, std::int64_t channel)>;

std::vector<std::vector<float>> rows_of(const Tensor& tensor) {
  std::vector<std::vector<float>> rows;
  for (std::int64_t r = 0; r < tensor.rows(); ++r) {
    const float* row = tensor.as<float>() + r * kHidden;
    rows.emplace_back(row, row + kHidden);
  }
  return rows;
}

std::vector<Got> exchange(const Setting& s, const Values& value) {
  std::vector<Got> got(static_cast<std::size_t>(s.ranks));
  const auto failures = run_fleet({FabricKind::local, s.ranks}, [&](Rank& rank) {
    Group group(rank.bootstrap(), group_config(rank, s.experts, 1 << 16));
    const std::int64_t tokens = s.tokens(rank.rank());
    std::vector<float> x(static_cast<std::size_t>(tokens * kHidden));
    for (std::size_t i = 0; i < x.size(); ++i) {
      x[i] = value(rank.rank(), static_cast<std::int64_t>(i) / kHidden,
                   static_cast<std::int64_t>(i) % kHidden);
    }
    const auto& routes = s.routes[static_cast<std::size_t>(rank.rank())];
    const ConstTensorView view(x.data(), Dtype::f32, {tokens, kHidden});
    const Plan plan = group.plan({routes.data(), Dtype::i64, {tokens, s.topk}});
    const Received received = group.dispatch(view, plan);
    Got& mine = got[static_cast<std::size_t>(rank.rank())];
    mine.rows = rows_of(received.x);
    mine.source_token.assign(received.source_token.as<std::int32_t>(),
                             received.source_token.as<std::int32_t>() + received.x.rows());
    mine.rows_per_source = plan.recv_rows_per_rank();
    mine.combined = rows_of(group.combine(received.x, plan).x);
    DispatchOptions by_expert{.order = RowOrder::expert_major, .alignment = 4};
    const Received experts = group.dispatch(view, plan, by_expert);
    CombineOptions back{.order = RowOrder::expert_major, .alignment = 4};
    mine.expert_combined = rows_of(group.combine(experts.x, plan, back).x);
    group.barrier();
  });
  if (!failures.empty()) RC_FAIL(joined(failures));
  return got;
}

/// Small integers: every sum of them is exact.
float integer(int rank, std::int64_t token, std::int64_t channel) {
  return static_cast<float>(rank * 10000 + token * 100 + channel + 1);
}

RC_GTEST_PROP(Property, EveryRoutedRowArrivesExactlyOnce, ()) {
  const Setting s = any_setting();
  RC_LOG() << s;
  const std::vector<Got> got = exchange(s, integer);
  for (int target = 0; target < s.ranks; ++target) {
    std::vector<std::vector<float>> expected;
    for (int source = 0; source < s.ranks; ++source) {
      for (std::int64_t t = 0; t < s.tokens(source); ++t) {
        if (!s.goes(source, t, target)) continue;
        std::vector<float> row;
        for (std::int64_t h = 0; h < kHidden; ++h) row.push_back(integer(source, t, h));
        expected.push_back(row);
      }
    }
    // Ascending source rank, then token; each row says both.
    RC_ASSERT(got[static_cast<std::size_t>(target)].rows == expected);
  }
}

RC_GTEST_PROP(Property, CombineOfDispatchIsTheSumOverRanks, ()) {
  const Setting s = any_setting();
  RC_LOG() << s;
  const std::vector<Got> got = exchange(s, integer);
  for (int rank = 0; rank < s.ranks; ++rank) {
    for (std::int64_t t = 0; t < s.tokens(rank); ++t) {
      int ranks = 0, slots = 0;
      for (int r = 0; r < s.ranks; ++r) ranks += s.goes(rank, t, r) ? 1 : 0;
      for (int k = 0; k < s.topk; ++k) slots += s.id(rank, t, k) >= 0 ? 1 : 0;
      for (std::int64_t h = 0; h < kHidden; ++h) {
        const Got& mine = got[static_cast<std::size_t>(rank)];
        const auto token = static_cast<std::size_t>(t), channel = static_cast<std::size_t>(h);
        const float x = integer(rank, t, h);
        RC_ASSERT(mine.combined[token][channel] == static_cast<float>(ranks) * x);
        RC_ASSERT(mine.expert_combined[token][channel] == static_cast<float>(slots) * x);
      }
    }
  }
}

RC_GTEST_PROP(Property, PermutedTokensPermuteTheirRows, ()) {
  const Setting s = any_setting();
  RC_LOG() << s;
  std::vector<std::vector<std::int64_t>> order;  // new token → old token
  Setting permuted = s;
  for (int r = 0; r < s.ranks; ++r) {
    order.push_back(any_permutation(s.tokens(r)));
    auto& routes = permuted.routes[static_cast<std::size_t>(r)];
    for (std::int64_t t = 0; t < s.tokens(r); ++t) {
      for (int k = 0; k < s.topk; ++k) {
        routes[static_cast<std::size_t>(t * s.topk + k)] =
            s.id(r, order.back()[static_cast<std::size_t>(t)], k);
      }
    }
  }
  const auto odd = [](int rank, std::int64_t token, std::int64_t channel) {
    Random random(mix(7, static_cast<std::uint64_t>(rank), static_cast<std::uint64_t>(token),
                      static_cast<std::uint64_t>(channel)));
    return static_cast<float>(random.below(1 << 30)) * 1e-5f;  // sums of these round
  };
  const std::vector<Got> before = exchange(s, odd);
  const std::vector<Got> after =
      exchange(permuted, [&](int rank, std::int64_t token, std::int64_t channel) {
        const auto& mine = order[static_cast<std::size_t>(rank)];
        return odd(rank, mine[static_cast<std::size_t>(token)], channel);
      });
  for (std::size_t d = 0; d < before.size(); ++d) {
    std::map<std::pair<std::size_t, std::int64_t>, std::vector<float>> rows;  // by source, token
    const auto each = [&](const Got& got, auto&& use) {
      std::size_t row = 0;
      for (std::size_t source = 0; source < got.rows_per_source.size(); ++source) {
        for (std::int64_t n = 0; n < got.rows_per_source[source]; ++n, ++row) {
          use(source, got.source_token[row], got.rows[row]);
        }
      }
    };
    each(before[d], [&](std::size_t source, std::int32_t token, const std::vector<float>& row) {
      rows[{source, token}] = row;
    });
    RC_ASSERT(after[d].rows.size() == before[d].rows.size());
    each(after[d], [&](std::size_t source, std::int32_t token, const std::vector<float>& row) {
      RC_ASSERT((rows[{source, order[source][static_cast<std::size_t>(token)]}] == row));
    });
    for (std::size_t t = 0; t < order[d].size(); ++t) {
      const auto old = static_cast<std::size_t>(order[d][t]);
      RC_ASSERT(after[d].combined[t] == before[d].combined[old]);
      RC_ASSERT(after[d].expert_combined[t] == before[d].expert_combined[old]);
    }
  }
}

RC_GTEST_PROP(Property, PermutedRanksPermuteWhatTheyReceive, ()) {
  Setting s = any_setting();
  // Blocks of one size, so that experts move with their ranks.
  const std::int64_t block = *rc::gen::inRange<std::int64_t>(1, 4);
  for (auto& routes : s.routes) {
    for (auto& e : routes) e = e < 0 ? e : e % (block * s.ranks);
  }
  s.experts = block * s.ranks;
  RC_LOG() << s;
  const std::vector<std::int64_t> moved = any_permutation(s.ranks);  // old rank → new rank
  const auto to = [&](int rank) {
    return static_cast<std::size_t>(moved[static_cast<std::size_t>(rank)]);
  };
  Setting permuted = s;
  std::vector<int> old_rank(static_cast<std::size_t>(s.ranks));
  for (int r = 0; r < s.ranks; ++r) {
    old_rank[to(r)] = r;
    auto& routes = permuted.routes[to(r)];
    routes = s.routes[static_cast<std::size_t>(r)];
    for (auto& e : routes) {
      if (e >= 0)
        e = static_cast<std::int64_t>(to(static_cast<int>(e / block))) * block + e % block;
    }
  }
  const std::vector<Got> before = exchange(s, integer);
  const std::vector<Got> after =
      exchange(permuted, [&](int rank, std::int64_t token, std::int64_t channel) {
        return integer(old_rank[static_cast<std::size_t>(rank)], token, channel);
      });
  for (int d = 0; d < s.ranks; ++d) {
    // The same rows, in blocks of sources that have moved.
    auto theirs = before[static_cast<std::size_t>(d)].rows, ours = after[to(d)].rows;
    std::sort(theirs.begin(), theirs.end());
    std::sort(ours.begin(), ours.end());
    RC_ASSERT(ours == theirs);
    for (int source = 0; source < s.ranks; ++source) {
      RC_ASSERT(
          after[to(d)].rows_per_source[to(source)] ==
          before[static_cast<std::size_t>(d)].rows_per_source[static_cast<std::size_t>(source)]);
    }
    // Sums of integers are exact in any order.
    RC_ASSERT(after[to(d)].combined == before[static_cast<std::size_t>(d)].combined);
    RC_ASSERT(after[to(d)].expert_combined == before[static_cast<std::size_t>(d)].expert_combined);
  }
}

}  // namespace
}  // namespace ferry::conformance
