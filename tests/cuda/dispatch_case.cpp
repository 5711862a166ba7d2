#include "dispatch_case.hpp"

#include <algorithm>
#include <cstring>

#include "core/number.hpp"

namespace ferry::cuda::test {

namespace {

constexpr std::int64_t kMoreRows = 5;  // of launch_routes

std::int64_t pick_id(const DispatchCase& c, const Placement& placement, Random& random,
                     const std::int64_t* before, int slot) {
  if (c.experts == 0 || c.pattern == Pattern::nothing) return -1;
  if (c.pattern == Pattern::holes && random.below(3) == 0) return -1;
  if (c.pattern == Pattern::duplicates && slot > 0 && random.below(2) == 0) {
    return before[random.below(slot)];
  }
  if (c.pattern == Pattern::one_rank) {
    const int rank = placement.rank_of(c.experts - 1);
    return placement.first_expert(rank) + random.below(placement.local_experts(rank));
  }
  for (int tries = 0; tries < 64; ++tries) {  // distinct where that is possible
    const std::int64_t id = random.below(c.experts);
    if (std::find(before, before + slot, id) == before + slot) return id;
  }
  return random.below(c.experts);
}

template <class T>
void put(std::vector<std::byte>& image, std::size_t offset, const T& value) {
  std::memcpy(image.data() + offset, &value, sizeof(T));
}

/// A row to be quantised: ordinary values, any bits (NaN, infinity and huge values among them),
/// zeros, subnormals, or one that dwarfs its neighbours.
template <class T>
void fill_raw(T* row, std::int64_t columns, Random& random) {
  const std::int64_t kind = random.below(6);
  for (std::int64_t i = 0; i < columns; ++i) {
    const std::uint64_t word = random.next();
    const auto any = number_detail::float_of(static_cast<std::uint32_t>(word));
    const float plain = (static_cast<float>(word >> 40) - 0x1p23f) * 0x1p-20f;
    float value = plain;
    if (kind == 1 || (kind == 2 && word % 97 == 0)) value = any;
    if (kind == 3) value = number_detail::float_of(static_cast<std::uint32_t>(word) & 0x80000000u);
    if (kind == 4) value = plain * 1e-7f;
    row[i] = from_float<T>(value);
  }
  if (kind == 5) row[random.below(columns)] = from_float<T>(-60000.0f);
}

template <class T>
void make_quantised(const DispatchCase& c, std::int64_t tokens, Random& random, RankInput& input) {
  input.raw.resize(at(tokens * c.row_bytes) * sizeof(T));
  auto* raw = reinterpret_cast<T*>(input.raw.data());
  for (std::int64_t t = 0; t < tokens; ++t) {
    T* row = raw + t * c.row_bytes;
    fill_raw(row, c.row_bytes, random);
    quantize_row(row, at(c.row_bytes), reinterpret_cast<E4m3*>(input.x.data() + t * c.row_bytes),
                 input.scales.data() + t * c.scale_columns, c.round_scale);
  }
}

void quantise_input(const DispatchCase& c, std::int64_t tokens, Random& random, RankInput& input) {
  switch (c.x_dtype) {
    case Dtype::bf16: return make_quantised<Bf16>(c, tokens, random, input);
    case Dtype::f16: return make_quantised<Fp16>(c, tokens, random, input);
    default: return make_quantised<float>(c, tokens, random, input);
  }
}

}  // namespace

std::string describe(const DispatchCase& c) {
  std::string text = "R ";
  text += std::to_string(c.ranks) + " K " + std::to_string(c.topk) + " E " +
          std::to_string(c.experts) + " row " + std::to_string(c.row_bytes) + " C " +
          std::to_string(c.scale_columns) + (c.strided_scales ? " strided" : "") +
          (c.quantize ? std::string(" of ").append(name_of(c.x_dtype)) : "") +
          (c.round_scale ? " pow2" : "") + (c.weights ? " weights" : "") +
          (c.wide ? " i64" : " i32") + (c.strided_ids ? " strided ids" : "") + " pattern " +
          std::to_string(static_cast<int>(c.pattern)) + " slack " + std::to_string(c.slack) +
          " sms " + std::to_string(c.num_sms) + (c.early ? " early" : "") +
          (c.glued ? " glued" : "") + " T";
  for (const std::int64_t t : c.tokens) text.append(" ").append(std::to_string(t));
  return text;
}

std::int64_t World::recv_rows(int rank) const {
  return static_cast<std::int64_t>(arrivals[at(rank)].size());
}

std::int64_t World::wire_rows(int rank) const {
  std::int64_t rows = 0;
  for (int d = 0; d < c.ranks; ++d) {
    if (d == rank) continue;
    for (const Arrival& a : arrivals[at(d)]) rows += a.source == rank;
  }
  return rows;
}

std::int32_t World::local_id(int rank, const Arrival& from, int slot) const {
  const std::int64_t id = inputs[at(from.source)].ids[at(from.token * c.topk + slot)];
  if (id < 0 || placement.rank_of(id) != rank) return -1;
  return static_cast<std::int32_t>(id - placement.first_expert(rank));
}

World make_world(const DispatchCase& c, std::uint64_t seed) {
  World world{c, {c.experts, c.ranks}, {}, {}};
  Random random(seed);
  world.arrivals.resize(at(c.ranks));
  for (int s = 0; s < c.ranks; ++s) {
    RankInput input;
    const std::int64_t tokens = c.tokens[at(s)];
    input.ids.resize(at(tokens * c.topk));
    input.x.resize(at(tokens * c.row_bytes));
    input.scales.resize(at(tokens * c.scale_columns));
    input.weights.resize(at(tokens * c.topk));
    for (std::size_t i = 0; i < input.x.size(); i += 8) {
      const std::uint64_t word = random.next();
      std::memcpy(input.x.data() + i, &word, 8);
    }
    if (c.quantize) quantise_input(c, tokens, random, input);
    for (float& v : input.scales)
      v = c.quantize ? v : static_cast<float>(random.below(1 << 24)) * 0x1p-12f;
    for (float& v : input.weights) v = static_cast<float>(random.below(1 << 24)) * 0x1p-24f;
    for (std::int64_t t = 0; t < tokens; ++t) {
      std::int64_t* ids = input.ids.data() + t * c.topk;
      for (int k = 0; k < c.topk; ++k) ids[k] = pick_id(c, world.placement, random, ids, k);
      std::vector<bool> goes(at(c.ranks));
      for (int k = 0; k < c.topk; ++k) {
        if (ids[k] >= 0) goes[at(world.placement.rank_of(ids[k]))] = true;
      }
      for (int d = 0; d < c.ranks; ++d) {
        if (goes[at(d)]) world.arrivals[at(d)].push_back({s, t});
      }
    }
    world.inputs.push_back(std::move(input));
  }
  return world;
}

DispatchRun::DispatchRun(KernelGroup& group, const World& world) : group_(group), world_(world) {
  const DispatchCase& c = world.c;
  Placed& p = placed_;
  for (int r = 0; r < c.ranks; ++r) {
    const RankInput& in = world.inputs[at(r)];
    const std::int64_t tokens = c.tokens[at(r)], local = world.placement.local_experts(r);
    const std::int64_t id_stride = c.topk + (c.strided_ids ? 3 : 0);
    std::vector<std::int64_t> ids(at(tokens * id_stride), std::int64_t{1} << 40);
    std::vector<std::int32_t> narrow(ids.size(), 1 << 30);
    for (std::int64_t i = 0; i < tokens * c.topk; ++i) {
      const std::size_t to = at(i / c.topk * id_stride + i % c.topk);
      ids[to] = in.ids[at(i)];
      narrow[to] = static_cast<std::int32_t>(in.ids[at(i)]);
    }
    p.ids.push_back(c.wide ? group.upload(r, ids) : group.upload(r, narrow));
    p.x.push_back(group.upload(r, c.quantize ? in.raw : in.x));
    std::vector<float> scales = in.scales;
    if (c.strided_scales) {
      scales.assign(at(tokens * (2 * c.scale_columns + 3)), -7.0f);
      for (std::int64_t i = 0; i < tokens * c.scale_columns; ++i) {
        const std::int64_t t = i / c.scale_columns, j = i % c.scale_columns;
        scales[at(t * (2 * c.scale_columns + 3) + 2 * j)] = in.scales[at(i)];
      }
    }
    p.scales.push_back(group.upload(r, scales));
    p.weights.push_back(group.upload(r, in.weights));
    p.plan.push_back(group.take(r, make_plan_layout(tokens, c.topk, c.ranks, local).bytes));
    p.scratch.push_back(group.take(r, plan_scratch_bytes(c.experts)));
    const std::int64_t rows = capacity(r);
    p.rows.push_back(
        group.take(r, make_receive_layout(rows, at(c.row_bytes), c.scale_columns).bytes));
    p.side.push_back(group.take(r, make_wide_side_layout(rows, c.topk, true, true).bytes));
    p.out.push_back(group.take(r, at(tokens * c.row_bytes)));
    p.came.push_back(group.take(r, 8));
    p.more_ids.push_back(group.take(r, at((rows + kMoreRows) * c.topk) * 8));
    p.more_tokens.push_back(group.take(r, at(rows + kMoreRows) * 4));
    p.counts.push_back(reinterpret_cast<HostCounts*>(group.take_pinned(sizeof(HostCounts))));
    *p.counts.back() = HostCounts{};
    p.count_words.push_back(reinterpret_cast<std::int32_t*>(
        group.take_pinned(at(c.ranks * (c.ranks + local) + 1) * 4)));
  }
  group.settle();
}

std::int64_t DispatchRun::capacity(int rank) const {
  return world_.recv_rows(rank) + world_.c.slack;
}

PlanParameters DispatchRun::plan_parameters(int rank) const {
  const DispatchCase& c = world_.c;
  PlanParameters p;
  p.group = group_.view(rank);
  p.topk_idx = placed_.ids[at(rank)].data;
  p.wide = c.wide;
  p.token_stride = c.topk + (c.strided_ids ? 3 : 0);
  p.plan.data = placed_.plan[at(rank)].data;
  p.plan.layout =
      make_plan_layout(c.tokens[at(rank)], c.topk, c.ranks, world_.placement.local_experts(rank));
  p.plan.tokens = c.tokens[at(rank)];
  p.plan.topk = c.topk;
  p.plan.placement = world_.placement;
  p.call.kind = CallKind::plan;
  p.call.exchange.topk = static_cast<std::uint32_t>(c.topk);
  p.counts = placed_.counts[at(rank)];
  p.count_words = placed_.count_words[at(rank)];
  p.scratch = reinterpret_cast<std::int32_t*>(placed_.scratch[at(rank)].data);
  return p;
}

DispatchParameters DispatchRun::dispatch_parameters(int rank, bool routes) const {
  const DispatchCase& c = world_.c;
  DispatchParameters p;
  p.group = group_.view(rank);
  p.plan = plan_parameters(rank).plan;
  p.call.kind = CallKind::dispatch;
  p.call.elements = c.row_bytes;
  p.call.exchange.carries_routes = routes;
  p.x = placed_.x[at(rank)].data;
  p.row_bytes = c.row_bytes;
  p.quantize = c.quantize;
  p.round_scale = c.round_scale;
  p.x_dtype = c.x_dtype;
  p.scale_columns = c.scale_columns;
  if (c.scale_columns > 0 && !c.quantize) {
    p.scales = reinterpret_cast<const float*>(placed_.scales[at(rank)].data);
    p.scale_token_stride = c.strided_scales ? 2 * c.scale_columns + 3 : c.scale_columns;
    p.scale_column_stride = c.strided_scales ? 2 : 1;
  }
  p.has_weights = c.weights;
  if (c.weights) p.weights = reinterpret_cast<const float*>(placed_.weights[at(rank)].data);
  p.carries_routes = routes;
  if (routes) p.came = reinterpret_cast<std::uint64_t*>(placed_.came[at(rank)].data);
  p.segment = placed_.rows[at(rank)].segment;
  p.offset = placed_.rows[at(rank)].offset;
  p.side_segment = placed_.side[at(rank)].segment;
  p.side_offset = placed_.side[at(rank)].offset;
  p.capacity = capacity(rank);
  p.failure = group_.failure(rank);
  p.num_sms = c.num_sms;
  return p;
}

RoutesParameters DispatchRun::routes_parameters(int rank) const {
  const DispatchCase& c = world_.c;
  const WideSideLayout side = make_wide_side_layout(capacity(rank), c.topk, true, c.weights);
  const std::byte* data = placed_.side[at(rank)].data;
  RoutesParameters p;
  p.group = group_.view(rank);
  p.plan = plan_parameters(rank).plan;
  p.plan.layout.state = static_cast<std::size_t>(placed_.came[at(rank)].data - p.plan.data);
  p.brought = capacity(rank);
  p.capacity = capacity(rank) + kMoreRows;
  p.ids = reinterpret_cast<const std::int32_t*>(data + side.topk_idx);
  p.tokens = reinterpret_cast<const std::int32_t*>(data + side.source_token);
  p.topk_idx = reinterpret_cast<std::int64_t*>(placed_.more_ids[at(rank)].data);
  p.source_token = reinterpret_cast<std::int32_t*>(placed_.more_tokens[at(rank)].data);
  p.num_sms = c.num_sms;
  return p;
}

CombineParameters DispatchRun::combine_parameters(int rank) const {
  const DispatchCase& c = world_.c;
  CombineParameters p;
  p.group = group_.view(rank);
  p.plan = plan_parameters(rank).plan;
  p.call.kind = CallKind::combine;
  p.segment = placed_.rows[at(rank)].segment;
  p.offset = placed_.rows[at(rank)].offset;
  p.rows = capacity(rank);
  p.columns = c.row_bytes / 2;
  p.out = placed_.out[at(rank)].data;
  p.failure = group_.failure(rank);
  return p;
}

bool DispatchRun::came(int rank) const {
  return group_.download<std::uint64_t>(rank, placed_.came[at(rank)].data, 1)[0] == 1;
}

void DispatchRun::launch_plans() {
  group_.launch(
      [&](int r) { FERRY_CUDA_CHECK(launch_plan(plan_parameters(r), group_.stream(r))); });
}

void DispatchRun::launch_dispatches(bool routes) {
  group_.launch([&](int r) {
    DispatchParameters p = dispatch_parameters(r, routes);
    p.early = routes && world_.c.early;
    p.glued = routes && world_.c.glued;
    FERRY_CUDA_CHECK(launch_dispatch(p, group_.stream(r)));
  });
}

void DispatchRun::launch_all_routes() {
  group_.launch(
      [&](int r) { FERRY_CUDA_CHECK(launch_routes(routes_parameters(r), group_.stream(r))); });
}

void DispatchRun::poison() {
  group_.launch([&](int r) {
    for (const Piece* piece : {&placed_.rows[at(r)], &placed_.side[at(r)]}) {
      if (piece->bytes == 0) continue;
      FERRY_CUDA_CHECK(cudaMemsetAsync(piece->data, 0xCB, piece->bytes, group_.stream(r)));
    }
  });
  group_.settle();
}

void DispatchRun::wrong(int rank, const std::string& what) const {
  stop(describe(world_.c) + "; rank " + std::to_string(rank) + ": " + what);
}

void DispatchRun::compare(int rank, const std::string& what, const std::vector<std::byte>& expected,
                          const void* on_gpu) const {
  const auto got = group_.download<std::byte>(rank, on_gpu, expected.size());
  if (expected.empty() || std::memcmp(got.data(), expected.data(), got.size()) == 0) return;
  const auto place = std::mismatch(got.begin(), got.end(), expected.begin());
  wrong(rank, what + ": byte " + std::to_string(place.first - got.begin()) + " of " +
                  std::to_string(got.size()) + " is " +
                  std::to_string(static_cast<int>(*place.first)) + ", expected " +
                  std::to_string(static_cast<int>(*place.second)));
}

void DispatchRun::check_plan(int rank) const {
  const DispatchCase& c = world_.c;
  const std::int64_t local = world_.placement.local_experts(rank);
  std::vector<std::int32_t> tokens(at(c.ranks * c.ranks)), slots(at(c.ranks * local)), ids;
  for (int d = 0; d < c.ranks; ++d) {
    for (const Arrival& a : world_.arrivals[at(d)]) ++tokens[at(a.source * c.ranks + d)];
  }
  for (const Arrival& a : world_.arrivals[at(rank)]) {
    for (int k = 0; k < c.topk; ++k) {
      const std::int32_t id = world_.local_id(rank, a, k);
      if (id >= 0) ++slots[at(a.source * local + id)];
    }
  }
  for (const std::int64_t id : world_.inputs[at(rank)].ids) {
    ids.push_back(static_cast<std::int32_t>(id));
  }
  const HostCounts& counts = *placed_.counts[at(rank)];
  if (counts.done == 0 || counts.failure.written != 0) wrong(rank, "the counts are not there");
  const std::int32_t* words = placed_.count_words[at(rank)];
  if (!std::equal(tokens.begin(), tokens.end(), words)) wrong(rank, "host rank_tokens differ");
  if (!std::equal(slots.begin(), slots.end(), words + tokens.size())) {
    wrong(rank, "host expert_slots differ");
  }
  const PlanView plan = plan_parameters(rank).plan;
  const auto bytes = [](const std::vector<std::int32_t>& v) {
    const auto* first = reinterpret_cast<const std::byte*>(v.data());
    return std::vector<std::byte>(first, first + v.size() * 4);
  };
  compare(rank, "rank_tokens", bytes(tokens), plan.data + plan.layout.rank_tokens);
  compare(rank, "expert_slots", bytes(slots), plan.data + plan.layout.expert_slots);
  compare(rank, "ids", bytes(ids), plan.data + plan.layout.ids);
}

void DispatchRun::check_rows(int rank) const {
  const DispatchCase& c = world_.c;
  const ReceiveLayout layout =
      make_receive_layout(capacity(rank), at(c.row_bytes), c.scale_columns);
  std::vector<std::byte> image(layout.bytes, std::byte{0xCB});  // what nobody sends stays
  std::size_t row = 0;
  for (const Arrival& a : world_.arrivals[at(rank)]) {
    const RankInput& in = world_.inputs[at(a.source)];
    std::memcpy(image.data() + layout.rows + row * at(c.row_bytes),
                in.x.data() + a.token * c.row_bytes, at(c.row_bytes));
    const std::size_t scale_bytes = at(c.scale_columns) * 4;
    if (scale_bytes > 0) {
      std::memcpy(image.data() + layout.scales + row * scale_bytes,
                  in.scales.data() + a.token * c.scale_columns, scale_bytes);
    }
    ++row;
  }
  compare(rank, "rows and scales", image, placed_.rows[at(rank)].data);
}

void DispatchRun::check_side(int rank, bool routes) const {
  const DispatchCase& c = world_.c;
  const std::int64_t all = capacity(rank), rows = world_.recv_rows(rank);
  const WideSideLayout layout = make_wide_side_layout(all, c.topk, routes, c.weights);
  std::vector<std::byte> image(placed_.side[at(rank)].bytes, std::byte{0xCB});
  for (std::int64_t row = 0; row < all; ++row) {
    const bool there = row < rows;
    const Arrival a = there ? world_.arrivals[at(rank)][at(row)] : Arrival{0, -1};
    if (routes) put(image, layout.source_token + at(row) * 4, static_cast<std::int32_t>(a.token));
    for (int k = 0; k < c.topk; ++k) {
      const std::size_t slot = at(row * c.topk + k);
      const std::int32_t id = there ? world_.local_id(rank, a, k) : -1;
      const float weight =
          id >= 0 ? world_.inputs[at(a.source)].weights[at(a.token * c.topk + k)] : 0.0f;
      if (routes && there) put(image, layout.topk_idx + slot * 4, id);
      if (routes) put(image, layout.wide_ids + slot * 8, std::int64_t{id});
      if (c.weights) put(image, layout.weights + slot * 4, weight);
    }
  }
  compare(rank, "side region", image, placed_.side[at(rank)].data);
}

void DispatchRun::check_more_routes(int rank, bool there) const {
  const DispatchCase& c = world_.c;
  const std::int64_t rows = there ? world_.recv_rows(rank) : 0;
  std::vector<std::byte> ids(placed_.more_ids[at(rank)].bytes, std::byte{0xFF});
  std::vector<std::byte> tokens(placed_.more_tokens[at(rank)].bytes, std::byte{0xFF});
  for (std::int64_t row = 0; row < rows; ++row) {
    const Arrival a = world_.arrivals[at(rank)][at(row)];
    put(tokens, at(row) * 4, static_cast<std::int32_t>(a.token));
    for (int k = 0; k < c.topk; ++k) {
      put(ids, at(row * c.topk + k) * 8, std::int64_t{world_.local_id(rank, a, k)});
    }
  }
  compare(rank, "topk_idx of more rows", ids, placed_.more_ids[at(rank)].data);
  compare(rank, "source_token of more rows", tokens, placed_.more_tokens[at(rank)].data);
}

}  // namespace ferry::cuda::test
