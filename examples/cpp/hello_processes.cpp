// One rank of several processes, and rows sorted by expert, as a grouped matrix product wants them:
//
//   ferry run -n 4 -- ./hello_processes
#include <ferry/ferry.hpp>

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstdio>
#include <vector>

constexpr std::int64_t kExperts = 16, kTokens = 32, kTopk = 4, kHidden = 128, kAlignment = 8;

// Expert e multiplies by e + 1.
constexpr auto factor = [](std::int64_t expert) { return float(expert + 1); };

int run() {
  // RANK, WORLD_SIZE, MASTER_ADDR, ... as `ferry run` or torchrun sets them.
  ferry::GroupConfig config;
  config.experts = kExperts;
  ferry::Group group(ferry::tcp_bootstrap(ferry::tcp_options_from_environment()), config);

  std::vector<float> x, weights;
  std::vector<std::int64_t> routes;
  for (std::int64_t t = 0; t < kTokens; ++t) {
    for (std::int64_t c = 0; c < kHidden; ++c) x.push_back(static_cast<float>(t % 7 + c));
    for (std::int64_t k = 0; k < kTopk; ++k) {
      routes.push_back((group.rank() + 3 * t + 5 * k) % kExperts);
      weights.push_back(1.0f / static_cast<float>(k + 1));
    }
  }
  const ferry::ConstTensorView x_view(x.data(), ferry::Dtype::f32, {kTokens, kHidden});
  const ferry::ConstTensorView weights_view(weights.data(), ferry::Dtype::f32, {kTokens, kTopk});

  ferry::Plan plan = group.plan({routes.data(), ferry::Dtype::i64, {kTokens, kTopk}});
  ferry::DispatchOptions there;
  there.topk_weights = weights_view;
  there.order = ferry::RowOrder::expert_major;
  there.alignment = kAlignment;  // every expert's block of rows, padded with zeros
  ferry::Received in = group.dispatch(x_view, plan, there);

  // Contiguous blocks of experts; the first ranks hold one more when they do not divide.
  const std::int64_t each = kExperts / group.size(), more = kExperts % group.size();
  const std::int64_t first_expert =
      group.rank() * each + std::min<std::int64_t>(group.rank(), more);
  const auto* offsets = in.expert_offsets.as<std::int64_t>();
  for (std::int64_t e = 0; e < group.local_experts(); ++e) {
    float* block = in.x.as<float>() + offsets[e] * kHidden;
    const std::int64_t values = (offsets[e + 1] - offsets[e]) * kHidden;
    for (std::int64_t i = 0; i < values; ++i) block[i] *= factor(first_expert + e);
  }

  ferry::CombineOptions back;
  back.order = ferry::RowOrder::expert_major;
  back.alignment = kAlignment;
  back.topk_weights = in.topk_weights;
  back.apply_weights = true;  // the sum over a token's experts, each times its weight
  ferry::Combined out = group.combine(in.x, plan, back);

  int wrong = 0;
  for (std::int64_t i = 0; i < kTokens * kHidden; ++i) {
    float expected = 0;
    for (std::int64_t slot = i / kHidden * kTopk; slot < (i / kHidden + 1) * kTopk; ++slot) {
      expected += weights[slot] * factor(routes[slot]) * x[i];
    }
    wrong += std::fabs(out.x.as<float>()[i] - expected) > 1e-5f * expected;
  }
  std::printf("rank %d of %d over %s: %lld rows for %lld experts, %d values wrong\n", group.rank(),
              group.size(), group.fabric_name().c_str(), static_cast<long long>(in.x.rows()),
              static_cast<long long>(group.local_experts()), wrong);
  group.barrier();  // so that no rank leaves while another still reads
  return wrong == 0 ? 0 : 1;
}

int main() try { return run(); } catch (const std::exception& error) {
  std::fprintf(stderr, "%s\n", error.what());
  return 1;
}
