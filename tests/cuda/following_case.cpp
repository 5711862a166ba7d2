#include "following_case.hpp"

#include <algorithm>

#include "core/number/quantize.hpp"

namespace ferry::cuda::test {
Following::Following(KernelGroup& group, const ExpertCase& c, Random& random, bool routes)
    : group_(group), c_(c), exchange_(make_exchange(c.shape, random)), ranks_(at(c.shape.ranks)) {
  for (int r = 0; r < c.shape.ranks; ++r) make_input(r, random);
  for (int r = 0; r < c.shape.ranks; ++r) {
    FERRY_CUDA_CHECK(cudaSetDevice(group.device(r)));
    make_rows(r, routes);
  }
  group.settle();
}

void Following::make_input(int r, Random& random) {
  const std::int64_t tokens = exchange_.tokens(r), columns = c_.row_bytes;
  x_.push_back(random_elements(random, Dtype::f32, tokens * c_.row_bytes / 4));
  scales_.push_back(random_floats(random, tokens * c_.scale_columns));
  if (!c_.quantize) return;
  raw_.push_back(random_elements(random, Dtype::bf16, tokens * columns));
  for (std::int64_t t = 0; t < tokens; ++t) {
    quantize_row(reinterpret_cast<const Bf16*>(raw_.back().data()) + t * columns, at(columns),
                 reinterpret_cast<E4m3*>(x_.back().data() + t * c_.row_bytes),
                 scales_.back().data() + t * c_.scale_columns);
  }
}

void Following::make_rows(int r, bool routes) {
  FollowingRank& mine = rank(r);
  mine.local = make_expert_rows(group_, c_, exchange_, r);
  const ExpertRows& local = mine.local;
  const std::int64_t topk = c_.shape.topk, capacity = local.capacity, columns = c_.scale_columns;
  mine.rows.resize(at(capacity * c_.row_bytes));
  mine.scales.resize(at(capacity * columns));
  std::int64_t row = 0;
  for (const Arrival& a : exchange_.arrivals[at(r)]) {
    std::copy_n(x_[at(a.source)].begin() + a.token * c_.row_bytes, c_.row_bytes,
                mine.rows.begin() + row * c_.row_bytes);
    std::copy_n(scales_[at(a.source)].begin() + a.token * columns, columns,
                mine.scales.begin() + row++ * columns);
  }
  const auto layout = make_receive_layout(capacity, at(c_.row_bytes), columns);
  const Piece receive = group_.take(r, layout.bytes);
  const auto beside = make_wide_side_layout(capacity, static_cast<int>(topk), true, false);
  const Piece side = group_.take(r, beside.bytes);

  DispatchParameters& d = mine.dispatch;
  d.group = group_.view(r);
  d.plan = local.plan;
  d.call.kind = CallKind::dispatch;
  d.x = group_.upload(r, c_.quantize ? raw_[at(r)] : x_[at(r)]).data;
  d.row_bytes = c_.row_bytes;
  d.quantize = c_.quantize;
  d.scale_columns = columns;
  if (columns > 0 && !c_.quantize) {
    d.scales = reinterpret_cast<const float*>(group_.upload(r, scales_[at(r)]).data);
    d.scale_token_stride = columns;
  }
  d.carries_routes = routes;
  d.segment = receive.segment;
  d.offset = receive.offset;
  d.side_segment = side.segment;
  d.side_offset = side.offset;
  d.capacity = capacity;
  d.failure = group_.failure(r);
  d.parts = kProgressParts;
  d.followed = true;
  d.num_sms = c_.num_sms;

  FanOutParameters& f = mine.fan_out;
  f.group = d.group;
  f.plan = local.plan;
  f.ids = reinterpret_cast<const std::int32_t*>(routes ? side.data + beside.topk_idx
                                                       : group_.upload(r, local.ids).data);
  f.rows = receive.data + layout.rows;
  f.row_bytes = c_.row_bytes;
  f.capacity = capacity;
  f.alignment = c_.alignment;
  f.out_capacity = local.out_capacity;
  f.out = take<std::byte>(group_, r, f.out_capacity * c_.row_bytes);
  if (columns > 0) {
    f.scales = reinterpret_cast<const float*>(receive.data + layout.scales);
    f.scale_columns = columns;
    f.out_scales = take<float>(group_, r, f.out_capacity * columns);
  }
  f.slot_rows = take<std::int64_t>(group_, r, capacity * topk);
  f.expert_offsets = take<std::int64_t>(group_, r, local.experts + 1);
  const std::size_t scratch = fan_out_scratch_bytes(capacity, local.experts);
  f.scratch = reinterpret_cast<std::int32_t*>(
      take<std::byte>(group_, r, static_cast<std::int64_t>(scratch)));
  // In the arena, so that its poison is what an earlier call may have left.
  f.made = take<std::uint64_t>(group_, r, 1);
  f.awaits_routes = routes;
  f.num_sms = c_.beside_sms;
}

void Following::launch(int r) {
  FollowingRank& mine = rank(r);
  mine.dispatch.group = mine.fan_out.group = group_.view(r);
  FERRY_CUDA_CHECK(launch_dispatch(mine.dispatch, group_.stream(r)));
  FERRY_CUDA_CHECK(launch_fan_out_beside(mine.fan_out, group_.stream(r), c_.fan_out));
}

void Following::poison(bool keep_slots) {
  for (int r = 0; r < c_.shape.ranks; ++r) {
    const FanOutParameters& f = rank(r).fan_out;
    FERRY_CUDA_CHECK(cudaSetDevice(group_.device(r)));
    const auto spoil = [&](const void* data, std::int64_t bytes) {
      if (bytes == 0 || data == nullptr) return;
      FERRY_CUDA_CHECK(cudaMemsetAsync(const_cast<void*>(data), 0xCB, at(bytes), group_.stream(r)));
    };
    spoil(f.rows, f.capacity * f.row_bytes);
    spoil(f.scales, f.capacity * f.scale_columns * 4);
    spoil(f.out, f.out_capacity * f.row_bytes);
    spoil(f.out_scales, f.out_capacity * f.scale_columns * 4);
    if (!keep_slots) {
      spoil(f.made, 8);
      spoil(f.slot_rows, f.capacity * c_.shape.topk * 8);
      spoil(f.expert_offsets, (rank(r).local.experts + 1) * 8);
    }
    if (rank(r).dispatch.carries_routes) spoil(f.ids, f.capacity * c_.shape.topk * 4);
  }
  group_.settle();
}

void Following::check_and_poison(bool keep_slots) {
  for (int r = 0; r < c_.shape.ranks; ++r) {
    const FollowingRank& mine = rank(r);
    check_fan_out(group_, c_, mine.local, r, mine.fan_out, mine.rows, mine.scales);
  }
  poison(keep_slots);
}

void Following::check_nothing_copied(int r, int except) {
  const FollowingRank& mine = rank(r);
  const auto out =
      group_.download<std::byte>(r, mine.fan_out.out, at(mine.fan_out.out_capacity * c_.row_bytes));
  const std::vector<std::int64_t>& slots = mine.local.expected.slot_rows;
  for (std::size_t i = 0; i < slots.size(); ++i) {
    const std::int64_t slot = slots[i];
    if (slot < 0 || exchange_.arrivals[at(r)][i / at(c_.shape.topk)].source == except) continue;
    const auto row = out.begin() + slot * c_.row_bytes;
    if (std::any_of(row, row + c_.row_bytes, [](std::byte b) { return b != std::byte{0xCB}; })) {
      stop("rank " + std::to_string(r) +
           ": a fan-out copied rows that have not come: " + c_.text());
    }
  }
}

}  // namespace ferry::cuda::test
