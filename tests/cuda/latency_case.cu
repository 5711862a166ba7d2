#include "latency_case.hpp"

#include <algorithm>
#include <cmath>
#include <cstring>

#include "core/number.hpp"

namespace ferry::cuda::test {

namespace {

constexpr int kPoison = 0xCB;

/// Calls `body(T{})` with the dtype's storage type.
template <class Body>
auto with_type(Dtype dtype, const Body& body) {
  if (dtype == Dtype::f32) return body(float{});
  if (dtype == Dtype::f16) return body(Fp16{});
  return body(Bf16{});
}

/// A value of about ±`scale`, or now and then something special.
float number_of(Random& random, float scale) {
  const std::int64_t kind = random.below(400);
  if (kind == 0) return 0.0f;
  if (kind == 1) return -0.0f;
  if (kind == 2) return scale * 1e-6f;
  return scale * (static_cast<float>(random.below(20001)) - 10000.0f) / 10000.0f;
}

std::vector<std::byte> random_rows(Random& random, Dtype dtype, std::size_t count) {
  return with_type(dtype, [&](auto zero) {
    using T = decltype(zero);
    std::vector<std::byte> bytes(count * sizeof(T));
    float scale = 2.0f;
    for (std::size_t i = 0; i < count; ++i) {
      if (i % 128 == 0) scale = std::ldexp(1.0f, static_cast<int>(random.below(12)) - 6);
      const T value = from_float<T>(number_of(random, scale));
      std::memcpy(bytes.data() + i * sizeof(T), &value, sizeof(T));
    }
    return bytes;
  });
}

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

std::string describe(const LatencyCase& c) {
  return "ranks " + std::to_string(c.ranks) + ", topk " + std::to_string(c.call_topk) + " of " +
         std::to_string(c.topk) + ", experts " + std::to_string(c.experts) + ", hidden " +
         std::to_string(c.hidden) + ", capacity " + std::to_string(c.capacity) + ", " +
         std::string(name_of(c.dtype)) + ", format " + std::to_string(static_cast<int>(c.format)) +
         ", routes " + std::to_string(static_cast<int>(c.routes)) + ", blocks " +
         std::to_string(c.blocks) + ", parts " + std::to_string(c.parts) + ", few " +
         std::to_string(c.few) + ", weights " + std::to_string(c.weights_with_dispatch);
}

std::size_t LatencyWorld::row_bytes() const {
  return static_cast<std::size_t>(c.hidden) * size_of(c.dtype);
}

std::vector<std::vector<ExpertRow>> LatencyWorld::rows_of(int rank) const {
  std::vector<std::vector<ExpertRow>> rows(static_cast<std::size_t>(placement.local_experts(rank)));
  const std::int64_t first = placement.first_expert(rank), end = placement.first_expert(rank + 1);
  for (int s = 0; s < c.ranks; ++s) {
    const LatencyInput& input = inputs[static_cast<std::size_t>(s)];
    for (std::size_t i = 0; i < input.ids.size(); ++i) {
      if (input.ids[i] < first || input.ids[i] >= end) continue;
      const auto at = static_cast<int>(i);
      rows[static_cast<std::size_t>(input.ids[i] - first)].push_back(
          {s, at / c.call_topk, at % c.call_topk});
    }
  }
  return rows;
}

std::vector<std::byte> LatencyWorld::result_row(int rank, std::int64_t expert,
                                                std::int64_t place) const {
  Random random(seed * 977 + static_cast<std::uint64_t>(rank) * 1000003 +
                static_cast<std::uint64_t>(expert) * 131071 + static_cast<std::uint64_t>(place));
  return random_rows(random, c.dtype, static_cast<std::size_t>(c.hidden));
}

LatencyWorld make_latency_world(const LatencyCase& c, std::uint64_t seed,
                                const std::vector<std::int64_t>& tokens) {
  LatencyWorld world;
  world.c = c;
  world.placement = {c.experts, c.ranks};
  world.seed = seed;
  Random random(seed);
  for (int r = 0; r < c.ranks; ++r) {
    LatencyInput input;
    const std::int64_t kind = random.below(6);
    input.tokens = kind == 0 ? 0 : kind == 1 ? c.capacity : random.below(c.capacity + 1);
    if (!tokens.empty()) input.tokens = tokens[static_cast<std::size_t>(r)];
    const std::int64_t busy = random.below(c.experts);
    std::vector<std::int64_t> used(static_cast<std::size_t>(c.experts), 0);
    for (std::int64_t t = 0; t < input.tokens; ++t) {
      std::vector<std::int64_t> mine;
      for (int k = 0; k < c.call_topk; ++k) {
        std::int64_t id = random.below(c.experts);
        if (c.routes == Routes::one_expert && k == 0) id = busy;
        if (c.routes == Routes::nothing) id = -1;
        if (c.routes == Routes::holes && random.below(2) == 0) id = -1;
        const bool again = std::find(mine.begin(), mine.end(), id) != mine.end();
        if (id >= 0 && again && c.routes != Routes::duplicates) id = -1;
        if (id >= 0 && ++used[static_cast<std::size_t>(id)] > c.capacity) id = -1;
        mine.push_back(id);
        input.weights.push_back(number_of(random, 1.0f));
      }
      input.ids.insert(input.ids.end(), mine.begin(), mine.end());
    }
    input.x = random_rows(random, c.dtype, static_cast<std::size_t>(input.tokens * c.hidden));
    world.inputs.push_back(std::move(input));
  }
  return world;
}

LatencyCase small_latency_case() {
  LatencyCase c;
  c.ranks = 3;
  c.topk = c.call_topk = 3;
  c.experts = 6;
  c.hidden = 2080;
  c.capacity = 20;
  c.format = LatencyFormat::e4m3;
  c.blocks = 4;
  return c;
}

std::size_t spare_bytes(const LatencyCase& c, const DeviceLatencyLayout& layout) {
  const auto ranks = static_cast<std::size_t>(c.ranks);
  return 2 * ranks *
         std::max(static_cast<std::size_t>(c.capacity) * 64, kFewTokens * layout.few_row_slot);
}

void expect(const char* what, bool good, const std::string& detail) {
  if (!good) stop(std::string(what) + " " + detail);
}

std::size_t LatencyRun::wire_row_bytes() const {
  return static_cast<std::size_t>(c_.hidden) *
         (c_.format == LatencyFormat::as_is ? size_of(c_.dtype) : 1);
}

std::int64_t LatencyRun::scale_columns() const {
  if (c_.format == LatencyFormat::as_is) return 0;
  const std::int64_t each = c_.format == LatencyFormat::e4m3_packed ? 512 : 128;
  return (c_.hidden + each - 1) / each;
}

std::size_t latency_arena_bytes(const LatencyCase& c) {
  const std::int64_t experts = Placement{c.experts, c.ranks}.local_experts(0);
  const auto row = static_cast<std::size_t>(c.hidden) * size_of(c.dtype);
  const auto slots = static_cast<std::size_t>(experts * c.ranks * c.capacity);
  const auto table = static_cast<std::size_t>(c.ranks * c.capacity * c.topk);
  const LatencyDeviceShape shape{c.ranks, experts, c.capacity, c.hidden, c.topk, size_of(c.dtype)};
  const DeviceLatencyLayout layout = make_device_latency_layout(shape);
  return layout.bytes + spare_bytes(c, layout) +
         2 * (slots * (2 * row + row / 32 + 64) + table * 16 +
              static_cast<std::size_t>(c.capacity) * (2 * row + 4096)) +
         (std::size_t{1} << 20);
}

LatencyRun::LatencyRun(KernelGroup& group, const LatencyCase& c)
    : group_(group), c_(c), placement_{c.experts, c.ranks}, members_(index(c.ranks)) {
  const LatencyDeviceShape shape{
      c.ranks, placement_.local_experts(0), c.capacity, c.hidden, c.topk, size_of(c.dtype)};
  const DeviceLatencyLayout layout = make_device_latency_layout(shape);
  std::vector<std::byte*> segments;
  for (int r = 0; r < c.ranks; ++r) {
    Member& m = members_[index(r)];
    // What lies before the rows must be zero; all else may hold anything.
    segments.push_back(group.take(r, layout.bytes + spare_bytes(c, layout)).data);
    const auto zero = [&](std::size_t at, std::size_t bytes) {
      FERRY_CUDA_CHECK(cudaMemsetAsync(segments.back() + at, 0, bytes, group.stream(r)));
    };
    zero(0, layout.rows);
    m.view.group = group.view(r);
    m.view.placement = placement_;
    m.view.layout = layout;
    m.view.capacity = c.capacity;
    m.view.hidden = c.hidden;
    m.view.topk = c.topk;
    m.view.parts = c.parts > 0 ? c.parts : latency_parts(c.hidden);
    m.view.dtype = c.dtype;
    m.view.few = c.few;
    m.view.words = reinterpret_cast<LatencyWords*>(group.take(r, sizeof(LatencyWords), 0).data);
    m.alarm = reinterpret_cast<LatencyAlarm*>(group.take_pinned(sizeof(LatencyAlarm)));
    m.view.alarm = m.alarm;
    m.waits = reinterpret_cast<std::uint64_t*>(group.take(r, index(c.ranks) * 8, 0).data);
    for (HandleMemory& handle : m.handles) handle = make_handle(r);
  }
  for (Member& m : members_) {
    std::copy(segments.begin(), segments.end(), m.view.peers);
  }
  group.settle();
}

LatencyRun::HandleMemory LatencyRun::make_handle(int rank) {
  const auto take = [&](std::size_t bytes) {
    return group_.take(rank, std::max<std::size_t>(bytes, 16)).data;
  };
  const auto slots = static_cast<std::size_t>(local_experts(rank) * output_rows());
  const auto table = static_cast<std::size_t>(output_rows() * c_.topk);
  const auto capacity = static_cast<std::size_t>(c_.capacity);
  const auto row = static_cast<std::size_t>(c_.hidden) * size_of(c_.dtype);
  HandleMemory h;
  h.words = reinterpret_cast<LatencyHandle*>(take(sizeof(LatencyHandle)));
  h.slots = reinterpret_cast<std::int32_t*>(take(table * 4));
  h.slot_weights = reinterpret_cast<float*>(take(table * 4));
  h.out = take(slots * wire_row_bytes());
  h.scales = take(slots * static_cast<std::size_t>(scale_columns()) * 4);
  h.rows = take(slots * row);
  h.combined = take(capacity * row);
  h.counts =
      reinterpret_cast<std::int32_t*>(take(static_cast<std::size_t>(local_experts(rank)) * 4));
  h.source_token = reinterpret_cast<std::int32_t*>(take(slots * 4));
  h.ranges = reinterpret_cast<std::int64_t*>(
      take(static_cast<std::size_t>(local_experts(rank) * c_.ranks) * 8));
  h.x = take(capacity * row);
  h.ids = take(capacity * static_cast<std::size_t>(c_.topk) * 8);
  h.weights = reinterpret_cast<float*>(take(capacity * static_cast<std::size_t>(c_.topk) * 4));
  return h;
}

void LatencyRun::upload(const LatencyWorld& world, int handle) {
  for (int r = 0; r < c_.ranks; ++r) {
    HandleMemory& h = members_[index(r)].handles[handle];
    const LatencyInput& input = world.inputs[index(r)];
    h.tokens = static_cast<int>(input.tokens);
    group_.copy_in(r, h.x, input.x.data(), input.x.size());
    if (c_.wide) {
      group_.copy_in(r, h.ids, input.ids.data(), input.ids.size() * 8);
    } else {
      const std::vector<std::int32_t> narrow(input.ids.begin(), input.ids.end());
      group_.copy_in(r, h.ids, narrow.data(), narrow.size() * 4);
    }
    group_.copy_in(r, h.weights, input.weights.data(), input.weights.size() * 4);
    FERRY_CUDA_CHECK(cudaStreamSynchronize(group_.stream(r)));  // `narrow` ends here
  }
}

void LatencyRun::upload_results(const LatencyWorld& world, int handle) {
  const std::size_t row = world.row_bytes();
  for (int r = 0; r < c_.ranks; ++r) {
    const HandleMemory& h = members_[index(r)].handles[handle];
    const auto rows = world.rows_of(r);
    for (std::size_t e = 0; e < rows.size(); ++e) {
      std::vector<std::byte> all;
      for (std::size_t i = 0; i < rows[e].size(); ++i) {
        const auto one =
            world.result_row(r, static_cast<std::int64_t>(e), static_cast<std::int64_t>(i));
        all.insert(all.end(), one.begin(), one.end());
      }
      group_.copy_in(r, h.rows + e * static_cast<std::size_t>(output_rows()) * row, all.data(),
                     all.size());
      FERRY_CUDA_CHECK(cudaStreamSynchronize(group_.stream(r)));
    }
  }
}

void LatencyRun::poison(int handle) {
  group_.launch([&](int r) {
    const HandleMemory& h = members_[index(r)].handles[handle];
    const auto slots = static_cast<std::size_t>(local_experts(r) * output_rows());
    const auto set = [&](void* at, std::size_t bytes) {
      FERRY_CUDA_CHECK(cudaMemsetAsync(at, kPoison, bytes, group_.stream(r)));
    };
    set(h.out, slots * wire_row_bytes());
    set(h.scales, slots * static_cast<std::size_t>(scale_columns()) * 4);
    set(h.counts, static_cast<std::size_t>(local_experts(r)) * 4);
    set(h.source_token, slots * 4);
    set(h.combined, static_cast<std::size_t>(c_.capacity * c_.hidden) * size_of(c_.dtype));
  });
}

LatencyDispatchParameters LatencyRun::dispatch(int rank, int handle) const {
  const Member& m = members_[index(rank)];
  const HandleMemory& h = m.handles[handle];
  LatencyDispatchParameters p;
  p.view = m.view;
  p.format = c_.format;
  p.x = h.x;
  p.topk_idx = h.ids;
  p.weights = c_.weights_with_dispatch ? h.weights : nullptr;
  p.wide = c_.wide;
  p.token_stride = c_.call_topk;
  p.tokens = h.tokens;
  p.topk = c_.call_topk;
  p.handle = h.words;
  p.slots = h.slots;
  p.slot_weights = c_.weights_with_dispatch ? h.slot_weights : nullptr;
  p.out = h.out;
  p.scales = h.scales;
  p.counts = h.counts;
  p.source_token = h.source_token;
  p.ranges = h.ranges;
  p.failure = group_.failure(rank);
  p.blocks = c_.blocks;
  return p;
}

LatencyCombineParameters LatencyRun::combine(int rank, int handle, CombinePath path) const {
  const Member& m = members_[index(rank)];
  const HandleMemory& h = m.handles[handle];
  LatencyCombineParameters p;
  p.view = m.view;
  if (path == CombinePath::per_slot) p.view.alarm = nullptr;  // nobody may be masked
  p.path = path;
  p.handle = h.words;
  p.slots = h.slots;
  p.slot_weights = c_.weights_with_dispatch ? h.slot_weights : nullptr;
  p.rows = h.rows;
  p.topk_idx = h.ids;
  p.wide = c_.wide;
  p.weights = h.weights;
  p.tokens = h.tokens;
  p.topk = c_.call_topk;
  p.out = h.combined;
  p.blocks = c_.blocks;
  return p;
}

bool LatencyRun::masked(int rank, int peer) {
  const LatencyWords* words = members_[index(rank)].view.words;
  return group_.download<std::uint32_t>(rank, &words->masked[peer], 1)[0] != 0;
}

void LatencyRun::set_gone(int rank, int peer, Gone gone) {
  const LatencyView& view = members_[index(rank)].view;
  group_.copy_in(rank, view.peers[rank] + view.layout.gone + index(peer) * sizeof(gone), &gone,
                 sizeof(gone));
}

std::uint64_t LatencyRun::generation(int rank) {
  return group_.download<std::uint64_t>(rank, &members_[index(rank)].view.words->generation, 1)[0];
}

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
