#include <string>

#include "core/check.hpp"
#include "core/experts/balance_state.hpp"
#include "core/experts/batch_planner.hpp"
#include "cuda/engine.hpp"
#include "ferry/experts.hpp"

namespace ferry {
namespace {

constexpr const char* kName = "GpuBalancer";
constexpr int kMostRanks = 64;

BatchPlanShape sizes(std::int64_t experts, int ranks, int slots) {
  return batch_plan_shape({experts, ranks}, slots, 0, 0, 0);
}

void check_rank(const char* call, int rank, int ranks) {
  if (rank < 0 || rank >= ranks) {
    refuse(call, "rank", std::to_string(rank), "0 … " + std::to_string(ranks - 1));
  }
}

void check_topk_idx(const char* call, const ConstTensorView& topk_idx, const Device& where) {
  check_routes(call, topk_idx, where);
  if (!topk_idx.is_dense()) {
    refuse(call, "topk_idx", "strides " + to_string(topk_idx.strides), "a dense tensor");
  }
}

}  // namespace

std::size_t GpuBalancer::memory_bytes(std::int64_t experts, int ranks, int slots) {
  (void)checked_batch_plan_shape(kName, experts, ranks, slots, 0, 0, 0);
  return make_balance_state_layout(sizes(experts, ranks, slots)).bytes;
}

GpuBalancer::GpuBalancer(std::int64_t experts, int ranks, int slots, int domain_size,
                         std::int64_t copy_rows, std::int64_t max_rows, const TensorView& memory,
                         Stream& stream)
    : experts_(experts), ranks_(ranks), slots_(slots), memory_(memory) {
  const BatchPlanShape shape =
      checked_batch_plan_shape(kName, experts, ranks, slots, domain_size, copy_rows, max_rows);
  if (ranks > kMostRanks) {
    refuse(kName, "ranks", std::to_string(ranks), std::to_string(kMostRanks) + " at most");
  }
  const Device gpu{DeviceKind::cuda, memory.device.index};
  const auto bytes = static_cast<std::int64_t>(memory_bytes(experts, ranks, slots));
  check_exact(kName, "memory", memory, Dtype::u8, {bytes}, gpu);
  if (reinterpret_cast<std::uintptr_t>(memory.data) % 256 != 0) {
    refuse(kName, "memory", "another address", "a multiple of 256");
  }
  check_stream(kName, &stream, gpu);
  gpu_ = cuda::make_gpu_balancing(shape, memory, stream);
}

void GpuBalancer::counts(const ConstTensorView& topk_idx, const TensorView& out,
                         Stream& stream) const {
  check_topk_idx("counts", topk_idx, memory_.device);
  check_exact("counts", "out", out, Dtype::i32, {experts_}, memory_.device);
  check_stream("counts", &stream, memory_.device);
  gpu_->counts(topk_idx, out, stream);
}

void GpuBalancer::invalidate(int rank) {
  check_rank("invalidate", rank, ranks_);
  changed_ |= std::uint64_t{1} << rank;
}

void GpuBalancer::plan(const ConstTensorView& counts, Stream& stream, bool again) {
  const bool more = counts.shape.size() == 2 && counts.shape[1] == experts_ + 1;
  check_exact("plan", "counts", counts, Dtype::i32, {ranks_, experts_ + (more ? 1 : 0)},
              memory_.device);
  check_stream("plan", &stream, memory_.device);
  gpu_->plan(counts, changed_, again, stream);
  changed_ = 0;
  state_ = State::missing;
}

void GpuBalancer::fetching() {
  if (state_ == State::missing) state_ = State::there;
}

void GpuBalancer::fetched(Stream& stream) {
  check_stream("fetched", &stream, memory_.device);
  gpu_->fetched(stream);
  fetching();
}

void GpuBalancer::places(const ConstTensorView& topk_idx, int rank, const TensorView& out,
                         Stream& stream) const {
  check_rank("places", rank, ranks_);
  if (state_ != State::there) {
    refuse("places", "the plan", state_ == State::none ? "none" : "copies that are not fetched yet",
           "plan(counts), weights in the slots of fetches(), then fetched()");
  }
  check_topk_idx("places", topk_idx, memory_.device);
  check_exact("places", "out", out, Dtype::i64, topk_idx.shape, memory_.device);
  check_stream("places", &stream, memory_.device);
  gpu_->places(topk_idx, rank, out, stream);
}

ConstTensorView GpuBalancer::part(std::size_t offset, Dtype dtype, Extents shape) const {
  return {static_cast<const std::byte*>(memory_.data) + offset, dtype, shape, memory_.device};
}

ConstTensorView GpuBalancer::table() const {
  return part(make_balance_state_layout(sizes(experts_, ranks_, slots_)).table, Dtype::i32,
              {ranks_, slots_});
}

ConstTensorView GpuBalancer::fetches() const {
  return part(make_balance_state_layout(sizes(experts_, ranks_, slots_)).fetches, Dtype::i32,
              {ranks_, slots_});
}

ConstTensorView GpuBalancer::load() const {
  return part(make_balance_state_layout(sizes(experts_, ranks_, slots_)).load, Dtype::i32,
              {ranks_});
}

ConstTensorView GpuBalancer::plan_id() const {
  const auto at = make_balance_state_layout(sizes(experts_, ranks_, slots_)).header;
  return part(at + offsetof(BalanceHeader, plan_id), Dtype::i64, {1});
}

}  // namespace ferry
