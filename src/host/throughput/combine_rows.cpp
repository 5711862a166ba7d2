// Combine: own rows are put where the peers read them; those of one token are found and summed.
#include <algorithm>
#include <array>
#include <cstring>

#include "core/check.hpp"
#include "host/kernels/kernels.hpp"
#include "host/throughput/combine_job.hpp"

namespace ferry::host {

void CombineJob::place_rows() {
  const auto received = static_cast<std::size_t>(plan().recv_rows());
  if (expert_major()) {
    reduce_slots();
  } else if (mine_ != rows_.data && received > 0) {
    std::memcpy(mine_, rows_.data, received * rows_.row_bytes());
  }
  if (has_weights() && received > 0) {
    std::memcpy(mine_weights_, options_.topk_weights->data, received * weight_bytes());
  }
}

void CombineJob::reduce_slots() {
  const auto offsets = plan().expert_offsets(options_.alignment);
  const auto slot_rows = place_slots(plan_->routes.topk_idx, offsets);
  const auto topk = static_cast<std::size_t>(plan_->topk);
  const auto* from = static_cast<const std::byte*>(rows_.data);
  const auto* weights =
      options_.apply_weights ? static_cast<const float*>(options_.topk_weights->data) : nullptr;
  const Kernels& run = kernels();
  std::array<const void*, kMaxTopk> rows{};
  std::array<float, kMaxTopk> factors{};
  SumRows sum;
  sum.rows = rows.data();
  sum.weights = weights == nullptr ? nullptr : factors.data();
  sum.columns = rows_.columns();
  sum.dtype = rows_.dtype;
  for (std::size_t i = 0; i < static_cast<std::size_t>(plan().recv_rows()); ++i) {
    sum.count = 0;
    for (std::size_t k = 0; k < topk; ++k) {
      const std::int64_t row = slot_rows[i * topk + k];
      if (row < 0) continue;
      const auto n = static_cast<std::size_t>(sum.count++);
      rows[n] = from + static_cast<std::size_t>(row) * rows_.row_bytes();
      if (weights != nullptr) factors[n] = weights[i * topk + k];
    }
    sum.out = mine_ + i * rows_.row_bytes();
    run.sum_rows(sum);
  }
}

void CombineJob::find_rows() {
  const std::size_t row_bytes = rows_.row_bytes();
  for (int peer = 0; peer < engine_.size(); ++peer) {
    const auto d = static_cast<std::size_t>(peer);
    const StepMessage theirs = channel().head(peer);
    const auto first = static_cast<std::size_t>(plan().peer_row[d]);
    const std::byte* rows = channel().pointer(peer, {theirs.segment, theirs.offset});
    if (rows != nullptr) {
      const std::byte* weights = channel().pointer(peer, {theirs.side_segment, theirs.side_offset});
      row_base_.push_back(rows + first * row_bytes);
      weight_base_.push_back(weights + first * weight_bytes());
    } else {
      const auto staged = static_cast<std::size_t>(plan().send_offset[d]);
      row_base_.push_back(stage_ + staged * row_bytes);
      weight_base_.push_back(stage_weights_ + staged * weight_bytes());
    }
  }
}

void CombineJob::sum_tokens(std::int64_t first, std::int64_t end) {
  const std::size_t row_bytes = rows_.row_bytes();
  const auto at = [&](const std::optional<ConstTensorView>& bias, std::size_t token) {
    return bias ? static_cast<const std::byte*>(bias->data) + token * row_bytes : nullptr;
  };
  // Two sets of pointers in turn: while one token is summed, the rows of the next are fetched.
  std::array<std::array<const void*, kMaxTopk>, 2> rows{};
  const auto find = [&](std::size_t token) {
    std::int64_t count = 0;
    if (token == static_cast<std::size_t>(end)) return count;
    for (std::int64_t l = plan().lane_offset[token]; l < plan().lane_offset[token + 1]; ++l) {
      const Lane lane = plan().lanes[static_cast<std::size_t>(l)];
      rows[token % 2][static_cast<std::size_t>(count++)] =
          row_base_[static_cast<std::size_t>(lane.rank)] +
          static_cast<std::size_t>(lane.row) * row_bytes;
    }
    return count;
  };
  const Kernels& run = kernels();
  SumRows sum;
  sum.columns = rows_.columns();
  sum.dtype = rows_.dtype;
  sum.next_count = find(static_cast<std::size_t>(first));
  auto* out = static_cast<std::byte*>(result_.x.data());
  for (auto token = static_cast<std::size_t>(first); token < static_cast<std::size_t>(end);
       ++token) {
    sum.rows = rows[token % 2].data();
    sum.count = sum.next_count;
    sum.next_rows = rows[(token + 1) % 2].data();
    sum.next_count = find(token + 1);
    sum.bias0 = at(options_.bias0, token);
    sum.bias1 = at(options_.bias1, token);
    sum.out = out + token * row_bytes;
    run.sum_rows(sum);
  }
}

void CombineJob::sum_weights() {
  const auto topk = static_cast<std::size_t>(plan_->topk);
  auto* out = result_.topk_weights.as<float>();
  std::fill(out, out + static_cast<std::size_t>(plan_->tokens) * topk, 0.0f);
  for (std::size_t token = 0; token < static_cast<std::size_t>(plan_->tokens); ++token) {
    for (std::int64_t l = plan().lane_offset[token]; l < plan().lane_offset[token + 1]; ++l) {
      const Lane lane = plan().lanes[static_cast<std::size_t>(l)];
      const auto* weights =
          reinterpret_cast<const float*>(weight_base_[static_cast<std::size_t>(lane.rank)] +
                                         static_cast<std::size_t>(lane.row) * weight_bytes());
      for (std::size_t k = 0; k < topk; ++k) out[token * topk + k] += weights[k];
    }
  }
}

}  // namespace ferry::host
