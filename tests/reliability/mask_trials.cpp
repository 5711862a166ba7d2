// Many faults under load: how long until every survivor has masked the rank, and what the exchange
// does before, during and after. Prints JSON. mask_trials [TRIALS [DEADLINE_MS]]
#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <random>
#include <thread>
#include <vector>

#include "masked_load.hpp"

namespace ferry::test {
namespace {

struct Trials {
  std::vector<double> mask_ms{}, before{}, masked{}, after{};

  void add(const MaskFault& fault) {
    mask_ms.insert(mask_ms.end(), fault.mask_ms.begin(), fault.mask_ms.end());
    before.push_back(fault.rounds_before);
    masked.push_back(fault.rounds_masked);
    if (fault.rounds_after > 0) after.push_back(fault.rounds_after);
  }
};

double quantile(std::vector<double> values, double q) {
  if (values.empty()) return 0;
  std::sort(values.begin(), values.end());
  const auto last = static_cast<double>(values.size() - 1);
  return values[static_cast<std::size_t>(q * last + 0.5)];
}

void print(const char* name, const Trials& trials, double deadline_ms) {
  std::printf(
      "  \"%s\": {\"trials\": %zu, \"deadline_ms\": %.0f, \"mask_ms\": {\"p50\": %.2f, \"p99\": "
      "%.2f, \"max\": %.2f},\n    \"rounds_per_s\": {\"before\": %.0f, \"masked\": %.0f, "
      "\"rejoined\": %.0f}}",
      name, trials.before.size(), deadline_ms, quantile(trials.mask_ms, 0.5),
      quantile(trials.mask_ms, 0.99), quantile(trials.mask_ms, 1), quantile(trials.before, 0.5),
      quantile(trials.masked, 0.5), quantile(trials.after, 0.5));
}

int run(int count, std::chrono::milliseconds deadline) {
  std::mt19937 random(20261121);
  const auto any_moment = [&] {
    std::this_thread::sleep_for(std::chrono::microseconds(random() % 20'000));
  };
  Trials killed, stopped;
  for (int trial = 0; trial < count; ++trial) {
    MaskedJob job(std::chrono::seconds(20));
    any_moment();
    killed.add(job.kill(static_cast<int>(random() % MaskBoard::kRanks)));
    if (const std::string wrong = job.end(); !wrong.empty()) {
      std::fprintf(stderr, "kill %d: %s\n", trial, wrong.c_str());
      return 1;
    }
  }
  MaskedJob job(deadline);
  for (int trial = 0; trial < count; ++trial) {
    any_moment();
    stopped.add(job.stop({static_cast<int>(random() % MaskBoard::kRanks)}, 3.0));
  }
  if (const std::string wrong = job.end(); !wrong.empty()) {
    std::fprintf(stderr, "stop: %s\n", wrong.c_str());
    return 1;
  }
  std::printf("{\n  \"ranks\": %d, \"cores\": %u, \"wrong_tokens\": 0,\n", MaskBoard::kRanks,
              std::thread::hardware_concurrency());
  print("killed", killed, 20'000);
  std::printf(",\n");
  print("stopped_3_s", stopped, static_cast<double>(deadline.count()));
  std::printf("\n}\n");
  return 0;
}

}  // namespace
}  // namespace ferry::test

int main(int count, char** words) {
  const int trials = count > 1 ? std::atoi(words[1]) : 50;
  const int deadline_ms = count > 2 ? std::atoi(words[2]) : 1000;
  if (trials < 1 || deadline_ms < 1) {
    std::fprintf(stderr, "usage: mask_trials [TRIALS [DEADLINE_MS]]\n");
    return 2;
  }
  return ferry::test::run(trials, std::chrono::milliseconds(deadline_ms));
}
