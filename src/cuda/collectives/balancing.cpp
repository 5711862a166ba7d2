// Plans of copies on a GPU: one kernel or two a call.
#include <string>

#include "core/check.hpp"
#include "core/experts/gpu_balancing.hpp"
#include "cuda/engine.hpp"
#include "cuda/kernels/collectives/balance.hpp"
#include "cuda/runtime/runtime.hpp"

namespace ferry::cuda {
namespace {

BalanceRoutes routes_of(const ConstTensorView& topk_idx) {
  return {topk_idx.data, topk_idx.shape.product(), topk_idx.dtype == Dtype::i64};
}

class CudaBalancing final : public GpuBalancing {
 public:
  CudaBalancing(const BatchPlanShape& shape, const TensorView& memory, const Stream& stream)
      : shape_(shape), state_(static_cast<std::byte*>(memory.data)), device_(memory.device.index) {
    const OnDevice here(device_);
    const cudaError_t loaded = load_balance_kernels(shape);
    if (loaded == cudaErrorInvalidValue) {
      refuse("GpuBalancer", "experts",
             std::to_string(shape.experts) + " with " + std::to_string(shape.places()) +
                 " slots on " + std::to_string(shape.ranks) + " ranks",
             "what the shared memory of a block holds, on 64 ranks at most; BatchBalancer has no "
             "such limit");
    }
    check(loaded, "load_balance_kernels");
    const BalanceStateLayout at = make_balance_state_layout(shape);
    check(cudaMemsetAsync(state_ + at.header, 0, sizeof(BalanceHeader), native(stream)),
          "cudaMemsetAsync");
    check(cudaMemsetAsync(state_ + at.held, 0xff, at.load - at.held, native(stream)),
          "cudaMemsetAsync");
    check(cudaMemsetAsync(state_ + at.load, 0, at.tallies - at.load, native(stream)),
          "cudaMemsetAsync");
  }

  void counts(const ConstTensorView& topk_idx, const TensorView& out, Stream& stream) override {
    const OnDevice here(device_);
    check(launch_balance_counts(routes_of(topk_idx), shape_.experts,
                                static_cast<std::int32_t*>(out.data), native(stream)),
          "launch_balance_counts");
  }
  void plan(const ConstTensorView& counts, std::uint64_t changed, bool again,
            Stream& stream) override {
    const OnDevice here(device_);
    BalanceJob job{.changed = changed, .again = again, .state = state_};
    job.plan.counts = static_cast<const std::int32_t*>(counts.data);
    job.plan.stride = counts.shape[1];
    check(launch_balance_plan(shape_, job, native(stream)), "launch_balance_plan");
  }
  void fetched(Stream& stream) override {
    const OnDevice here(device_);
    check(launch_balance_fetched(shape_, state_, native(stream)), "launch_balance_fetched");
  }
  void places(const ConstTensorView& topk_idx, int rank, const TensorView& out,
              Stream& stream) override {
    const OnDevice here(device_);
    check(launch_balance_places(shape_, state_, routes_of(topk_idx), rank,
                                static_cast<std::int64_t*>(out.data), native(stream)),
          "launch_balance_places");
  }

 private:
  static cudaStream_t native(const Stream& stream) {
    return static_cast<cudaStream_t>(stream.native());
  }

  BatchPlanShape shape_;
  std::byte* state_;
  int device_;
};

}  // namespace

std::shared_ptr<GpuBalancing> make_gpu_balancing(const BatchPlanShape& shape,
                                                 const TensorView& memory, const Stream& stream) {
  return std::make_shared<CudaBalancing>(shape, memory, stream);
}

}  // namespace ferry::cuda
