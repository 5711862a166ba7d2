// Many rounds of decode with two copies of each expert, while ranks die and processes join: whether
// any row or sum is wrong, or lacks an expert in a step that counts. Prints JSON.
// Two parts: a group that takes processes in, and groups whose exchange goes on while ranks die.
// decode_trials [ROUNDS [SEED [RANKS [DOMAIN_SIZE]]]] DOMAIN_SIZE: so many ranks are a domain each,
// and libfabric joins them.
#include <algorithm>
#include <chrono>
#include <cstdio>
#include <cstdlib>

#include "decode_load.hpp"
#include "engine/test_network.hpp"

namespace {

using ferry::test::DecodeCounts;
using ferry::test::DecodeJob;
using ferry::test::DecodePolicy;

/// Ends with what was wrong.
bool add(DecodeCounts& all, unsigned seed, const DecodePolicy& policy, std::int64_t rounds) {
  DecodeJob job(seed, policy);
  const DecodeCounts counts = job.run(rounds);
  all.rounds += counts.rounds;
  all.tokens += counts.tokens;
  all.zeroed += counts.zeroed;
  all.epochs += counts.epochs;
  all.kills += counts.kills;
  all.joins += counts.joins;
  all.longest = std::max(all.longest, counts.longest);
  if (!job.wrong().empty()) std::fprintf(stderr, "seed %u: %s\n", seed, job.wrong().c_str());
  return job.wrong().empty();
}

void print(const char* part, const DecodeCounts& all, bool right, double seconds) {
  const auto number = [](std::int64_t value) { return static_cast<long long>(value); };
  std::printf(
      "{\"part\": \"%s\", \"rounds\": %lld, \"tokens\": %lld, \"deaths\": %d, \"joins\": %d, "
      "\"epochs\": %lld,\n \"zeroed_in_the_round_of_a_loss\": %lld, \"longest_s_without_a_step\": "
      "%.1f, \"wrong\": %d, \"seconds\": %.0f}\n",
      part, number(all.rounds), number(all.tokens), all.kills, all.joins, number(all.epochs),
      number(all.zeroed), all.longest, right ? 0 : 1, seconds);
  std::fflush(stdout);
}

}  // namespace

int main(int count, char** words) {
  const auto argument = [&](int i, long otherwise) {
    return count > i ? std::atol(words[i]) : otherwise;
  };
  const long rounds = argument(1, 100'000);
  const auto seed = unsigned(argument(2, 20261127));
  DecodePolicy policy{.ranks = int(argument(3, 4)), .domain_size = int(argument(4, 0))};
  if (policy.ranks < 3 || policy.ranks > ferry::test::DecodeBoard::kMost) {
    return std::fprintf(stderr, "decode_trials: 3 to 8 ranks\n"), 2;
  }
  if (policy.domain_size > 0) {
    if (!ferry::engine::test::has_network()) return std::printf("SKIPPED: NO LIBFABRIC\n"), 77;
    policy.pause = std::chrono::milliseconds(400);  // joins take longer
  }
  double start = ferry::test::now();
  DecodeCounts joined, kept;
  bool right = add(joined, seed, policy, rounds);
  print("processes join", joined, right, ferry::test::now() - start);
  start = ferry::test::now();
  policy.joins = false;
  for (unsigned job = 0; right && kept.rounds < rounds / 10; ++job) {
    right = add(kept, seed + job, policy, 500);
  }
  print("the exchange goes on", kept, right, ferry::test::now() - start);
  return right ? 0 : 1;
}
