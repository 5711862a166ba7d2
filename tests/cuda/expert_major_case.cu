#include "expert_major_case.hpp"

namespace ferry::cuda::test {

std::string ExpertCase::text() const {
  std::string s = "ranks ";
  s += std::to_string(shape.ranks) + ", experts " + std::to_string(shape.experts) + ", top-k " +
       std::to_string(shape.topk) + ", row bytes " + std::to_string(row_bytes) + ", scales " +
       std::to_string(scale_columns) + ", alignment " + std::to_string(alignment) + ", spare " +
       std::to_string(spare) + ", out spare " + std::to_string(out_spare) + ", " +
       std::string(name_of(dtype)) + ", weighted " + std::to_string(weighted) + ", sms " +
       std::to_string(sms) + ", piece " + std::to_string(fan_out.piece_bytes) + ", stages " +
       std::to_string(fan_out.stages) + "/" + std::to_string(sum.stages) + ", vectors " +
       std::to_string(sum.vectors) + ", warps " + std::to_string(sum.warps);
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
