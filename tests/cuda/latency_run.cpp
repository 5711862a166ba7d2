// Memory and calls of a LatencyRun; latency_checks.cpp has what it compares.
#include <algorithm>
#include <vector>

#include "cuda/runtime/links.hpp"
#include "latency_case.hpp"

namespace ferry::cuda::test {

namespace {

constexpr int kPoison = 0xCB;

/// Whether rows may cross as LL128 between the GPUs of this machine.
bool all_carry_ll128() {
  static const bool all = [] {
    std::vector<cudaUUID_t> gpus;
    for (int i = 0; i < gpu_count(); ++i) {
      cudaDeviceProp properties{};
      FERRY_CUDA_CHECK(cudaGetDeviceProperties(&properties, i));
      gpus.push_back(properties.uuid);
    }
    bool carries = true;
    for (int i = 0; i < gpu_count(); ++i) carries = carries && carries_ll128(i, gpus);
    return carries;
  }();
  return all;
}

}  // namespace

std::size_t spare_bytes(const LatencyCase& c, const DeviceLatencyLayout& layout) {
  const auto ranks = static_cast<std::size_t>(c.ranks);
  return 2 * ranks *
         std::max(static_cast<std::size_t>(c.capacity) * std::max<std::size_t>(64, layout.row_slot),
                  kLLTokens * layout.ll_row_slot);
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
    if (layout.ll128) {
      zero(layout.rows, 2 * static_cast<std::size_t>(c.ranks * c.capacity) * layout.row_slot);
    }
    m.view.group = group.view(r);
    m.view.placement = placement_;
    m.view.layout = layout;
    m.view.capacity = c.capacity;
    m.view.hidden = c.hidden;
    m.view.topk = c.topk;
    m.view.parts = c.parts > 0 ? c.parts : latency_parts(c.hidden);
    m.view.dtype = c.dtype;
    m.view.ll = c.ll;
    m.view.ll128 = c.ll128 && layout.ll128 && all_carry_ll128();
    m.view.words = reinterpret_cast<LatencyWords*>(group.take(r, sizeof(LatencyWords), 0).data);
    // The same on all ranks, whose memory is taken alike.
    m.view.layout.words =
        static_cast<std::size_t>(reinterpret_cast<std::byte*>(m.view.words) - segments.back());
    m.alarm = reinterpret_cast<LatencyAlarm*>(group.take_pinned(sizeof(LatencyAlarm)));
    m.view.alarm = m.alarm;
    m.wait_ns = reinterpret_cast<std::uint64_t*>(group.take(r, index(c.ranks) * 8, 0).data);
    for (HandleMemory& handle : m.handles) handle = make_handle(r);
  }
  for (Member& m : members_) {
    std::copy(segments.begin(), segments.end(), m.view.peers);
    join_domain(m.view);
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
    const conformance::RankInput& input = world.inputs[index(r)];
    h.tokens = static_cast<int>(input.tokens);
    group_.copy_in(r, h.x, input.x.data(), input.x.size());
    if (c_.wide) {
      group_.copy_in(r, h.ids, input.topk_idx.data(), input.topk_idx.size() * 8);
    } else {
      const std::vector<std::int32_t> narrow(input.topk_idx.begin(), input.topk_idx.end());
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

}  // namespace ferry::cuda::test
