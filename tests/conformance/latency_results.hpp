// What one latency dispatch must bring to one rank, and whether it did.
#pragma once
#include <cstdint>

#include "case.hpp"
#include "ferry/latency.hpp"
#include "fleet.hpp"
#include "reference.hpp"

namespace ferry::conformance {

class LatencyResults {
 public:
  /// Case and world must outlive it.
  LatencyResults(const Case& c, const World& world, int rank);

  WireFormat format() const;
  ScaleFormat scale_format() const;
  /// x is [blocks, block rows, hidden]: a block is an expert, or rank-major a source.
  std::int64_t blocks() const;
  std::int64_t block_rows() const;
  std::int64_t rows_in(std::int64_t block) const;
  /// Reports what differs.
  void check(Rank& rank, const LatencyReceived& received) const;

 private:
  bool quantized() const { return c_.wire != WireKind::as_is; }
  void check_expert_major(Rank& rank, const LatencyReceived& got) const;
  void check_rank_major(Rank& rank, const LatencyReceived& got) const;
  void check_row(Rank& rank, const LatencyReceived& got, std::int64_t block, std::int64_t place,
                 const ExpectedLatency::Row& from) const;
  void check_scales(Rank& rank, const Tensor& all, std::int64_t block, std::int64_t place,
                    const WireRow& row) const;

  const Case& c_;
  const World& world_;
  int rank_;
  ExpectedLatency by_expert_;
  ExpectedRankMajor by_rank_;
};

}  // namespace ferry::conformance
