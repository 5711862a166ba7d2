// Many rounds of decode with two copies of each expert, while ranks die and processes join: whether
// any row or sum is wrong, or lacks an expert in a step that counts. Prints JSON.
// Two parts: a group that takes processes in, and groups whose exchange goes on while ranks die.
// decode_trials [ROUNDS [SEED]]
#include <cstdio>
#include <cstdlib>

#include "decode_load.hpp"

namespace {

using ferry::test::DecodeCounts;
using ferry::test::DecodeJob;

/// Ends with what was wrong.
bool add(DecodeCounts& all, unsigned seed, bool joins, std::int64_t rounds) {
  DecodeJob job(seed, joins);
  const DecodeCounts counts = job.run(rounds);
  all.rounds += counts.rounds;
  all.tokens += counts.tokens;
  all.zeroed += counts.zeroed;
  all.epochs += counts.epochs;
  all.kills += counts.kills;
  all.joins += counts.joins;
  if (!job.wrong().empty()) std::fprintf(stderr, "seed %u: %s\n", seed, job.wrong().c_str());
  return job.wrong().empty();
}

void print(const char* part, const DecodeCounts& all, bool right, double seconds) {
  const auto number = [](std::int64_t value) { return static_cast<long long>(value); };
  std::printf(
      "{\"part\": \"%s\", \"rounds\": %lld, \"tokens\": %lld, \"deaths\": %d, \"joins\": %d, "
      "\"epochs\": %lld,\n \"zeroed_in_the_round_of_a_loss\": %lld, \"wrong\": %d, \"seconds\": "
      "%.0f}\n",
      part, number(all.rounds), number(all.tokens), all.kills, all.joins, number(all.epochs),
      number(all.zeroed), right ? 0 : 1, seconds);
  std::fflush(stdout);
}

}  // namespace

int main(int count, char** words) {
  const long rounds = count > 1 ? std::atol(words[1]) : 100'000;
  const auto seed = unsigned(count > 2 ? std::atol(words[2]) : 20261127);
  double start = ferry::test::now();
  DecodeCounts joined, kept;
  bool right = add(joined, seed, true, rounds);
  print("processes join", joined, right, ferry::test::now() - start);
  start = ferry::test::now();
  for (unsigned job = 0; right && kept.rounds < rounds / 10; ++job) {
    right = add(kept, seed + job, false, 500);
  }
  print("the exchange goes on", kept, right, ferry::test::now() - start);
  return right ? 0 : 1;
}
