// Many rounds of decode with two copies of each expert, while ranks die, pause and join: whether
// any token is wrong, or lacks an expert after the round in which a rank was lost. Prints JSON.
// decode_trials [ROUNDS [SEED]]
#include <cstdio>
#include <cstdlib>

#include "decode_load.hpp"

int main(int count, char** words) {
  const long rounds = count > 1 ? std::atol(words[1]) : 100'000;
  const auto seed = unsigned(count > 2 ? std::atol(words[2]) : 20261127);
  const double start = ferry::test::now();
  ferry::test::DecodeJob job(seed);
  const ferry::test::DecodeCounts counts = job.run(rounds);
  std::printf(
      "{\"seed\": %u, \"ranks\": %d, \"rounds\": %lld, \"tokens\": %lld, \"kills\": %d, "
      "\"pauses\": "
      "%d, \"joins\": %d,\n \"zeroed_in_the_round_of_a_loss\": %lld, \"zeroed_later\": %lld, "
      "\"wrong\": \"%s\", \"seconds\": %.0f}\n",
      seed, ferry::test::DecodeBoard::kRanks, static_cast<long long>(counts.rounds),
      static_cast<long long>(counts.tokens), counts.kills, counts.pauses, counts.joins,
      static_cast<long long>(counts.zeroed), static_cast<long long>(counts.zeroed_later),
      job.wrong().c_str(), ferry::test::now() - start);
  return job.wrong().empty() && counts.zeroed_later == 0 ? 0 : 1;
}
