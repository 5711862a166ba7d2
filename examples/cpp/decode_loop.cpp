// Decoding: small batches, two of them in flight. While the experts work on one batch, the next one
// already travels; a hook says when to receive it.
#include <ferry/ferry.hpp>

#include <algorithm>
#include <cstdint>
#include <cstdio>
#include <thread>
#include <vector>

constexpr int kRanks = 2, kExperts = 4, kTokens = 8, kTopk = 2, kHidden = 128, kSteps = 20;

struct Batch {
  std::vector<float> x, weights;
  std::vector<std::int64_t> routes;

  Batch(int rank, int step) : weights(kTokens * kTopk, 0.5f) {
    for (int i = 0; i < kTokens * kHidden; ++i) x.push_back(float(rank + step + i % 10));
    for (int i = 0; i < kTokens * kTopk; ++i) routes.push_back((rank + step + i) % kExperts);
  }
};

// Every expert doubles: the first counts[e] rows of expert e are there.
void experts_work(const ferry::LatencyReceived& in) {
  const std::int64_t capacity = in.x.shape()[1];
  for (std::int64_t e = 0; e < in.x.shape()[0]; ++e) {
    float* rows = in.x.as<float>() + e * capacity * kHidden;
    for (int i = 0; i < in.counts.as<std::int32_t>()[e] * kHidden; ++i) rows[i] *= 2;
  }
}

int run_rank(std::shared_ptr<ferry::Bootstrap> bootstrap) {
  ferry::Group group(bootstrap, {.experts = kExperts});
  ferry::LatencyExchange exchange(
      group, {.capacity = kTokens, .hidden = kHidden, .topk = kTopk, .dtype = ferry::Dtype::f32});

  std::vector<Batch> batches;
  for (int step = 0; step < kSteps; ++step) batches.emplace_back(group.rank(), step);
  const auto send = [&](int step) {
    return exchange.dispatch({batches[step].x.data(), ferry::Dtype::f32, {kTokens, kHidden}},
                             {batches[step].routes.data(), ferry::Dtype::i64, {kTokens, kTopk}},
                             {.hook = true});
  };

  int wrong = 0;
  ferry::LatencyReceived in = send(0);
  for (int step = 0; step < kSteps; ++step) {
    ferry::LatencyReceived next = step + 1 < kSteps ? send(step + 1) : ferry::LatencyReceived();
    in.receive();  // this batch: waits for what has not arrived yet
    experts_work(in);
    ferry::LatencyCombined out = exchange.combine(
        in.x, in, {batches[step].weights.data(), ferry::Dtype::f32, {kTokens, kTopk}},
        {.hook = true});
    out.receive();  // attention of another batch would run before this, while results travel
    const float* result = out.x.as<float>();
    for (int i = 0; i < kTokens * kHidden; ++i) wrong += result[i] != 2 * batches[step].x[i];
    in = next;  // drops the batch that is done: its buffer serves the one after
  }
  std::printf("rank %d: %d steps, %d values wrong\n", group.rank(), kSteps, wrong);
  group.barrier();  // so that no rank leaves while another still reads
  return wrong;
}

int main() {
  const auto bootstraps = ferry::thread_bootstrap(kRanks);
  std::vector<int> failed(kRanks, 1);
  std::vector<std::thread> threads;
  for (int rank = 0; rank < kRanks; ++rank) {
    threads.emplace_back([&, rank] {
      try {
        failed[rank] = run_rank(bootstraps[rank]);
      } catch (const std::exception& error) {
        std::fprintf(stderr, "rank %d: %s\n", rank, error.what());
      }
    });
  }
  for (std::thread& thread : threads) thread.join();
  return std::count(failed.begin(), failed.end(), 0) == kRanks ? 0 : 1;
}
