// Combine over several domains, hierarchical: sums of a domain cross as one row, in chunks, from
// the rank on the owner's rail; the owner adds the domains in ascending order.
#include <algorithm>
#include <array>
#include <cstring>

#include "core/check.hpp"
#include "host/kernels/kernels.hpp"
#include "host/throughput/combine_job.hpp"

namespace ferry::host {
namespace {

std::size_t index(std::int64_t value) {
  return static_cast<std::size_t>(value);
}

}  // namespace

void CombineJob::resolve_crossing() {
  crossing_ = options_.crossing == Crossing::automatic ? plan_->crossed : options_.crossing;
  if (engine_.domains() == 1) crossing_ = Crossing::direct;
}

/// The same is known of the plan on all ranks, but not all need to have asked for this crossing:
/// they hear of each other before they throw.
void CombineJob::refuse_crossing() {
  channel().swap("combine: rows", head());
  engine::check_same_call(channel(), "combine: rows", head().call);
  engine_.all_ranks_throw();
  refuse("combine", "crossing", "hierarchical with a plan that no hierarchical dispatch has used",
         "such a dispatch first: it brings what the sums inside a domain need");
}

std::size_t CombineJob::staged_rows() const {
  if (hierarchical()) return index(plan_->crossing.offset.back());
  return outsiders_ ? plan().lanes.size() : 0;
}

std::int64_t CombineJob::staged_rows_of(int peer) const {
  const CrossingPlan& crossing = plan_->crossing;
  if (hierarchical()) {
    const bool mine =
        crossing.domains.rail(peer, crossing.domains.of(engine_.rank())) == engine_.rank();
    return mine ? crossing.first_sum(peer, crossing.domains.count()) : 0;
  }
  std::int64_t rows = 0;
  for (int d = 0; d < engine_.size(); ++d) {
    rows += plan().rank_tokens[index(std::int64_t{peer} * engine_.size() + d)];
  }
  return rows;
}

void CombineJob::push_sums() {
  for (std::size_t feeder = 0; feeder < plan_->crossing.feeders.size(); ++feeder) {
    const int owner = plan_->crossing.feeders[feeder];
    find_rows_of(owner);
    const std::int64_t rows = plan_->forwards[feeder].rows();
    const std::int64_t chunk = chunk_rows(rows_.row_bytes());
    for (std::int64_t first = 0; first < rows; first += chunk) {
      push_chunk(feeder, first, std::min(rows, first + chunk));
    }
    channel().deliver(owner, index(rows) * (rows_.row_bytes() + weight_bytes()));
  }
}

/// Where the rows of `owner`'s tokens lie in this domain.
void CombineJob::find_rows_of(int owner) {
  row_base_.assign(index(engine_.size()), nullptr);
  weight_base_.assign(index(engine_.size()), nullptr);
  const Domains& domains = engine_.topology();
  for (const int member : domains.members(domains.of(engine_.rank()))) {
    const StepMessage theirs = channel().head(member);
    const std::size_t first = index(plan().first_row(member, owner));
    row_base_[index(member)] =
        channel().pointer(member, {theirs.segment, theirs.offset}) + first * rows_.row_bytes();
    weight_base_[index(member)] =
        channel().pointer(member, {theirs.side_segment, theirs.side_offset}) +
        first * weight_bytes();
  }
}

void CombineJob::push_chunk(std::size_t feeder, std::int64_t first, std::int64_t end) {
  const Forward& forward = plan_->forwards[feeder];
  const int owner = plan_->crossing.feeders[feeder];
  const std::size_t row_bytes = rows_.row_bytes();
  std::vector<std::byte> sums(index(end - first) * row_bytes);
  std::vector<float> weights(index(end - first) * weight_bytes() / sizeof(float));
  for (std::int64_t row = first; row < end; ++row) {
    const std::span<const Lane> lanes(
        forward.lanes.data() + forward.lane_offset[index(row)],
        index(forward.lane_offset[index(row + 1)] - forward.lane_offset[index(row)]));
    sum_lanes(lanes, sums.data() + index(row - first) * row_bytes);
    if (has_weights()) add_weights(lanes, weights.data() + index(row - first) * index(plan_->topk));
  }
  const StepMessage theirs = channel().head(owner);
  const std::uint64_t tag = channel().delivery_tag();
  const std::size_t at =
      index(plan_->crossing.first_sum(owner, engine_.topology().of(engine_.rank())) + first);
  channel().reach().write(owner, {theirs.stage_segment, theirs.stage_offset + at * row_bytes},
                          sums.data(), sums.size(), tag);
  if (!has_weights()) return;
  channel().reach().write(
      owner, {theirs.stage_side_segment, theirs.stage_side_offset + at * weight_bytes()},
      weights.data(), weights.size() * sizeof(float), tag);
}

/// fp32 in ascending rank order, rounded once.
void CombineJob::sum_lanes(std::span<const Lane> lanes, void* out) const {
  std::array<const void*, kMaxTopk> rows{};
  SumRows sum;
  sum.rows = rows.data();
  sum.columns = rows_.columns();
  sum.dtype = rows_.dtype;
  for (const Lane& lane : lanes) {
    rows[index(sum.count++)] = row_base_[index(lane.rank)] + index(lane.row) * rows_.row_bytes();
  }
  sum.out = out;
  kernels().sum_rows(sum);
}

void CombineJob::add_weights(std::span<const Lane> lanes, float* to) const {
  for (const Lane& lane : lanes) {
    const auto* weights = reinterpret_cast<const float*>(weight_base_[index(lane.rank)] +
                                                         index(lane.row) * weight_bytes());
    for (std::size_t k = 0; k < index(plan_->topk); ++k) to[k] += weights[k];
  }
}

void CombineJob::wait_for_sums() {
  const Domains& domains = engine_.topology();
  for (int domain = 0; domain < domains.count(); ++domain) {
    if (domain == domains.of(engine_.rank())) continue;
    channel().await_delivered("combine: rows", domains.rail(engine_.rank(), domain));
  }
}

/// Where the sums of one token's domains are, in ascending order: the own domain's is made in
/// `inside`, `next` counts those that came. Weights are added on the way.
void CombineJob::find_sums(std::int64_t token, TokenSums& sums) {
  const Domains& domains = engine_.topology();
  std::fill(sums.there.begin(), sums.there.end(), false);
  sums.lanes.clear();
  sums.rows.clear();
  for (std::int64_t l = plan().lane_offset[index(token)]; l < plan().lane_offset[index(token + 1)];
       ++l) {
    const Lane lane = plan().lanes[index(l)];
    sums.there[index(domains.of(lane.rank))] = true;
    if (domains.together(lane.rank, engine_.rank())) sums.lanes.push_back(lane);
  }
  float* weights = has_weights() ? result_.topk_weights.as<float>() + token * plan_->topk : nullptr;
  if (weights != nullptr) std::fill_n(weights, plan_->topk, 0.0f);
  for (int domain = 0; domain < domains.count(); ++domain) {
    if (!sums.there[index(domain)]) continue;
    if (domain == domains.of(engine_.rank())) {
      sum_lanes(sums.lanes, sums.inside.data());
      sums.rows.push_back(sums.inside.data());
      if (weights != nullptr) add_inside(sums.lanes, weights);
      continue;
    }
    const std::size_t row = index(sums.next[index(domain)]++);
    sums.rows.push_back(stage_ + row * rows_.row_bytes());
    if (weights == nullptr) continue;
    const auto* theirs = reinterpret_cast<const float*>(stage_weights_ + row * weight_bytes());
    for (std::size_t k = 0; k < index(plan_->topk); ++k) weights[k] += theirs[k];
  }
}

void CombineJob::sum_domains() {
  const std::size_t row_bytes = rows_.row_bytes();
  find_rows_of(engine_.rank());
  TokenSums sums;
  sums.next.assign(plan_->crossing.offset.begin(), plan_->crossing.offset.end() - 1);
  sums.inside.resize(row_bytes);
  sums.there.resize(index(engine_.domains()));
  SumRows sum;
  sum.columns = rows_.columns();
  sum.dtype = rows_.dtype;
  const auto at = [&](const std::optional<ConstTensorView>& bias, std::int64_t token) {
    return bias ? static_cast<const std::byte*>(bias->data) + index(token) * row_bytes : nullptr;
  };
  for (std::int64_t token = 0; token < plan_->tokens; ++token) {
    find_sums(token, sums);
    sum.rows = sums.rows.data();
    sum.count = static_cast<std::int64_t>(sums.rows.size());
    sum.bias0 = at(options_.bias0, token);
    sum.bias1 = at(options_.bias1, token);
    sum.out = static_cast<std::byte*>(result_.x.data()) + index(token) * row_bytes;
    kernels().sum_rows(sum);
  }
}

/// The sum inside the own domain is a number of its own, as that of every other domain.
void CombineJob::add_inside(std::span<const Lane> lanes, float* to) const {
  std::array<float, kMaxTopk> sums{};
  add_weights(lanes, sums.data());
  for (std::size_t k = 0; k < index(plan_->topk); ++k) to[k] += sums[k];
}

}  // namespace ferry::host
