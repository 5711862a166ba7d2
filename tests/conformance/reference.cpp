#include "reference.hpp"

#include <algorithm>
#include <bit>
#include <cmath>
#include <cstring>

#include "core/number.hpp"
#include "reference_parts.hpp"

namespace ferry::conformance {
namespace {

struct ExpertMajor {
  std::vector<std::int64_t> slots;      // of every expert
  std::vector<std::int64_t> offsets;    // blocks and the end
  std::vector<std::int64_t> slot_rows;  // [n, K]
};

ExpertMajor place_experts(const World& world, int rank, const std::vector<Arrival>& arrivals,
                          std::int64_t alignment) {
  ExpertMajor result;
  const std::int64_t local = world.local_experts(rank);
  result.slot_rows.assign(arrivals.size() * index(world.topk), -1);
  std::vector<std::vector<std::size_t>> slots_of(index(local));  // in the order of rows and slots
  for (std::size_t slot = 0; slot < result.slot_rows.size(); ++slot) {
    const std::size_t row = slot / index(world.topk), k = slot % index(world.topk);
    const std::int64_t expert = local_id(world, rank, arrivals[row], static_cast<int>(k));
    if (expert >= 0) slots_of[index(expert)].push_back(slot);
  }
  std::int64_t next = 0;
  for (const auto& slots : slots_of) {
    result.offsets.push_back(next);
    result.slots.push_back(static_cast<std::int64_t>(slots.size()));
    for (const std::size_t slot : slots) result.slot_rows[slot] = next++;
    while (next % alignment != 0) ++next;
  }
  result.offsets.push_back(next);
  return result;
}

}  // namespace

float load(const std::byte* row, Dtype dtype, std::int64_t i) {
  if (dtype == Dtype::f32) {
    float value;
    std::memcpy(&value, row + 4 * i, 4);
    return value;
  }
  std::uint16_t bits;
  std::memcpy(&bits, row + 2 * i, 2);
  return dtype == Dtype::bf16 ? to_float(Bf16{bits}) : to_float(Fp16{bits});
}

void store(std::byte* row, Dtype dtype, std::int64_t i, float value) {
  if (dtype == Dtype::f32) {
    std::memcpy(row + 4 * i, &value, 4);
    return;
  }
  const std::uint16_t bits =
      dtype == Dtype::bf16 ? from_float<Bf16>(value).bits : from_float<Fp16>(value).bits;
  std::memcpy(row + 2 * i, &bits, 2);
}

std::int64_t World::local_experts(int rank) const {
  return experts / ranks + (rank < experts % ranks ? 1 : 0);
}

std::int64_t World::first_expert(int rank) const {
  std::int64_t first = 0;
  for (int r = 0; r < rank; ++r) first += local_experts(r);
  return first;
}

int World::rank_of(std::int64_t expert) const {
  for (int rank = 0; rank < ranks; ++rank) {
    if (expert < local_experts(rank)) return rank;
    expert -= local_experts(rank);
  }
  return -1;
}

std::vector<Arrival> arrivals_at(const World& world, int rank) {
  std::vector<Arrival> rows;
  for (int source = 0; source < world.ranks; ++source) {
    for (std::int64_t t = 0; t < world.inputs[index(source)].tokens; ++t) {
      bool goes = false;
      for (int k = 0; k < world.topk; ++k) {
        const std::int64_t id = world.id(source, t, k);
        goes = goes || (id >= 0 && world.rank_of(id) == rank);
      }
      if (goes) rows.push_back({source, t});
    }
  }
  return rows;
}

ExpectedDispatch expect_dispatch(const World& world, int rank, RowOrder order,
                                 std::int64_t alignment) {
  ExpectedDispatch result;
  result.arrivals = arrivals_at(world, rank);
  const std::size_t n = result.arrivals.size();
  for (int peer = 0; peer < world.ranks; ++peer) {
    result.recv_rows_per_rank.push_back(
        std::count_if(result.arrivals.begin(), result.arrivals.end(),
                      [&](const Arrival& a) { return a.source == peer; }));
    const auto theirs = arrivals_at(world, peer);
    result.send_rows_per_rank.push_back(std::count_if(
        theirs.begin(), theirs.end(), [&](const Arrival& a) { return a.source == rank; }));
    result.rank_rows.resize(index(world.ranks) * index(world.ranks));
    for (const Arrival& a : theirs) {
      ++result.rank_rows[index(a.source) * index(world.ranks) + index(peer)];
    }
  }
  const ExpertMajor experts = place_experts(world, rank, result.arrivals, alignment);
  result.slots_per_expert = experts.slots;
  result.slot_rows = experts.slot_rows;
  result.expert_offsets = experts.offsets;
  const bool by_expert = order == RowOrder::expert_major;
  result.rows = by_expert ? experts.offsets.back() : static_cast<std::int64_t>(n);
  const std::size_t row_bytes = world.row_bytes(), columns = index(world.scale_columns);
  result.x.assign(index(result.rows) * row_bytes, std::byte{0});
  result.scales.assign(index(result.rows) * columns, 0.0f);
  for (std::size_t i = 0; i < n; ++i) {
    const Arrival& arrival = result.arrivals[i];
    const RankInput& from = world.inputs[index(arrival.source)];
    result.source_token.push_back(static_cast<std::int32_t>(arrival.token));
    const auto copy_to = [&](std::int64_t row) {
      std::copy_n(from.x.begin() + static_cast<std::ptrdiff_t>(index(arrival.token) * row_bytes),
                  row_bytes,
                  result.x.begin() + static_cast<std::ptrdiff_t>(index(row) * row_bytes));
      std::copy_n(from.scales.begin() + static_cast<std::ptrdiff_t>(index(arrival.token) * columns),
                  columns,
                  result.scales.begin() + static_cast<std::ptrdiff_t>(index(row) * columns));
    };
    if (!by_expert) copy_to(static_cast<std::int64_t>(i));
    for (int k = 0; k < world.topk; ++k) {
      const std::int64_t id = local_id(world, rank, arrival, k);
      result.topk_idx.push_back(id);
      result.topk_weights.push_back(id < 0 || from.weights.empty()
                                        ? 0.0f
                                        : from.weights[index(arrival.token * world.topk + k)]);
      if (by_expert && id >= 0) copy_to(experts.slot_rows[i * index(world.topk) + index(k)]);
    }
  }
  return result;
}

ExpectedCombine expect_combine(const World& world, int rank, const CombineInput& input) {
  ExpectedCombine result;
  const std::int64_t tokens = world.inputs[index(rank)].tokens;
  const std::size_t row_bytes = index(input.hidden) * size_of(input.dtype);
  std::vector<std::vector<Arrival>> arrivals;
  std::vector<ExpertMajor> experts;
  for (int d = 0; d < world.ranks; ++d) {
    arrivals.push_back(arrivals_at(world, d));
    if (input.order == RowOrder::rank_major) continue;
    experts.push_back(place_experts(world, d, arrivals.back(), input.alignment));
  }
  Bytes row(row_bytes), partial(row_bytes);
  result.x.resize(index(tokens) * row_bytes);
  if (input.weight) result.topk_weights.assign(index(tokens * world.topk), 0.0f);
  for (std::int64_t t = 0; t < tokens; ++t) {
    Sum sum(input.hidden), inside(input.hidden);
    std::vector<float> inside_weights(index(world.topk), 0.0f);
    int rows_inside = 0;
    // Hierarchical: what a domain sums is rounded, and is one number from there on.
    const auto close_domain = [&] {
      if (rows_inside == 0) return;
      inside.round(partial.data(), input.dtype);
      sum.add(partial.data(), input.dtype);
      for (int k = 0; input.weight && k < world.topk; ++k) {
        result.topk_weights[index(t * world.topk + k)] += inside_weights[index(k)];
      }
      inside = Sum(input.hidden);
      std::fill(inside_weights.begin(), inside_weights.end(), 0.0f);
      rows_inside = 0;
    };
    for (int d = 0; d < world.ranks; ++d) {
      if (input.domain_size > 0 && d % input.domain_size == 0) close_domain();
      const auto& theirs = arrivals[index(d)];
      const auto found = std::find_if(theirs.begin(), theirs.end(), [&](const Arrival& a) {
        return a.source == rank && a.token == t;
      });
      if (found == theirs.end()) continue;
      const std::int64_t i = found - theirs.begin();
      if (input.order == RowOrder::rank_major) {
        input.row(d, i, partial.data());
      } else {
        Sum slots(input.hidden);
        for (int k = 0; k < world.topk; ++k) {
          const std::int64_t place = experts[index(d)].slot_rows[index(i * world.topk + k)];
          if (place < 0) continue;
          input.row(d, place, row.data());
          if (input.apply_weights) {
            slots.add_weighted(input.weight(d, i, k), row.data(), input.dtype);
          } else {
            slots.add(row.data(), input.dtype);
          }
        }
        slots.round(partial.data(), input.dtype);
      }
      (input.domain_size > 0 ? inside : sum).add(partial.data(), input.dtype);
      rows_inside += input.domain_size > 0 ? 1 : 0;
      for (int k = 0; input.weight && k < world.topk; ++k) {
        float& weight = input.domain_size > 0 ? inside_weights[index(k)]
                                              : result.topk_weights[index(t * world.topk + k)];
        weight += input.weight(d, i, k);
      }
    }
    close_domain();
    for (const Bytes* bias : {input.bias0, input.bias1}) {
      if (bias != nullptr) sum.add(bias->data() + index(t) * row_bytes, input.dtype);
    }
    sum.round(result.x.data() + index(t) * row_bytes, input.dtype);
  }
  return result;
}

World quantized(const World& world, ScaleFormat scale_format) {
  World result = world;
  result.dtype = Dtype::e4m3;
  result.scale_columns = (world.hidden + 127) / 128;
  for (int rank = 0; rank < world.ranks; ++rank) {
    RankInput& input = result.inputs[index(rank)];
    input.x.clear();
    input.scales.clear();
    for (std::int64_t t = 0; t < input.tokens; ++t) {
      const WireRow row = expect_wire_row(world, {rank, t, 0}, WireFormat::e4m3, scale_format);
      input.x.insert(input.x.end(), row.x.begin(), row.x.end());
      for (const std::uint32_t bits : row.scales) {
        input.scales.push_back(std::bit_cast<float>(bits));
      }
    }
  }
  return result;
}

}  // namespace ferry::conformance
