// For the tests of this folder: ranks as threads, each with its group, always bounded in time.
#pragma once
#include <gtest/gtest.h>

#include <chrono>
#include <cstdint>
#include <exception>
#include <ferry/ferry.hpp>
#include <functional>
#include <thread>
#include <vector>

#include "core/test_errors.hpp"

namespace ferry::engine::test {

using namespace std::chrono_literals;
using Clock = std::chrono::steady_clock;
using ferry::test::expect_error;

inline constexpr unsigned kSeed = 20261121;  // of every random choice in these tests

/// Runs `body(rank)` on a thread for each rank; what escapes is a failure.
inline void on_ranks(int ranks, const std::function<void(int)>& body) {
  std::vector<std::thread> threads;
  for (int r = 0; r < ranks; ++r) {
    threads.emplace_back([&, r] {
      try {
        body(r);
      } catch (const std::exception& e) {
        ADD_FAILURE() << "rank " << r << ": " << e.what();
      }
    });
  }
  for (std::thread& thread : threads) thread.join();
}

/// The same, with a group for each rank.
inline void with_groups(int ranks, GroupConfig config, const std::function<void(Group&)>& body) {
  if (config.experts == 0) config.experts = 8;
  const auto bootstraps = thread_bootstrap(ranks);
  on_ranks(ranks, [&](int r) {
    Group group(bootstraps[static_cast<std::size_t>(r)], config);
    body(group);
  });
}

/// Tokens of one rank: row t holds 1000 · rank + t everywhere, all routes name `expert`.
struct Batch {
  std::int64_t tokens;
  std::int64_t hidden;
  std::vector<float> rows;
  std::vector<std::int64_t> routes;

  Batch(int rank, std::int64_t count, std::int64_t width, std::int64_t expert)
      : tokens(count), hidden(width), routes(static_cast<std::size_t>(count), expert) {
    for (std::int64_t t = 0; t < count; ++t) {
      rows.insert(rows.end(), static_cast<std::size_t>(width), static_cast<float>(1000 * rank + t));
    }
  }
  ConstTensorView x() const { return {rows.data(), Dtype::f32, {tokens, hidden}}; }
  ConstTensorView ids() const { return {routes.data(), Dtype::i64, {tokens, 1}}; }
};

/// Whether `got` is what `batch` sent, `times` over.
inline bool same_rows(const Tensor& got, const Batch& batch, float times = 1) {
  const auto* values = got.as<float>();
  for (std::size_t i = 0; i < batch.rows.size(); ++i) {
    if (values[i] != times * batch.rows[i]) return false;
  }
  return true;
}

/// Exchanges whose sums are checked; every rank of `ranks` gets rows of every other.
inline void exchange_among(Group& group, const std::vector<int>& ranks, int rounds = 2) {
  const std::int64_t local = group.experts() / group.size();
  for (int round = 0; round < rounds; ++round) {
    for (const int to : ranks) {
      const Batch batch(group.rank(), 3 + round % 3, 16, to * local);
      const Plan plan = group.plan(batch.ids());
      const Received received = group.dispatch(batch.x(), plan);
      ASSERT_TRUE(same_rows(group.combine(received.x, plan).x, batch))
          << "rank " << group.rank() << ", round " << round;
    }
  }
}

}  // namespace ferry::engine::test
