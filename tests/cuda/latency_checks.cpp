// What a LatencyRun must have received and summed, by the definition.
#include <algorithm>
#include <cmath>
#include <cstring>
#include <string>
#include <vector>

#include "core/number.hpp"
#include "latency_case.hpp"

namespace ferry::cuda::test {

namespace {

[[noreturn]] void differ(const std::string& what, const LatencyCase& c, std::int64_t at,
                         std::uint64_t got, std::uint64_t expected) {
  stop(what + " at " + std::to_string(at) + ": got " + std::to_string(got) + ", expected " +
       std::to_string(expected) + "; " + describe(c));
}

std::uint32_t bits_at(const std::byte* data) {
  std::uint32_t word = 0;
  std::memcpy(&word, data, sizeof(word));
  return word;
}

/// One token as it crosses: the row, and its scales as they are given to the caller.
struct WireRow {
  std::vector<std::byte> x;
  std::vector<std::uint32_t> scales;
};

WireRow wire_row(const LatencyCase& c, const std::byte* row, bool zero) {
  const auto hidden = static_cast<std::size_t>(c.hidden);
  WireRow wire;
  if (c.format == LatencyFormat::as_is) {
    wire.x.assign(row, row + hidden * size_of(c.dtype));
  } else {
    std::vector<E4m3> codes(hidden);
    std::vector<float> scales(scale_count(hidden));
    with_type(c.dtype, [&](auto zero_value) {
      using T = decltype(zero_value);
      std::vector<T> values(hidden);
      std::memcpy(values.data(), row, hidden * sizeof(T));
      quantize_row(values.data(), hidden, codes.data(), scales.data(),
                   c.format != LatencyFormat::e4m3);
      return 0;
    });
    wire.x.resize(hidden);
    std::memcpy(wire.x.data(), codes.data(), hidden);
    if (c.format == LatencyFormat::e4m3_packed) {
      wire.scales.resize(ue8m0_word_count(scales.size()));
      pack_ue8m0(scales.data(), scales.size(), wire.scales.data());
    } else {
      wire.scales.resize(scales.size());
      std::memcpy(wire.scales.data(), scales.data(), scales.size() * 4);
    }
  }
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
    std::vector<ExpertRow> mine;
    for (const ExpertRow& row : expected[e]) {
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
    const auto scales = group_.download<std::byte>(rank, h.scales + base * columns * 4,
                                                   columns * static_cast<std::size_t>(rows) * 4);
    for (std::size_t i = 0; i < mine.size(); ++i) {
      const LatencyInput& input = world.inputs[index(mine[i].source)];
      const auto row = static_cast<std::size_t>(mine[i].token) * world.row_bytes();
      const WireRow wire = wire_row(c_, input.x.data() + row, mine[i].source == absent.no_rows);
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
        const std::uint32_t got =
            bits_at(scales.data() + (s * static_cast<std::size_t>(rows) + i) * 4);
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
  const HandleMemory& h = members_[index(rank)].handles[handle];
  const LatencyInput& input = world.inputs[index(rank)];
  const auto hidden = static_cast<std::size_t>(c_.hidden);
  const auto got = group_.download<std::byte>(
      rank, h.combined, static_cast<std::size_t>(input.tokens) * world.row_bytes());
  // Where the rows of this rank's slots lie.
  std::vector<std::int64_t> places(input.ids.size(), -1);
  for (int d = 0; d < c_.ranks; ++d) {
    for (const auto& rows : world.rows_of(d)) {
      for (std::size_t i = 0; i < rows.size(); ++i) {
        if (rows[i].source != rank) continue;
        places[static_cast<std::size_t>(rows[i].token * c_.call_topk + rows[i].slot)] =
            static_cast<std::int64_t>(i);
      }
    }
  }
  with_type(c_.dtype, [&](auto zero) {
    using T = decltype(zero);
    const auto add_slots = [&](std::size_t token, int from, std::vector<float>& acc) {
      bool any = false;
      for (int k = 0; k < c_.call_topk; ++k) {
        const std::size_t slot =
            token * static_cast<std::size_t>(c_.call_topk) + static_cast<std::size_t>(k);
        const std::int64_t id = input.ids[slot];
        if (id < 0) continue;
        const int d = placement_.rank_of(id);
        if ((from >= 0 && d != from) || d == absent.no_rows || d == absent.no_header) continue;
        any = true;
        const auto bytes = world.result_row(d, id - placement_.first_expert(d), places[slot]);
        for (std::size_t c = 0; c < hidden; ++c) {
          T value;
          std::memcpy(&value, bytes.data() + c * sizeof(T), sizeof(T));
          acc[c] = std::fma(input.weights[slot], to_float(value), acc[c]);
        }
      }
      return any;
    };
    for (std::size_t t = 0; t < static_cast<std::size_t>(input.tokens); ++t) {
      std::vector<float> acc(hidden, 0.0f);
      if (path == CombinePath::per_slot) {
        add_slots(t, -1, acc);
      } else {
        for (int d = 0; d < c_.ranks; ++d) {
          std::vector<float> partial(hidden, 0.0f);
          if (!add_slots(t, d, partial)) continue;
          for (std::size_t c = 0; c < hidden; ++c) {
            acc[c] = acc[c] + to_float(from_float<T>(partial[c]));
          }
        }
      }
      for (std::size_t c = 0; c < hidden; ++c) {
        const T value = from_float<T>(acc[c]);
        const std::byte* at = got.data() + t * world.row_bytes() + c * sizeof(T);
        if (std::memcmp(at, &value, sizeof(T)) != 0) {
          T seen;
          std::memcpy(&seen, at, sizeof(T));
          stop("combined token " + std::to_string(t) + " channel " + std::to_string(c) + ": got " +
               std::to_string(to_float(seen)) + ", expected " + std::to_string(to_float(value)) +
               " on rank " + std::to_string(rank) + "; " + describe(c_));
        }
      }
    }
    return 0;
  });
}

}  // namespace ferry::cuda::test
