// A user's program: two ranks as threads, one exchange there and back, nothing but the public API.
#include <cstdint>
#include <cstdio>
#include <exception>
#include <ferry/ferry.hpp>
#include <memory>
#include <thread>
#include <utility>
#include <vector>

namespace {

constexpr int kRanks = 2, kTokens = 4, kHidden = 16;

/// Token t goes to both experts (one a rank); both send it back unchanged: the sum is twice it.
bool exchange(std::shared_ptr<ferry::Bootstrap> bootstrap) {
  ferry::GroupConfig config;
  config.experts = kRanks;
  ferry::Group group(std::move(bootstrap), config);
  std::vector<std::int64_t> routes;
  std::vector<float> tokens;
  for (int t = 0; t < kTokens; ++t) {
    routes.insert(routes.end(), {0, 1});
    tokens.insert(tokens.end(), kHidden, static_cast<float>(100 * group.rank() + t));
  }
  ferry::Plan plan = group.plan({routes.data(), ferry::Dtype::i64, {kTokens, 2}});
  ferry::Received there =
      group.dispatch({tokens.data(), ferry::Dtype::f32, {kTokens, kHidden}}, plan);
  ferry::Combined back = group.combine(there.x, plan);
  bool right = there.x.rows() == kRanks * kTokens;
  for (std::size_t i = 0; i < tokens.size(); ++i) {
    right = right && back.x.as<float>()[i] == 2 * tokens[i];
  }
  return right;
}

}  // namespace

int main() {
  auto bootstraps = ferry::thread_bootstrap(kRanks);
  std::vector<std::thread> threads;
  std::vector<int> right(kRanks, 0);
  for (std::size_t rank = 0; rank < right.size(); ++rank) {
    threads.emplace_back([&, rank] {
      try {
        right[rank] = exchange(bootstraps[rank]);
      } catch (const std::exception& error) {
        std::fprintf(stderr, "rank %zu: %s\n", rank, error.what());
      }
    });
  }
  for (auto& thread : threads) {
    thread.join();
  }
  const bool ok = right == std::vector<int>(kRanks, 1);
  std::puts(ok ? "exchanged" : "wrong answer");
  return ok ? 0 : 1;
}
