// Counts of batches of all kinds, for tests of plans on CPUs and GPUs.
#pragma once
#include <algorithm>
#include <cmath>
#include <cstdint>
#include <random>
#include <vector>

#include "core/experts/batch_planner.hpp"

namespace ferry {

/// A batch with slots of what came before it, and the settings of its planner.
struct TestBatch {
  BatchPlanShape shape{};
  std::vector<std::int32_t> counts{};  // [ranks, experts]
  std::vector<std::int32_t> held{};    // [ranks, slots]
};

inline std::vector<std::int32_t> test_counts(std::mt19937& random, int ranks, int experts) {
  const auto any = [&](int below) {
    return static_cast<int>(random() % static_cast<unsigned>(below));
  };
  std::vector<std::int32_t> counts(index(std::int64_t{ranks} * experts));
  const auto at = [&](int source, int expert) -> std::int32_t& {
    return counts[index(std::int64_t{source} * experts + expert)];
  };
  const int kind = any(5), tokens = 1 << any(13);
  if (kind < 2) {  // Zipf 0 to 2
    std::vector<double> weights(index(experts));
    for (int i = 0; i < experts; ++i) weights[index(i)] = std::pow(i + 1.0, -any(201) / 100.0);
    std::ranges::shuffle(weights, random);
    std::discrete_distribution<int> draw(weights.begin(), weights.end());
    for (int i = 0; i < 4000; ++i) at(any(ranks), draw(random)) += 1 + tokens / 64;
  } else if (kind == 2) {  // one hot expert
    const int hot = any(experts);
    for (int source = 0; source < ranks; ++source) at(source, hot) = tokens;
  } else if (kind == 3) {  // powers of two
    for (int expert = 0; expert < experts; expert += 1 + any(4)) {
      at(any(ranks), expert) = 1 << any(20);
    }
  } else {  // all of it to the experts of the first ranks
    const int local = experts / ranks * (1 + any(2));
    for (int source = 0; source < ranks; ++source) {
      for (int expert = 0; expert < local; ++expert) at(source, expert) = any(tokens) + source;
    }
  }
  return counts;
}

/// 4 to 64 ranks, 64 to 384 experts, 1 to 4 slots; in some of them copies are held, cost rows or
/// stay in domains, or no rank may have more rows than some.
inline TestBatch test_batch(std::mt19937& random) {
  const auto any = [&](int below) {
    return static_cast<int>(random() % static_cast<unsigned>(below));
  };
  const int ranks = 4 << any(5), experts = std::vector{64, 128, 256, 384}[index(any(4))];
  const int slots = 1 + any(4);
  TestBatch batch;
  batch.counts = test_counts(random, ranks, experts);
  std::int64_t all = 0;
  for (const std::int32_t count : batch.counts) all += count;
  batch.shape =
      batch_plan_shape({experts, ranks}, slots, any(3) == 0 ? 1 + any(ranks) : 0,
                       any(3) == 0 ? any(200) : 0, any(4) == 0 ? all / ranks + any(100) : 0);
  batch.held.assign(index(batch.shape.places()), -1);
  if (any(2) == 0) return batch;
  for (int place = 0; place < batch.shape.places(); ++place) {
    const int rank = place / slots, slot = place % slots;
    const int expert = (rank * (experts / ranks) + experts / ranks + 7 * slot) % experts;
    if (any(3) > 0 && expert / (experts / ranks) != rank) batch.held[index(place)] = expert;
  }
  return batch;
}

}  // namespace ferry
