// Four ranks as threads: tokens travel to their experts and come back. No launcher needed.
#include <ferry/ferry.hpp>

#include <algorithm>
#include <cstdint>
#include <cstdio>
#include <thread>
#include <vector>

constexpr int kRanks = 4, kExperts = 8, kTokens = 6, kTopk = 2, kHidden = 64;

// Expert e multiplies by e + 1.
constexpr auto factor = [](std::int64_t expert) { return float(expert + 1); };

int run_rank(std::shared_ptr<ferry::Bootstrap> bootstrap) {
  ferry::Group group(bootstrap, {.experts = kExperts});

  // This rank's tokens, and what a router would choose for them.
  std::vector<float> x(kTokens * kHidden), weights(kTokens * kTopk);
  std::vector<std::int64_t> routes(kTokens * kTopk);
  for (int t = 0; t < kTokens; ++t) {
    for (int c = 0; c < kHidden; ++c) x[t * kHidden + c] = float(group.rank() + t + c);
    routes[t * kTopk] = (group.rank() + t) % kExperts, weights[t * kTopk] = 0.75f;
    routes[t * kTopk + 1] = (3 * t) % kExperts, weights[t * kTopk + 1] = 0.25f;
  }

  // There: one copy of a token for each rank that holds one of its experts.
  ferry::Plan plan = group.plan({routes.data(), ferry::Dtype::i64, {kTokens, kTopk}});
  ferry::DispatchOptions with_weights;
  with_weights.topk_weights = {weights.data(), ferry::Dtype::f32, {kTokens, kTopk}};
  ferry::Received in =
      group.dispatch({x.data(), ferry::Dtype::f32, {kTokens, kHidden}}, plan, with_weights);

  // The experts of this rank work in place, in the memory where the rows arrived.
  const std::int64_t first_expert = group.rank() * group.local_experts();
  for (std::int64_t row = 0; row < in.x.rows(); ++row) {
    float scale = 0;
    for (int k = 0; k < kTopk; ++k) {
      const std::int64_t expert = in.topk_idx.as<std::int64_t>()[row * kTopk + k];
      const float weight = in.topk_weights.as<float>()[row * kTopk + k];
      if (expert >= 0) scale += weight * factor(first_expert + expert);
    }
    for (int c = 0; c < kHidden; ++c) in.x.as<float>()[row * kHidden + c] *= scale;
  }

  // And back: the sum over the ranks that a token went to.
  ferry::Combined out = group.combine(in.x, plan);

  int wrong = 0;
  for (int i = 0; i < kTokens * kHidden; ++i) {
    const int slot = i / kHidden * kTopk;
    const float scale =
        weights[slot] * factor(routes[slot]) + weights[slot + 1] * factor(routes[slot + 1]);
    wrong += out.x.as<float>()[i] != x[i] * scale;
  }
  std::printf("rank %d: received %lld rows, %d of %d values wrong\n", group.rank(),
              static_cast<long long>(in.x.rows()), wrong, kTokens * kHidden);
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
