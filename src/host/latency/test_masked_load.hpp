// For the tests of latency mode with masks: what every rank does again and again, and what it must
// get when some ranks are left out.
#pragma once
#include <algorithm>
#include <vector>

#include "engine/test_groups.hpp"

namespace ferry::host::test {

using namespace engine::test;

inline constexpr std::int64_t kTokens = 5, kHidden = 16;
inline constexpr int kRanks = 4;  // two experts each

inline LatencyConfig masked_config() {
  LatencyConfig config{kTokens, kHidden, 2, Dtype::f32};
  config.masks = true;
  return config;
}

inline GroupConfig with_deadline(std::chrono::nanoseconds deadline) {
  GroupConfig config;
  config.deadline = deadline;
  return config;
}

/// What `masked` says on a rank that masks this one alone.
inline std::vector<bool> only(int rank) {
  std::vector<bool> masks(kRanks, false);
  masks[static_cast<std::size_t>(rank)] = true;
  return masks;
}

/// What one rank does again and again: token t goes to expert t with weight 1 and to expert t + 2
/// (the next rank's) with weight 2. Values are whole numbers that tell rank, round and token.
class Load {
 public:
  Load(Group& group, LatencyExchange& latency) : rank_(group.rank()), latency_(latency) {
    for (std::int64_t t = 0; t < kTokens; ++t) {
      routes_.insert(routes_.end(), {t, t + 2});
      weights_.insert(weights_.end(), {1.0F, 2.0F});
    }
  }

  ConstTensorView ids() const { return {routes_.data(), Dtype::i64, {kTokens, 2}}; }
  ConstTensorView weights() const { return {weights_.data(), Dtype::f32, {kTokens, 2}}; }
  ConstTensorView x(int round) {
    rows_.clear();
    for (std::int64_t t = 0; t < kTokens; ++t) {
      rows_.insert(rows_.end(), kHidden, value(rank_, round, t));
    }
    return {rows_.data(), Dtype::f32, {kTokens, kHidden}};
  }

  /// One dispatch and combine. `absent`: whom this rank is to go without.
  void round(int number, const std::vector<int>& absent) {
    LatencyDispatchOptions options;
    const bool ahead = number % 2 == 1;
    if (ahead) options.topk_weights = weights();
    const LatencyReceived received = latency_.dispatch(x(number), ids(), options);
    expect_received(received, number, absent);
    expect_sums(combine(received, ahead).x, number, absent);
  }

  /// `ahead`: the weights came with the dispatch.
  LatencyCombined combine(const LatencyReceived& received, bool ahead = false) const {
    LatencyCombineOptions options{.path = CombinePath::per_rank};
    if (ahead) return latency_.combine(received.x, received, options);
    return latency_.combine(received.x, received, weights(), options);
  }

  void expect_received(const LatencyReceived& received, int round,
                       const std::vector<int>& absent) const {
    const auto is_absent = [&](int r) {
      return std::find(absent.begin(), absent.end(), r) != absent.end();
    };
    for (std::int64_t e = 0; e < 2; ++e) {
      const std::int64_t expert = rank_ * 2 + e;
      std::int64_t row = 0;
      for (int source = 0; source < kRanks; ++source) {
        if (is_absent(source)) continue;
        for (std::int64_t t : {expert - 2, expert}) {  // its tokens ascend
          if (t < 0 || t >= kTokens) continue;
          EXPECT_EQ(received.x.as<float>()[(e * kRanks * kTokens + row) * kHidden],
                    value(source, round, t))
              << "rank " << rank_ << " round " << round << " expert " << expert << " row " << row;
          ++row;
        }
      }
      EXPECT_EQ(received.counts.as<std::int32_t>()[e], row) << "rank " << rank_;
    }
  }

  void expect_sums(const Tensor& sums, int round, const std::vector<int>& absent) const {
    for (std::int64_t t = 0; t < kTokens; ++t) {
      float factor = 0;
      for (const int k : {0, 1}) {
        const auto owner = static_cast<int>((t + 2 * k) / 2);
        if (std::find(absent.begin(), absent.end(), owner) == absent.end()) {
          factor += static_cast<float>(k + 1);
        }
      }
      for (std::int64_t h = 0; h < kHidden; ++h) {
        EXPECT_EQ(sums.as<float>()[t * kHidden + h], factor * value(rank_, round, t))
            << "rank " << rank_ << " round " << round << " token " << t;
      }
    }
  }

 private:
  static float value(int rank, int round, std::int64_t token) {
    return static_cast<float>(rank * 10000 + round * 10 + token + 1);
  }

  int rank_;
  LatencyExchange& latency_;
  std::vector<std::int64_t> routes_{};
  std::vector<float> weights_{}, rows_{};
};

}  // namespace ferry::host::test
