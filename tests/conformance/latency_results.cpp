#include "latency_results.hpp"

#include <vector>

#include "compare.hpp"
#include "device.hpp"
#include "reference_parts.hpp"

namespace ferry::conformance {
namespace {

/// Scales lie column by column; in ordinary memory, too.
Tensor scales_to_cpu(const Tensor& scales) {
  if (!scales || scales.view().device.kind == DeviceKind::cpu) return scales;
  const TensorView& view = scales.view();
  const Extents stored{view.shape[0], view.shape[2], view.shape[1]};
  const Tensor dense =
      to_cpu({TensorView(view.data, view.dtype, stored, view.device), scales.owner()});
  return {TensorView(dense.data(), view.dtype, view.shape, view.strides, Device{}), dense.owner()};
}

/// Everything that a dispatch brought, in ordinary memory.
LatencyReceived on_cpu(const LatencyReceived& got) {
  LatencyReceived cpu;
  cpu.x = to_cpu(got.x);
  cpu.scales = scales_to_cpu(got.scales);
  cpu.counts = to_cpu(got.counts);
  cpu.source_token = to_cpu(got.source_token);
  cpu.ranges = to_cpu(got.ranges);
  cpu.topk_idx = to_cpu(got.topk_idx);
  cpu.topk_weights = to_cpu(got.topk_weights);
  return cpu;
}

}  // namespace

LatencyResults::LatencyResults(const Case& c, const World& world, int rank)
    : c_(c),
      world_(world),
      rank_(rank),
      by_expert_(expect_latency(world, rank)),
      by_rank_(expect_rank_major(world, rank)) {}

WireFormat LatencyResults::format() const {
  return c_.wire == WireKind::as_is ? WireFormat::as_is : WireFormat::e4m3;
}

ScaleFormat LatencyResults::scale_format() const {
  return c_.wire == WireKind::scale_pow2     ? ScaleFormat::f32_pow2
         : c_.wire == WireKind::scale_packed ? ScaleFormat::ue8m0_packed
                                             : ScaleFormat::f32;
}

std::int64_t LatencyResults::blocks() const {
  return c_.results == RowOrder::rank_major ? c_.ranks : world_.local_experts(rank_);
}

std::int64_t LatencyResults::block_rows() const {
  return c_.results == RowOrder::rank_major ? c_.capacity : c_.capacity * c_.ranks;
}

std::int64_t LatencyResults::rows_in(std::int64_t block) const {
  const std::size_t rows = c_.results == RowOrder::rank_major
                               ? by_rank_.rows[index(block)].size()
                               : by_expert_.rows[index(block)].size();
  return static_cast<std::int64_t>(rows);
}

void LatencyResults::check(Rank& rank, const LatencyReceived& received) const {
  const LatencyReceived got = on_cpu(received);
  c_.results == RowOrder::rank_major ? check_rank_major(rank, got) : check_expert_major(rank, got);
}

void LatencyResults::check_expert_major(Rank& rank, const LatencyReceived& got) const {
  const std::int64_t local = world_.local_experts(rank_), rows = block_rows();
  const Dtype dtype = quantized() ? Dtype::e4m3 : c_.dtype;
  if (!same_shape(rank, "x", got.x, dtype, {local, rows, c_.hidden})) return;
  for (std::int64_t e = 0; e < local; ++e) {
    const auto& theirs = by_expert_.rows[static_cast<std::size_t>(e)];
    if (!rank.equal(got.counts.as<std::int32_t>()[e], static_cast<std::int32_t>(theirs.size()),
                    "counts")) {
      return;
    }
    for (std::size_t i = 0; i < theirs.size(); ++i) {
      const std::int64_t place = e * rows + static_cast<std::int64_t>(i);
      check_row(rank, got, e, static_cast<std::int64_t>(i), theirs[i]);
      rank.equal(got.source_token.as<std::int32_t>()[place], theirs[i].token, "source_token");
    }
  }
  same_vector(rank, "ranges", got.ranges.as<std::int64_t>(), by_expert_.ranges);
}

void LatencyResults::check_rank_major(Rank& rank, const LatencyReceived& got) const {
  const Extents shape{c_.ranks, c_.capacity, c_.topk};
  const Dtype dtype = quantized() ? Dtype::e4m3 : c_.dtype;
  if (!same_shape(rank, "x", got.x, dtype, {c_.ranks, c_.capacity, c_.hidden}) ||
      !same_shape(rank, "topk_idx", got.topk_idx, Dtype::i32, shape) ||
      (c_.weights_ahead &&
       !same_shape(rank, "topk_weights", got.topk_weights, Dtype::f32, shape))) {
    return;
  }
  rank.check(!got.ranges, "rank-major rows have no ranges");
  rank.check(c_.weights_ahead || !got.topk_weights, "weights from nowhere");
  for (int source = 0; source < c_.ranks; ++source) {
    const auto& theirs = by_rank_.rows[static_cast<std::size_t>(source)];
    const auto count = static_cast<std::int64_t>(theirs.size());
    if (!rank.equal(got.counts.as<std::int32_t>()[source], static_cast<std::int32_t>(count),
                    "counts")) {
      return;
    }
    for (std::int64_t i = 0; i < c_.capacity; ++i) {
      const std::int64_t at = source * c_.capacity + i;
      ExpectedRankMajor::Row row{0, std::vector<std::int32_t>(index(c_.topk), -1),
                                 std::vector<float>(index(c_.topk), 0.0f)};
      if (i < count) {
        row = theirs[index(i)];
        check_row(rank, got, source, i, {source, row.token, 0});
        rank.equal(got.source_token.as<std::int32_t>()[at], row.token, "source_token");
      }
      same_vector(rank, "topk_idx", got.topk_idx.as<std::int32_t>() + at * c_.topk, row.topk_idx);
      if (!c_.weights_ahead) continue;
      same_vector(rank, "topk_weights", got.topk_weights.as<float>() + at * c_.topk,
                  row.topk_weights);
    }
  }
}

/// Row `place` of block `block`: of an expert, or of a source.
void LatencyResults::check_row(Rank& rank, const LatencyReceived& got, std::int64_t block,
                               std::int64_t place, const ExpectedLatency::Row& from) const {
  const WireRow row = expect_wire_row(world_, from, format(), scale_format());
  const TensorView& x = got.x.view();
  const auto element = static_cast<std::size_t>(block * x.strides[0] + place * x.strides[1]);
  const std::byte* data = got.x.as<std::byte>() + element * size_of(x.dtype);
  if (quantized()) {
    same_values(rank, "latency dispatch: x", x.dtype, data, row.x.data(), 1, c_.hidden);
    check_scales(rank, got.scales, block, place, row);
  } else {
    same_bytes(rank, "latency dispatch: x", data, row.x.data(), 1, row.x.size());
  }
}

void LatencyResults::check_scales(Rank& rank, const Tensor& all, std::int64_t block,
                                  std::int64_t place, const WireRow& row) const {
  const TensorView& scales = all.view();
  const auto columns = static_cast<std::int64_t>(row.scales.size());
  const Dtype dtype = c_.wire == WireKind::scale_packed ? Dtype::i32 : Dtype::f32;
  if (!same_shape(rank, "scales", all, dtype, {blocks(), block_rows(), columns})) {
    return;
  }
  rank.equal(scales.strides[1], 1, "stride of scales along the rows");
  const auto* bits = static_cast<const std::uint32_t*>(scales.data);
  for (std::int64_t c = 0; c < columns; ++c) {
    rank.equal(bits[block * scales.strides[0] + place * scales.strides[1] + c * scales.strides[2]],
               row.scales[static_cast<std::size_t>(c)], "bits of a scale");
  }
}

}  // namespace ferry::conformance
