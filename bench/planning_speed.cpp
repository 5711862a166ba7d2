// What planning costs one rank of a large group: the code that a rank runs, against routes of the
// others that are made up here. `planning_speed [ranks] [ranks of a domain] [tokens]`.
#include <algorithm>
#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <random>
#include <vector>

#include "core/crossing_plan.hpp"
#include "core/exchange_plan.hpp"
#include "core/pair_counts.hpp"

namespace ferry {
namespace {

constexpr int kTopk = 8;
constexpr int kTries = 5;

/// Different experts for each token.
std::vector<std::int32_t> some_routes(std::mt19937& random, std::int64_t tokens, int experts) {
  std::vector<std::int32_t> routes;
  for (std::int64_t i = 0; i < tokens * kTopk; ++i) {
    routes.push_back(static_cast<std::int32_t>(random() % static_cast<unsigned>(experts)));
  }
  return routes;
}

double milliseconds_since(std::chrono::steady_clock::time_point start) {
  return std::chrono::duration<double, std::milli>(std::chrono::steady_clock::now() - start)
      .count();
}

void run(int ranks, int domain_ranks, std::int64_t tokens) {
  const Placement placement{std::max(ranks, 256), ranks};
  const Domains domains = Domains::blocks(ranks, domain_ranks);
  std::mt19937 random(20261124);
  const int self = ranks / 2;
  std::vector<std::int32_t> counts, domain_tokens, own_routes;
  for (int rank = 0; rank < ranks; ++rank) {
    auto routes = some_routes(random, tokens, static_cast<int>(placement.experts));
    if (rank == self) own_routes = routes;
    const RouteCounts made = count_routes(std::move(routes), tokens, kTopk, placement);
    counts.insert(counts.end(), made.tokens_per_rank.begin(), made.tokens_per_rank.end());
    counts.insert(counts.end(), made.slots_per_expert.begin(), made.slots_per_expert.end());
    const auto crossed = count_crossings(made, placement, domains, rank);
    domain_tokens.insert(domain_tokens.end(), crossed.begin(), crossed.end());
  }
  double count_ms = 1e9, plan_ms = 1e9, check_ms = 1e9, cross_ms = 1e9;
  for (int i = 0; i < kTries; ++i) {
    auto start = std::chrono::steady_clock::now();
    RouteCounts own = count_routes(own_routes, tokens, kTopk, placement);
    count_ms = std::min(count_ms, milliseconds_since(start));
    start = std::chrono::steady_clock::now();
    const ExchangePlan plan = make_plan(std::move(own), counts, placement, self);
    plan_ms = std::min(plan_ms, milliseconds_since(start));
    start = std::chrono::steady_clock::now();
    if (impossible_crossing(plan, domains, domain_tokens) >= 0) std::abort();
    check_ms = std::min(check_ms, milliseconds_since(start));
    start = std::chrono::steady_clock::now();
    const CrossingPlan crossing = make_crossing_plan(plan, domains, domain_tokens);
    cross_ms = std::min(cross_ms, milliseconds_since(start));
  }
  std::printf("%6d ranks: count %.2f ms, make_plan %.2f, check %.2f, make_crossing_plan %.2f\n",
              ranks, count_ms, plan_ms, check_ms, cross_ms);
}

/// The same by what ranks tell each other (core/pair_counts.hpp).
void run_pairs(int ranks, int domain_ranks, std::int64_t tokens) {
  using Step = PairCounts::Step;
  const Placement placement{std::max(ranks, 256), ranks};
  const Domains domains = Domains::blocks(ranks, domain_ranks);
  std::mt19937 random(20261124);
  const int self = ranks / 2;
  const std::size_t most = PairCounts::message_bytes(placement, domains);
  std::vector<std::byte> messages(static_cast<std::size_t>(ranks) * most), out(most);
  std::vector<std::int32_t> own_routes;
  for (int rank = 0; rank < ranks; ++rank) {
    auto routes = some_routes(random, tokens, static_cast<int>(placement.experts));
    if (rank == self) own_routes = routes;
    const PairCounts other(count_routes(std::move(routes), tokens, kTopk, placement), placement,
                           domains, rank);
    (void)other.write(Step::counts, self, messages.data() + index(rank) * most);
  }
  PairPlaces places;
  places.recv_rows = places.staging_rows = std::int64_t{1} << 30;
  double least = 1e9;
  for (int i = 0; i < kTries; ++i) {
    RouteCounts own = count_routes(own_routes, tokens, kTopk, placement);
    const auto start = std::chrono::steady_clock::now();
    PairCounts mine(std::move(own), placement, domains, self);
    for (int peer = 0; peer < ranks; ++peer) (void)mine.write(Step::counts, peer, out.data());
    for (int rank = 0; rank < ranks; ++rank) {
      if (!mine.read(Step::counts, rank, messages.data() + index(rank) * most)) std::abort();
    }
    for (int peer = 0; peer < ranks; ++peer) (void)mine.write(Step::places, peer, out.data());
    for (int rank = 0; rank < ranks; ++rank) {
      if (!mine.read(Step::places, rank, reinterpret_cast<const std::byte*>(&places))) std::abort();
    }
    for (int peer = 0; peer < ranks; ++peer) (void)mine.write(Step::rails, peer, out.data());
    least = std::min(least, milliseconds_since(start));
  }
  std::printf("%6d ranks: pairs %.2f ms, messages of at most %zu bytes\n", ranks, least, most);
}

}  // namespace
}  // namespace ferry

int main(int argc, char** argv) {
  const int domain_ranks = argc > 2 ? std::atoi(argv[2]) : 8;
  const std::int64_t tokens = argc > 3 ? std::atoll(argv[3]) : 4096;
  if (argc > 1) {
    ferry::run(std::atoi(argv[1]), domain_ranks, tokens);
    ferry::run_pairs(std::atoi(argv[1]), domain_ranks, tokens);
  } else {
    for (const int ranks : {256, 1024, 2048}) {
      ferry::run(ranks, domain_ranks, tokens);
      ferry::run_pairs(ranks, domain_ranks, tokens);
    }
  }
}
