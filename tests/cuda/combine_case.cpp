#include "combine_case.hpp"

namespace ferry::cuda::test {
namespace {

CombineParameters rank_parameters(KernelGroup& group, const CombineCase& c, CombineSetup& setup,
                                  int rank, Random& random) {
  const Exchange& x = setup.exchange;
  const std::int64_t tokens = x.tokens(rank);
  CombineParameters p;
  p.group = group.view(rank);
  p.plan = upload_plan(group, x, rank);
  p.call.kind = CallKind::combine;
  p.call.dtype = static_cast<std::uint32_t>(c.dtype);
  p.call.elements = c.columns;
  p.call.exchange.topk = static_cast<std::uint32_t>(c.shape.topk);
  p.rows = x.received(rank);
  setup.rows.push_back(random_elements(random, c.dtype, p.rows * c.columns));
  setup.weights.push_back(random_floats(random, p.rows * c.shape.topk));
  const Piece rows = group.upload(rank, setup.rows.back());
  const Piece weights = group.upload(rank, setup.weights.back());
  p.segment = rows.segment;
  p.offset = rows.offset;
  p.side_segment = weights.segment;
  p.side_offset = weights.offset;
  p.has_weights = c.weights;
  p.dtype = c.dtype;
  p.columns = c.columns;
  for (int b = 0; b < 2; ++b) {
    setup.biases[b].push_back(random_elements(random, c.dtype, tokens * c.columns));
    const Piece bias = group.upload(rank, setup.biases[b].back());
    if (c.bias[b]) (b == 0 ? p.bias0 : p.bias1) = bias.data;
  }
  p.out = group.take(rank, at(tokens * c.row_bytes()) + kGuard).data;
  p.out_weights = reinterpret_cast<float*>(
      group.take(rank, at(tokens * c.shape.topk) * sizeof(float) + kGuard).data);
  p.failure = group.failure(rank);
  p.num_sms = c.num_sms;
  return p;
}

}  // namespace

std::string CombineCase::text() const {
  std::string s = "ranks " + std::to_string(shape.ranks) + ", tokens";
  for (const auto t : shape.tokens) s.append(" ").append(std::to_string(t));
  return s + ", experts " + std::to_string(shape.experts) + ", top-k " +
         std::to_string(shape.topk) + ", unused " + std::to_string(shape.unused_percent) + " %, " +
         std::string(name_of(dtype)) + " x " + std::to_string(columns) + ", biases " +
         std::to_string(bias[0]) + std::to_string(bias[1]) + ", weights " +
         std::to_string(weights) + ", sms " + std::to_string(num_sms) + ", vectors " +
         std::to_string(tuning.vectors) + ", warps " + std::to_string(tuning.warps) + ", stages " +
         std::to_string(tuning.stages) + ", spread " + std::to_string(tuning.spread);
}

CombineSetup make_combine(KernelGroup& group, const CombineCase& c, Random& random) {
  group.reset_arena();
  group.clear_failures();
  CombineSetup setup;
  setup.exchange = make_exchange(c.shape, random);
  for (int r = 0; r < c.shape.ranks; ++r) {
    setup.parameters.push_back(rank_parameters(group, c, setup, r, random));
  }
  group.settle();
  return setup;
}

}  // namespace ferry::cuda::test
