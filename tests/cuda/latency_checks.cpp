// What a LatencyRun must have received and summed, by the definition.
#include <algorithm>
#include <cstring>
#include <string>
#include <vector>

#include "latency_case.hpp"

namespace ferry::cuda::test {

namespace {

[[noreturn]] void differ(const std::string& what, const LatencyCase& c, std::int64_t at,
                         std::uint64_t got, std::uint64_t expected) {
  stop(what + " at " + std::to_string(at) + ": got " + std::to_string(got) + ", expected " +
       std::to_string(expected) + "; " + describe(c));
}

/// One token as it crosses: the row, and its scales as they are given to the caller.
conformance::WireRow wire_row(const LatencyWorld& world,
                              const conformance::ExpectedLatency::Row& row, bool zero) {
  const bool packed = world.c.format == LatencyFormat::e4m3_packed;
  conformance::WireRow wire = conformance::expect_wire_row(
      world, row, world.c.format == LatencyFormat::as_is ? WireFormat::as_is : WireFormat::e4m3,
      packed                                       ? ScaleFormat::ue8m0_packed
      : world.c.format == LatencyFormat::e4m3_pow2 ? ScaleFormat::f32_pow2
                                                   : ScaleFormat::f32);
  if (zero) {
    std::fill(wire.x.begin(), wire.x.end(), std::byte{0});
    std::fill(wire.scales.begin(), wire.scales.end(), 0u);
  }
  return wire;
}

}  // namespace

void LatencyRun::check_dispatch(const LatencyWorld& world, int rank, int handle,
                                const Absent& absent) {
  const HandleMemory& h = members_[index(rank)].handles[handle];
  const auto expected = world.rows_of(rank);
  const std::int64_t experts = local_experts(rank), rows = output_rows();
  const auto slots = static_cast<std::size_t>(experts * rows);
  const auto counts = group_.download<std::int32_t>(rank, h.counts, expected.size());
  const auto tokens = group_.download<std::int32_t>(rank, h.source_token, slots);
  const auto ranges = group_.download<std::int64_t>(
      rank, h.ranges, expected.size() * static_cast<std::size_t>(c_.ranks));
  const std::size_t row_bytes = wire_row_bytes();
  const auto columns = static_cast<std::size_t>(scale_columns());
  for (std::size_t e = 0; e < expected.size(); ++e) {
    std::vector<std::int64_t> from(static_cast<std::size_t>(c_.ranks), 0);
    std::vector<conformance::ExpectedLatency::Row> mine;
    for (const auto& row : expected[e]) {
      if (row.source == absent.no_header) continue;
      mine.push_back(row);
      ++from[index(row.source)];
    }
    const auto got_count = static_cast<std::size_t>(counts[e]);
    if (got_count != mine.size()) {
      differ("counts", c_, static_cast<std::int64_t>(e), got_count, mine.size());
    }
    std::int64_t first = 0;
    for (int s = 0; s < c_.ranks; ++s) {
      const std::size_t at = e * static_cast<std::size_t>(c_.ranks) + index(s);
      const std::int64_t range = first << 32 | from[index(s)];
      if (ranges[at] != range) {
        differ("ranges", c_, static_cast<std::int64_t>(at), static_cast<std::uint64_t>(ranges[at]),
               static_cast<std::uint64_t>(range));
      }
      first += from[index(s)];
    }
    if (mine.empty()) continue;
    const std::size_t base = e * static_cast<std::size_t>(rows);
    const auto x =
        group_.download<std::byte>(rank, h.out + base * row_bytes, mine.size() * row_bytes);
    const auto scales = group_.download<std::uint32_t>(rank, h.scales + base * columns * 4,
                                                       columns * static_cast<std::size_t>(rows));
    for (std::size_t i = 0; i < mine.size(); ++i) {
      const auto wire = wire_row(world, mine[i], mine[i].source == absent.no_rows);
      if (std::memcmp(x.data() + i * row_bytes, wire.x.data(), row_bytes) != 0) {
        std::size_t b = 0;
        while (x[i * row_bytes + b] == wire.x[b]) ++b;
        differ("x, expert " + std::to_string(e) + " row " + std::to_string(i) + " source " +
                   std::to_string(mine[i].source) + " token " + std::to_string(mine[i].token) +
                   ", byte",
               c_, static_cast<std::int64_t>(b), static_cast<std::uint64_t>(x[i * row_bytes + b]),
               static_cast<std::uint64_t>(wire.x[b]));
      }
      for (std::size_t s = 0; s < columns; ++s) {
        const std::uint32_t got = scales[s * static_cast<std::size_t>(rows) + i];
        if (got != wire.scales[s]) {
          differ("scale " + std::to_string(s) + " of row", c_, static_cast<std::int64_t>(i), got,
                 wire.scales[s]);
        }
      }
      if (tokens[base + i] != mine[i].token) {
        differ("source_token", c_, static_cast<std::int64_t>(base + i),
               static_cast<std::uint64_t>(tokens[base + i]),
               static_cast<std::uint64_t>(mine[i].token));
      }
    }
  }
}

void LatencyRun::check_combine(const LatencyWorld& world, int rank, int handle, CombinePath path,
                               const Absent& absent) {
  // What is missing of a rank counts as zero.
  conformance::World there = world;
  for (std::int64_t& id : there.inputs[index(rank)].topk_idx) {
    const int owner = id < 0 ? -1 : world.rank_of(id);
    if (owner >= 0 && (owner == absent.no_rows || owner == absent.no_header)) id = -1;
  }
  const auto row = [&](int d, std::int64_t expert, std::int64_t place, std::byte* out) {
    const auto bytes = world.result_row(d, expert, place);
    std::copy(bytes.begin(), bytes.end(), out);
  };
  const auto how =
      path == CombinePath::per_slot ? ferry::CombinePath::per_slot : ferry::CombinePath::per_rank;
  const auto expected =
      conformance::expect_latency_combine(there, rank, row, {RowOrder::expert_major, how});
  const std::byte* out = members_[index(rank)].handles[handle].combined;
  const auto got = group_.download<std::byte>(rank, out, expected.size());
  for (std::size_t i = 0; i < got.size(); i += size_of(c_.dtype)) {
    if (std::memcmp(&got[i], &expected[i], size_of(c_.dtype)) == 0) continue;
    const auto element = static_cast<std::int64_t>(i / size_of(c_.dtype));
    stop("combined token " + std::to_string(element / c_.hidden) + " channel " +
         std::to_string(element % c_.hidden) + ": got " +
         std::to_string(conformance::load(got.data(), c_.dtype, element)) + ", expected " +
         std::to_string(conformance::load(expected.data(), c_.dtype, element)) + " on rank " +
         std::to_string(rank) + "; " + describe(c_));
  }
}

}  // namespace ferry::cuda::test
