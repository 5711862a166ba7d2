// The naive reference: what every rank must get, written from the definitions in
// include/ferry/group.hpp, include/ferry/latency.hpp and docs/design.md alone. It shares nothing
// with the engine but the number formats, which have an oracle of their own.
#pragma once
#include <cstddef>
#include <cstdint>
#include <functional>
#include <vector>

#include "ferry/dtype.hpp"
#include "ferry/group.hpp"
#include "ferry/latency.hpp"

namespace ferry::conformance {

using Bytes = std::vector<std::byte>;

/// What one rank brings.
struct RankInput {
  std::int64_t tokens = 0;
  std::vector<std::int64_t> topk_idx{};  ///< [T, K]
  Bytes x{};                             ///< [T, hidden]
  std::vector<float> scales{};           ///< [T, C]
  std::vector<float> weights{};          ///< [T, K]
};

/// What all ranks bring.
struct World {
  int ranks = 1;
  std::int64_t experts = 1;
  int topk = 1;
  std::int64_t hidden = 0;
  Dtype dtype = Dtype::f32;
  std::int64_t scale_columns = 0;
  std::vector<RankInput> inputs{};

  std::size_t row_bytes() const { return static_cast<std::size_t>(hidden) * size_of(dtype); }
  std::int64_t local_experts(int rank) const;
  std::int64_t first_expert(int rank) const;
  int rank_of(std::int64_t expert) const;
  std::int64_t id(int rank, std::int64_t token, int slot) const {
    const RankInput& input = inputs[static_cast<std::size_t>(rank)];
    return input.topk_idx[static_cast<std::size_t>(token * topk + slot)];
  }
};

/// A row that arrives: rank-major order is the order of these.
struct Arrival {
  int source = 0;
  std::int64_t token = 0;
};

/// Everybody that a rank receives from, in the order of the definition.
std::vector<Arrival> arrivals_at(const World& world, int rank);

struct ExpectedDispatch {
  std::vector<Arrival> arrivals{};
  std::vector<std::int64_t> recv_rows_per_rank{};
  std::vector<std::int64_t> send_rows_per_rank{};
  std::vector<std::int32_t> rank_rows{};  ///< [ranks, ranks]
  std::vector<std::int64_t> slots_per_expert{};
  std::int64_t rows = 0;  ///< of x, in the order asked for
  Bytes x{};
  std::vector<float> scales{};
  std::vector<std::int64_t> topk_idx{};
  std::vector<float> topk_weights{};
  std::vector<std::int32_t> source_token{};
  std::vector<std::int64_t> slot_rows{};       ///< also for rank-major: of the expert-major order
  std::vector<std::int64_t> expert_offsets{};  ///< likewise
};

ExpectedDispatch expect_dispatch(const World& world, int rank, RowOrder order,
                                 std::int64_t alignment);

/// The world whose tokens are what those of `world` become when they are quantised: e4m3 with
/// scales.
World quantized(const World& world, ScaleFormat scale_format);

/// Writes row `row` of what rank `rank` gives to combine.
using RowOf = std::function<void(int rank, std::int64_t row, std::byte* out)>;
/// The weight that rank `rank` gives to combine for slot `slot` of its received row `row`.
using WeightOf = std::function<float(int rank, std::int64_t row, int slot)>;

struct CombineInput {
  RowOrder order = RowOrder::rank_major;
  std::int64_t alignment = 1;
  Dtype dtype = Dtype::f32;
  std::int64_t hidden = 0;
  RowOf row{};
  WeightOf weight{};  ///< empty: no weights
  bool apply_weights = false;
  const Bytes* bias0 = nullptr;
  const Bytes* bias1 = nullptr;
  int domain_size = 0;  ///< > 0: hierarchical over domains of so many ranks
};

struct ExpectedCombine {
  Bytes x{};                          ///< [T, hidden]
  std::vector<float> topk_weights{};  ///< [T, K]
};

ExpectedCombine expect_combine(const World& world, int rank, const CombineInput& input);

struct ExpectedLatency {
  struct Row {
    int source = 0;
    std::int64_t token = 0;
    int slot = 0;
  };
  std::vector<std::vector<Row>> rows{};  ///< of every local expert
  std::vector<std::int64_t> ranges{};    ///< [local experts, ranks]
};

ExpectedLatency expect_latency(const World& world, int rank);

/// Rows without fan-out: one for each token that comes.
struct ExpectedRankMajor {
  struct Row {
    std::int64_t token = 0;
    std::vector<std::int32_t> topk_idx{};  ///< [K] local, −1 elsewhere
    std::vector<float> topk_weights{};     ///< [K]
  };
  std::vector<std::vector<Row>> rows{};  ///< of every source
};

ExpectedRankMajor expect_rank_major(const World& world, int rank);

/// A row as latency mode brings it: its bytes and its scales, f32 bits or packed words.
struct WireRow {
  Bytes x{};
  std::vector<std::uint32_t> scales{};
};
WireRow expect_wire_row(const World& world, const ExpectedLatency::Row& row, WireFormat format,
                        ScaleFormat scale_format);

/// How a latency combine goes.
struct LatencyHow {
  RowOrder order = RowOrder::expert_major;
  CombinePath path = CombinePath::per_slot;
  CombineFormat format = CombineFormat::as_is;
};

/// Writes the row that rank `rank` gives to combine for place `place` of its expert, or rank-major
/// of the source, `block`.
using LatencyRowOf =
    std::function<void(int rank, std::int64_t block, std::int64_t place, std::byte* out)>;
Bytes expect_latency_combine(const World& world, int rank, const LatencyRowOf& row,
                             const LatencyHow& how = {});
/// What the owner takes for a row that crossed in this format.
std::vector<float> in_flight(const std::byte* row, Dtype dtype, std::int64_t hidden,
                             CombineFormat format);

/// The value of element `i`, and its rounding back. f32, bf16, f16.
float load(const std::byte* row, Dtype dtype, std::int64_t i);
void store(std::byte* row, Dtype dtype, std::int64_t i, float value);

}  // namespace ferry::conformance
