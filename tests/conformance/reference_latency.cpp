// The reference of latency mode.
#include <algorithm>
#include <cmath>
#include <cstring>
#include <limits>
#include <utility>

#include "core/number.hpp"
#include "reference_parts.hpp"

namespace ferry::conformance {

ExpectedLatency expect_latency(const World& world, int rank) {
  ExpectedLatency result;
  result.rows.resize(index(world.local_experts(rank)));
  for (const Arrival& arrival : arrivals_at(world, rank)) {
    for (int k = 0; k < world.topk; ++k) {
      const std::int64_t expert = local_id(world, rank, arrival, k);
      if (expert >= 0) result.rows[index(expert)].push_back({arrival.source, arrival.token, k});
    }
  }
  for (const auto& rows : result.rows) {
    std::int64_t first = 0;
    for (int source = 0; source < world.ranks; ++source) {
      const std::int64_t count = std::count_if(
          rows.begin(), rows.end(), [&](const auto& row) { return row.source == source; });
      result.ranges.push_back(first << 32 | count);
      first += count;
    }
  }
  return result;
}

ExpectedRankMajor expect_rank_major(const World& world, int rank) {
  ExpectedRankMajor result;
  result.rows.resize(index(world.ranks));
  for (const Arrival& arrival : arrivals_at(world, rank)) {
    ExpectedRankMajor::Row row{arrival.token, {}, {}};
    for (int k = 0; k < world.topk; ++k) {
      const std::int64_t id = local_id(world, rank, arrival, k);
      const std::vector<float>& weights = world.inputs[index(arrival.source)].weights;
      row.topk_idx.push_back(static_cast<std::int32_t>(id));
      row.topk_weights.push_back(id < 0 ? 0.0f : weights[index(arrival.token * world.topk + k)]);
    }
    result.rows[index(arrival.source)].push_back(std::move(row));
  }
  return result;
}

WireRow expect_wire_row(const World& world, const ExpectedLatency::Row& from, WireFormat format,
                        ScaleFormat scale_format) {
  const std::byte* row =
      world.inputs[index(from.source)].x.data() + index(from.token) * world.row_bytes();
  WireRow result;
  if (format == WireFormat::as_is) {
    result.x.assign(row, row + world.row_bytes());
    return result;
  }
  for (std::int64_t block = 0; block < world.hidden; block += 128) {
    const std::int64_t end = std::min(world.hidden, block + 128);
    float amax = 1e-4f;
    for (std::int64_t i = block; i < end; ++i) {
      const float magnitude = std::fabs(load(row, world.dtype, i));
      if (!std::isnan(magnitude)) amax = std::max(amax, magnitude);
    }
    amax = std::min(amax, std::numeric_limits<float>::max());  // infinity
    float scale = amax / 448.0f, inv = 448.0f / amax;
    if (scale_format != ScaleFormat::f32) {
      // The smallest power of two that is at least amax / 448, without rounding.
      double power = 0x1p-100;
      while (power * 448.0 < static_cast<double>(amax)) power *= 2.0;
      scale = static_cast<float>(power);
      inv = static_cast<float>(1.0 / power);
    }
    for (std::int64_t i = block; i < end; ++i) {
      result.x.push_back(
          static_cast<std::byte>(from_float<E4m3>(load(row, world.dtype, i) * inv).bits));
    }
    std::uint32_t bits;
    std::memcpy(&bits, &scale, 4);
    const auto count = static_cast<std::size_t>(block / 128);
    if (scale_format != ScaleFormat::ue8m0_packed) {
      result.scales.push_back(bits);
    } else {
      if (count % 4 == 0) result.scales.push_back(0);
      result.scales.back() |= (bits >> 23) << (8 * (count % 4));
    }
  }
  return result;
}

namespace {

void through_e4m3(std::vector<float>& values, std::size_t first, std::size_t end) {
  float amax = 1e-4f;
  for (std::size_t i = first; i < end; ++i) amax = std::fmax(amax, std::fabs(values[i]));
  amax = std::min(amax, std::numeric_limits<float>::max());  // infinity
  const float scale = amax / 448.0f, inv = 448.0f / amax;
  for (std::size_t i = first; i < end; ++i) {
    values[i] = to_float(from_float<E4m3>(values[i] * inv)) * scale;
  }
}

/// Code by code: of all levels the nearest.
void through_logfmt(std::vector<float>& values, std::size_t first, std::size_t end) {
  const LogfmtRange range = logfmt_block_range(values.data() + first, end - first);
  const LogfmtDecoder decoder(range);
  std::vector<float> levels;
  for (std::int32_t level = 1; level <= kLogfmtLevels; ++level) {
    levels.push_back(decoder.value(level));
  }
  for (std::size_t i = first; i < end; ++i) {
    const float magnitude = std::fabs(values[i]);
    if (!std::isfinite(values[i])) continue;
    // Half of the lowest counts as it.
    const bool zero = magnitude < 0x1p-126f || magnitude < range.lowest / 2;
    const auto nearer = [magnitude](float a, float b) {
      return std::fabs(a - magnitude) < std::fabs(b - magnitude);
    };
    const float nearest = zero ? 0.0f : *std::min_element(levels.begin(), levels.end(), nearer);
    values[i] = std::signbit(values[i]) ? -nearest : nearest;
  }
}

}  // namespace

std::vector<float> in_flight(const std::byte* row, Dtype dtype, std::int64_t hidden,
                             CombineFormat format) {
  std::vector<float> values;
  for (std::int64_t i = 0; i < hidden; ++i) values.push_back(load(row, dtype, i));
  for (std::size_t first = 0; first < values.size(); first += 128) {
    const std::size_t end = std::min(values.size(), first + 128);
    if (format == CombineFormat::e4m3) through_e4m3(values, first, end);
    if (format == CombineFormat::logfmt10) through_logfmt(values, first, end);
  }
  return values;
}

namespace {

/// One combine as the owner of a token sees it.
class TokenSums {
 public:
  TokenSums(const World& world, int rank, const LatencyRowOf& row_of, const LatencyHow& how)
      : world_(world), rank_(rank), row_of_(row_of), how_(how), row_(world.row_bytes()) {
    for (int d = 0; d < world.ranks; ++d) {
      by_expert_.push_back(expect_latency(world, d));
      by_rank_.push_back(expect_rank_major(world, d));
    }
  }

  Sum of_slots(std::int64_t t) {
    Sum sum(world_.hidden);
    for (int k = 0; k < world_.topk; ++k) {
      if (world_.id(rank_, t, k) >= 0) sum.add_weighted(weight(t, k), sent(slot_row(t, k)));
    }
    return sum;
  }

  Sum of_ranks(std::int64_t t) {
    Sum sum(world_.hidden);
    for (int d = 0; d < world_.ranks; ++d) {
      bool any = false;
      for (int k = 0; k < world_.topk; ++k) any = any || holds(d, t, k);
      if (!any) continue;
      sum.add(sent(how_.order == RowOrder::rank_major ? rank_row(d, t) : partial(d, t)));
    }
    return sum;
  }

 private:
  bool holds(int d, std::int64_t t, int k) const {
    const std::int64_t id = world_.id(rank_, t, k);
    return id >= 0 && world_.rank_of(id) == d;
  }
  float weight(std::int64_t t, int k) const {
    return world_.inputs[index(rank_)].weights[index(t * world_.topk + k)];
  }
  std::vector<float> sent(const std::byte* row) const {
    return in_flight(row, world_.dtype, world_.hidden, how_.format);
  }
  const std::byte* slot_row(std::int64_t t, int k) {
    const std::int64_t id = world_.id(rank_, t, k);
    const int d = world_.rank_of(id);
    const std::int64_t expert = id - world_.first_expert(d);
    const auto& rows = by_expert_[index(d)].rows[index(expert)];
    const auto place = std::find_if(rows.begin(), rows.end(), [&](const auto& r) {
      return r.source == rank_ && r.token == t && r.slot == k;
    });
    row_of_(d, expert, place - rows.begin(), row_.data());
    return row_.data();
  }
  const std::byte* rank_row(int d, std::int64_t t) {
    const auto& rows = by_rank_[index(d)].rows[index(rank_)];
    const auto place =
        std::find_if(rows.begin(), rows.end(), [&](const auto& r) { return r.token == t; });
    row_of_(d, rank_, place - rows.begin(), row_.data());
    return row_.data();
  }
  const std::byte* partial(int d, std::int64_t t) {
    Sum slots(world_.hidden);
    for (int k = 0; k < world_.topk; ++k) {
      if (holds(d, t, k)) slots.add_weighted(weight(t, k), slot_row(t, k), world_.dtype);
    }
    slots.round(row_.data(), world_.dtype);
    return row_.data();
  }

  const World& world_;
  int rank_;
  const LatencyRowOf& row_of_;
  LatencyHow how_;
  Bytes row_;
  std::vector<ExpectedLatency> by_expert_{};
  std::vector<ExpectedRankMajor> by_rank_{};
};

}  // namespace

Bytes expect_latency_combine(const World& world, int rank, const LatencyRowOf& row_of,
                             const LatencyHow& how) {
  TokenSums sums(world, rank, row_of, how);
  const bool by_rank = how.order == RowOrder::rank_major || how.path == CombinePath::per_rank;
  Bytes result(index(world.inputs[index(rank)].tokens) * world.row_bytes());
  for (std::int64_t t = 0; t < world.inputs[index(rank)].tokens; ++t) {
    const Sum sum = by_rank ? sums.of_ranks(t) : sums.of_slots(t);
    sum.round(result.data() + index(t) * world.row_bytes(), world.dtype);
  }
  return result;
}

}  // namespace ferry::conformance
