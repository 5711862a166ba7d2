#include "host/domains/forwarder.hpp"

#include <algorithm>
#include <cstring>

#include "core/packed_routes.hpp"
#include "host/kernels/kernels.hpp"

namespace ferry::host {
namespace {

constexpr const char* kRowsToSpread = "dispatch: rows to be spread";

}  // namespace

Forwarder::Forwarder(HostEngine& engine, PlanState& plan, const StagingShape& shape,
                     const std::byte* staging, bool stream, std::int64_t chunk)
    : engine_(engine),
      plan_(plan),
      shape_(shape),
      layout_(make_staging_layout(shape)),
      staging_(staging),
      stream_(stream),
      chunk_(chunk),
      next_(plan.crossing.feeders.size()) {
  const Domains& domains = engine_.topology();
  for (const int member : domains.members(domains.of(engine_.rank()))) {
    targets_.push_back(target_of(member));
  }
  if (shape_.routes) plan_.forwards.assign(next_.size(), Forward{});
}

Forwarder::Target Forwarder::target_of(int rank) {
  const StepMessage theirs = channel().head(rank);
  const auto rows = make_receive_layout(theirs.rows, shape_.row_bytes, shape_.scale_columns);
  const auto side = make_side_layout(theirs.rows, plan_.topk, shape_.tokens, shape_.weights);
  std::byte* region = channel().pointer(rank, {theirs.segment, theirs.offset});
  std::byte* beside = channel().pointer(rank, {theirs.side_segment, theirs.side_offset});
  return {rank,
          region + rows.rows,
          region + rows.scales,
          beside + side.source_token,
          beside + side.topk_idx,
          beside + side.weights};
}

void Forwarder::copy(std::byte* to, const std::byte* from, std::size_t bytes) {
  if (stream_) {
    kernels().copy_stream(to, from, bytes);
  } else {
    std::memcpy(to, from, bytes);
  }
}

void Forwarder::poll() {
  for (std::size_t feeder = 0; feeder < next_.size(); ++feeder) {
    while (next_[feeder] < rows_of(feeder) &&
           channel().take_chunk(plan_.crossing.feeders[feeder])) {
      spread(feeder);
    }
  }
}

void Forwarder::finish() {
  for (std::size_t feeder = 0; feeder < next_.size(); ++feeder) {
    const int source = plan_.crossing.feeders[feeder];
    while (next_[feeder] < rows_of(feeder)) {
      channel().await_chunk(kRowsToSpread, source);
      spread(feeder);
      poll();  // others may have come meanwhile
    }
    if (!complete(plan_.forwards[feeder], plan_.crossing, feeder)) {
      channel().throw_violation(kRowsToSpread, source, "sent routes that are not those it counted");
    }
  }
  if (stream_) kernels().stream_fence();  // before any flag is published
  plan_.forwards_known = true;
}

void Forwarder::spread(std::size_t feeder) {
  const std::int64_t first = next_[feeder];
  const std::int64_t end = std::min(rows_of(feeder), first + chunk_);
  if (shape_.routes) learn(feeder, first, end);
  for (std::int64_t row = first; row < end; ++row) spread_row(feeder, row);
  next_[feeder] = end;
}

void Forwarder::learn(std::size_t feeder, std::int64_t first, std::int64_t end) {
  const auto topk = index(plan_.topk);
  const std::size_t at = index(plan_.crossing.feeder_row[feeder] + first) * shape_.route_bytes;
  // A copy: what is looked at is what is used.
  std::vector<std::int32_t> ids(index(end - first) * topk);
  PackedRoutes(engine_.placement().experts, plan_.topk)
      .unpack(staging_ + layout_.topk_idx + at, index(end - first), ids.data());
  const int source = plan_.crossing.feeders[feeder];
  if (!append_rows(plan_.forwards[feeder], exchange(), plan_.crossing, feeder, ids)) {
    channel().throw_violation(kRowsToSpread, source, "sent routes that are not those it counted");
  }
}

void Forwarder::spread_row(std::size_t feeder, std::int64_t row) {
  const Forward& forward = plan_.forwards[feeder];
  const auto first = plan_.crossing.first_rows(feeder);
  const std::size_t from = index(plan_.crossing.feeder_row[feeder] + row);
  const std::size_t scale_bytes = index(shape_.scale_columns) * sizeof(float);
  const std::int32_t* ids = forward.topk_idx.data() + index(row) * index(plan_.topk);
  for (std::int64_t l = forward.destination_offset[index(row)];
       l < forward.destination_offset[index(row + 1)]; ++l) {
    const Destination destination = forward.destinations[index(l)];
    const std::size_t member = index(engine_.topology().index(destination.rank));
    const Target& target = targets_[member];
    const std::size_t to = index(first[member] + destination.row);
    copy(target.rows + to * shape_.row_bytes, staging_ + layout_.rows_at + from * shape_.row_bytes,
         shape_.row_bytes);
    std::memcpy(target.scales + to * scale_bytes, staging_ + layout_.scales + from * scale_bytes,
                scale_bytes);
    if (shape_.tokens) {
      std::memcpy(target.source_token + to * sizeof(std::int32_t),
                  staging_ + layout_.source_token + from * sizeof(std::int32_t),
                  sizeof(std::int32_t));
    }
    if (shape_.tokens || shape_.weights) spread_slots(target, ids, to, from);
  }
}

/// Routes become local ids, weights 0 where the slot is not of the target.
void Forwarder::spread_slots(const Target& target, const std::int32_t* ids, std::size_t to,
                             std::size_t staged) {
  const Placement& placement = exchange().placement;
  const auto first = static_cast<std::int32_t>(placement.first_expert(target.rank));
  const auto end = static_cast<std::int32_t>(placement.first_expert(target.rank + 1));
  const auto topk = index(plan_.topk);
  const auto* from = reinterpret_cast<const float*>(staging_ + layout_.weights) + staged * topk;
  auto* routes = reinterpret_cast<std::int32_t*>(target.topk_idx) + to * topk;
  auto* weights = reinterpret_cast<float*>(target.weights) + to * topk;
  for (std::size_t k = 0; k < topk; ++k) {
    const bool local = ids[k] >= first && ids[k] < end;
    if (shape_.tokens) routes[k] = local ? ids[k] - first : -1;
    if (shape_.weights) weights[k] = local ? from[k] : 0.0f;
  }
}

}  // namespace ferry::host
