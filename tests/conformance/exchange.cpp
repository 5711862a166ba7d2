#include "exchange.hpp"

#include "compare.hpp"
#include "device.hpp"
#include "random.hpp"
#include "reference_parts.hpp"
#include "session.hpp"

namespace ferry::conformance {
namespace {

constexpr auto kExchangeWait = std::chrono::seconds(60);

}  // namespace

Case small_case(const Rank& rank, std::uint64_t seed) {
  Case c;
  c.fabric = rank.fabric();
  c.ranks = rank.size();
  c.hidden = 64;
  c.topk = 3;
  c.dtype = Dtype::bf16;
  c.expert_kind = ExpertKind::odd;
  c.tokens = 9;
  c.seed = seed;
  return c;
}

Exchange::Exchange(Rank& rank, Group& group, const Case& c, Stream* stream)
    : rank_(rank), group_(group), case_(c), stream_(stream) {
  const RankInput& own = world(0).inputs[index(rank.rank())];
  expected_ = expect_dispatch(world(0), rank.rank(), c.order, c.alignment);
  plan_ = group.plan(put({own.topk_idx.data(), Dtype::i64, {own.tokens, c.topk}}), {stream});
}

ConstTensorView Exchange::put(const ConstTensorView& tensor) {
  arrays_.push_back(to_device(tensor, rank_.where()));
  return arrays_.back();
}

const World& Exchange::world(std::uint64_t round) {
  while (worlds_.size() <= round) {
    worlds_.push_back(std::make_unique<World>(make_world(case_, worlds_.size())));
  }
  return *worlds_[round];
}

Received Exchange::dispatch(std::uint64_t round, std::int64_t max_recv_rows) {
  const RankInput& own = world(round).inputs[index(rank_.rank())];
  DispatchOptions options;
  options.order = case_.order;
  options.alignment = case_.alignment;
  options.max_recv_rows = max_recv_rows;
  options.stream = stream_;
  options.topk_weights = put({own.weights.data(), Dtype::f32, {own.tokens, case_.topk}});
  return group_.dispatch(put({own.x.data(), case_.dtype, {own.tokens, case_.hidden}}), plan_,
                         options);
}

void Exchange::check(const Received& received, std::uint64_t round) {
  received.event.wait(kExchangeWait);
  const Received got{to_cpu(received.x),
                     {},
                     to_cpu(received.topk_idx),
                     to_cpu(received.topk_weights),
                     to_cpu(received.source_token),
                     to_cpu(received.slot_rows),
                     to_cpu(received.expert_offsets),
                     {}};
  const ExpectedDispatch expected =
      expect_dispatch(world(round), rank_.rank(), case_.order, case_.alignment);
  if (!rank_.check(got.x.rows() >= expected.rows, "x has too few rows")) return;
  same_bytes(rank_, "x", got.x.data(), expected.x.data(), index(expected.rows),
             world(round).row_bytes());
  same_vector(rank_, "topk_idx", got.topk_idx.as<std::int64_t>(), expected.topk_idx);
  same_vector(rank_, "topk_weights", got.topk_weights.as<float>(), expected.topk_weights);
  same_vector(rank_, "source_token", got.source_token.as<std::int32_t>(), expected.source_token);
  rank_.check(group_.destroyed() || group_.is_registered(received.x.data()), "x is not registered");
  if (case_.order != RowOrder::expert_major) return;
  same_vector(rank_, "slot_rows", got.slot_rows.as<std::int64_t>(), expected.slot_rows);
  same_vector(rank_, "expert_offsets", got.expert_offsets.as<std::int64_t>(),
              expected.expert_offsets);
}

void Exchange::fill(std::uint64_t round, int rank, std::int64_t row, std::byte* out) const {
  fill_row(mix(case_.seed, 51 + round, static_cast<std::uint64_t>(rank),
               static_cast<std::uint64_t>(row)),
           case_.dtype, case_.special_values, case_.hidden, out);
}

float Exchange::weight(std::uint64_t round, int rank, std::int64_t row, int slot) const {
  return make_weight(mix(case_.seed, 10051 + round, static_cast<std::uint64_t>(rank),
                         static_cast<std::uint64_t>(row * 64 + slot)));
}

Combined Exchange::combine(std::uint64_t round) {
  const auto rows = std::make_shared<Bytes>(index(expected_.rows) * world(0).row_bytes() + 16,
                                            static_cast<std::byte>(kPoison));
  const auto n = static_cast<std::int64_t>(expected_.arrivals.size());
  const auto make = [&](std::int64_t row) {
    fill(round, rank_.rank(), row, rows->data() + index(row) * world(0).row_bytes());
  };
  const bool by_expert = case_.order == RowOrder::expert_major;
  for (std::int64_t i = 0; i < n && !by_expert; ++i) make(i);
  for (std::int64_t row : expected_.slot_rows) {
    if (by_expert && row >= 0) make(row);
  }
  const auto weights = std::make_shared<std::vector<float>>();
  for (std::int64_t i = 0; i < n * case_.topk; ++i) {
    weights->push_back(
        weight(round, rank_.rank(), i / case_.topk, static_cast<int>(i % case_.topk)));
  }
  inputs_.push_back(rows);
  inputs_.push_back(weights);
  CombineOptions options;
  options.order = case_.order;
  options.alignment = case_.alignment;
  options.stream = stream_;
  options.topk_weights = put({weights->data(), Dtype::f32, {n, case_.topk}});
  options.apply_weights = by_expert;
  return group_.combine(put({rows->data(), case_.dtype, {expected_.rows, case_.hidden}}), plan_,
                        options);
}

void Exchange::check(const Combined& combined, std::uint64_t round) {
  combined.event.wait(kExchangeWait);
  const Combined got{to_cpu(combined.x), to_cpu(combined.topk_weights), {}};
  CombineInput input{case_.order, case_.alignment, case_.dtype, case_.hidden};
  input.row = [&](int rank, std::int64_t row, std::byte* out) { fill(round, rank, row, out); };
  input.weight = [&](int rank, std::int64_t row, int slot) {
    return weight(round, rank, row, slot);
  };
  input.apply_weights = case_.order == RowOrder::expert_major;
  input.domain_size = hierarchical_size(rank_, plan_);
  const ExpectedCombine expected = expect_combine(world(0), rank_.rank(), input);
  const std::int64_t tokens = world(0).inputs[index(rank_.rank())].tokens;
  if (!same_shape(rank_, "combined x", got.x, case_.dtype, {tokens, case_.hidden})) return;
  same_values(rank_, "combined x", case_.dtype, got.x.data(), expected.x.data(), tokens,
              case_.hidden);
  same_vector(rank_, "combined topk_weights", got.topk_weights.as<float>(), expected.topk_weights);
}

}  // namespace ferry::conformance
