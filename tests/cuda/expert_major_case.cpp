#include "expert_major_case.hpp"

#include <algorithm>
#include <cmath>

#include "cuda/kernels/base/barrier.hpp"

namespace ferry::cuda::test {
std::string ExpertCase::text() const {
  std::string s = "ranks ";
  s += std::to_string(shape.ranks) + ", experts " + std::to_string(shape.experts) + ", top-k " +
       std::to_string(shape.topk) + ", row bytes " + std::to_string(row_bytes) + ", scales " +
       std::to_string(scale_columns) + (quantize ? " (quantised)" : "") + ", alignment " +
       std::to_string(alignment) + ", spare " + std::to_string(spare) + ", out spare " +
       std::to_string(out_spare) + ", " + std::string(name_of(dtype)) + ", weighted " +
       std::to_string(weighted) + ", sms " + std::to_string(num_sms) + ", for sums " +
       std::to_string(sum_sms) + ", beside " + std::to_string(beside_sms) + ", copies " +
       std::to_string(copies) + ", ready " + std::to_string(ready) + ", pulls " +
       std::to_string(sum.pulls) + ", piece " + std::to_string(fan_out.piece_bytes) + ", group " +
       std::to_string(fan_out.group_bytes) + ", stages " + std::to_string(fan_out.stages) + "/" +
       std::to_string(sum.stages) + ", vectors " + std::to_string(sum.vectors) + ", warps " +
       std::to_string(sum.warps);
  return s;
}

ExpertRows make_expert_rows(KernelGroup& group, const ExpertCase& c, const Exchange& x, int rank) {
  ExpertRows local;
  local.plan = upload_plan(group, x, rank);
  local.ids = x.local_ids(rank);
  local.experts = x.placement.local_experts(rank);
  local.expected = place_expert_major(local.ids, local.experts, c.alignment);
  local.received = x.received(rank);
  local.capacity = local.received + c.spare;
  local.out_capacity = local.expected.offsets.back() + c.out_spare;
  return local;
}

/// `bytes` as expected, then untouched poison.
void check_bytes(KernelGroup& group, int rank, const void* got_at, const void* expected,
                 std::size_t bytes, const std::string& what) {
  const Bytes got = group.download<std::byte>(rank, got_at, bytes + kGuard);
  const auto* e = static_cast<const std::byte*>(expected);
  for (std::size_t i = 0; i < bytes + kGuard; ++i) {
    if (got[i] == (i < bytes ? e[i] : std::byte{0xCB})) continue;
    stop(what + ": rank " + std::to_string(rank) + ": byte " + std::to_string(i) + " of " +
         std::to_string(bytes) + " is " + std::to_string(static_cast<int>(got[i])));
  }
}

void check_fan_out(KernelGroup& group, const ExpertCase& c, const ExpertRows& local, int rank,
                   const FanOutParameters& p, const Bytes& rows, const std::vector<float>& scales) {
  const std::int64_t topk = c.shape.topk, columns = c.scale_columns;
  Bytes out(at(local.out_capacity * c.row_bytes), std::byte{0});
  std::vector<float> out_scales(at(local.out_capacity * columns), 0.0f);
  std::vector<std::int64_t> slots = local.expected.slot_rows;
  for (std::size_t i = 0; i < slots.size(); ++i) {
    if (slots[i] < 0) continue;
    const std::int64_t row = static_cast<std::int64_t>(i) / topk;
    std::copy_n(rows.begin() + row * c.row_bytes, c.row_bytes,
                out.begin() + slots[i] * c.row_bytes);
    std::copy_n(scales.begin() + row * columns, columns, out_scales.begin() + slots[i] * columns);
  }
  slots.resize(at(local.capacity * topk), -1);
  const std::string text = "fan-out, " + c.text();
  check_bytes(group, rank, p.slot_rows, slots.data(), slots.size() * 8, text + ": slot rows");
  check_bytes(group, rank, p.expert_offsets, local.expected.offsets.data(),
              local.expected.offsets.size() * 8, text + ": offsets");
  check_bytes(group, rank, p.out, out.data(), out.size(), text + ": rows");
  if (columns > 0) {
    check_bytes(group, rank, p.out_scales, out_scales.data(), out_scales.size() * 4,
                text + ": scales");
  }
}

Bytes expect_sums(const ExpertCase& c, const ExpertRows& local, const Bytes& rows,
                  const std::vector<float>& weights) {
  const std::int64_t topk = c.shape.topk;
  const std::int64_t columns = c.row_bytes / static_cast<std::int64_t>(size_of(c.dtype));
  Bytes out(at(local.received * c.row_bytes));
  std::vector<float> acc(at(columns));
  for (std::int64_t row = 0; row < local.received; ++row) {
    std::fill(acc.begin(), acc.end(), 0.0f);
    for (std::int64_t k = 0; k < topk; ++k) {
      const std::int64_t slot = local.expected.slot_rows[at(row * topk + k)];
      if (slot < 0) continue;
      const std::byte* from = rows.data() + slot * c.row_bytes;
      for (std::int64_t i = 0; i < columns; ++i) {
        const float x = conformance::load(from, c.dtype, i);
        acc[at(i)] =
            c.weighted ? std::fma(weights[at(row * topk + k)], x, acc[at(i)]) : acc[at(i)] + x;
      }
    }
    for (std::int64_t i = 0; i < columns; ++i) {
      conformance::store(out.data() + row * c.row_bytes, c.dtype, i, acc[at(i)]);
    }
  }
  return out;
}

void run_barrier(KernelGroup& group) {
  group.launch([&](int r) {
    BarrierParameters p;
    p.group = group.view(r);
    p.call.kind = CallKind::barrier;
    p.failure = group.failure(r);
    FERRY_CUDA_CHECK(launch_barrier(p, group.stream(r)));
  });
  group.wait_well();
}

}  // namespace ferry::cuda::test
