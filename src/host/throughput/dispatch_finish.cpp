// Dispatch: what has arrived becomes the result; the fan-out to expert-major order.
#include <algorithm>
#include <cstring>

#include "host/throughput/dispatch_job.hpp"

namespace ferry::host {

void DispatchJob::finish_side() {
  const std::int64_t rows = plan().recv_rows();
  const auto slots = static_cast<std::size_t>(rows) * static_cast<std::size_t>(plan_->topk);
  const auto side = make_side_layout(rank_rows_, plan_->topk, carries_routes_, has_weights());
  if (carries_routes_) {
    const auto* tokens =
        reinterpret_cast<const std::int32_t*>(side_region_.data + side.source_token);
    const auto* routes = reinterpret_cast<const std::int32_t*>(side_region_.data + side.topk_idx);
    plan_->routes.source_token.assign(tokens, tokens + rows);
    plan_->routes.topk_idx.assign(routes, routes + slots);
    check_routes();
    plan_->routes_known.store(true, std::memory_order_release);
  }
  auto* ids = result_.topk_idx.as<std::int64_t>();
  const std::int64_t all = rank_rows_ * plan_->topk;
  std::copy_n(plan_->routes.topk_idx.begin(), slots, ids);
  std::fill(ids + slots, ids + all, -1);
  auto* tokens = result_.source_token.as<std::int32_t>();
  std::copy_n(plan_->routes.source_token.begin(), rows, tokens);
  std::fill(tokens + rows, tokens + rank_rows_, -1);
  if (has_weights()) {
    auto* weights = result_.topk_weights.as<float>();
    if (slots > 0) std::memcpy(weights, side_region_.data + side.weights, slots * sizeof(float));
    std::fill(weights + slots, weights + all, 0.0f);
  }
}

void DispatchJob::check_routes() {
  // What came in decides where rows are written from here on: it must be what the counts said.
  const auto local = static_cast<std::size_t>(plan().local_experts());
  const auto topk = static_cast<std::size_t>(plan_->topk);
  std::vector<std::int32_t> slots(local);
  for (int source = 0; source < engine_.size(); ++source) {
    const auto s = static_cast<std::size_t>(source);
    std::fill(slots.begin(), slots.end(), 0);
    bool possible = true;
    for (auto i = static_cast<std::size_t>(plan().recv_offset[s]) * topk;
         i < static_cast<std::size_t>(plan().recv_offset[s + 1]) * topk; ++i) {
      const std::int32_t id = plan_->routes.topk_idx[i];
      if (id == -1) continue;
      possible = possible && id >= 0 && static_cast<std::size_t>(id) < local;
      if (possible) ++slots[static_cast<std::size_t>(id)];
    }
    if (!possible ||
        !std::equal(slots.begin(), slots.end(),
                    plan().expert_slots.begin() + static_cast<std::ptrdiff_t>(s * local))) {
      channel().throw_violation("dispatch: rows", source,
                                "sent routes that are not those it counted");
    }
  }
}

void DispatchJob::fan_out() {
  const auto offsets = plan().expert_offsets(options_.alignment);
  const auto slot_rows = place_slots(plan_->routes.topk_idx, offsets);
  auto* places = result_.slot_rows.as<std::int64_t>();
  std::copy(slot_rows.begin(), slot_rows.end(), places);
  std::fill(places + slot_rows.size(), places + rank_rows_ * plan_->topk, -1);
  std::copy(offsets.begin(), offsets.end(), result_.expert_offsets.as<std::int64_t>());

  const std::size_t row_bytes = row_.bytes();
  const std::size_t scale_bytes = static_cast<std::size_t>(row_.scale_columns) * sizeof(float);
  const auto from = receive_layout(rank_rows_);
  const auto to = receive_layout(out_rows_);
  const std::byte* rows = rank_region_.data + from.rows;
  const std::byte* scales = rank_region_.data + from.scales;
  std::byte* out_rows = expert_region_.data + to.rows;
  std::byte* out_scales = expert_region_.data + to.scales;
  const auto topk = static_cast<std::size_t>(plan_->topk);
  for (std::size_t i = 0; i < slot_rows.size(); ++i) {
    if (slot_rows[i] < 0) continue;
    const auto source = i / topk;
    const auto target = static_cast<std::size_t>(slot_rows[i]);
    std::memcpy(out_rows + target * row_bytes, rows + source * row_bytes, row_bytes);
    std::memcpy(out_scales + target * scale_bytes, scales + source * scale_bytes, scale_bytes);
  }
  const auto zero = [&](std::int64_t begin, std::int64_t end) {
    const auto b = static_cast<std::size_t>(begin), n = static_cast<std::size_t>(end - begin);
    std::memset(out_rows + b * row_bytes, 0, n * row_bytes);
    std::memset(out_scales + b * scale_bytes, 0, n * scale_bytes);
  };
  const auto slots = plan().slots_per_expert();
  for (std::size_t e = 0; e < slots.size(); ++e) zero(offsets[e] + slots[e], offsets[e + 1]);
  zero(offsets.back(), out_rows_);
}

}  // namespace ferry::host
