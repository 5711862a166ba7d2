// Collectives of the CUDA engine: one kernel a call, on an engine of their own for its flags, its
// registered memory and its order of calls.
#pragma once
#include <cstddef>
#include <cstdint>
#include <memory>
#include <vector>

#include "core/engine.hpp"
#include "cuda/kernels/collectives/collective.hpp"
#include "cuda/runtime/pinned.hpp"
#include "cuda/throughput/engine.hpp"
#include "fabric/fabric.hpp"

namespace ferry::cuda {

/// Bytes of a message, which holds the counts of all_to_all.
std::size_t collective_body_bytes(int ranks);

class CudaCollectives final : public CollectivesEngine {
 public:
  /// `engine`: of nobody else. `memory`: of the layout for so many ranks, of the same number on
  /// all. `most_blocks`: that run at once on every rank.
  CudaCollectives(std::shared_ptr<CudaEngine> engine, const fabric::Segment& memory,
                  int most_blocks);

  Event all_reduce(const TensorView& x, const ReduceOptions& options) override;
  Event reduce_scatter(const ConstTensorView& x, const TensorView& out,
                       const ReduceOptions& options) override;
  Event all_gather(const ConstTensorView& x, const TensorView& out,
                   const CollectiveOptions& options) override;
  Event broadcast(const TensorView& x, int root, const CollectiveOptions& options) override;
  Event all_to_all(const ConstTensorView& x, const TensorView& out, BlockCounts counts,
                   const CollectiveOptions& options) override;
  // For collectives of several domains, on a stream; `x`, `own` of any memory of this GPU or
  // pinned.

  /// Rank r gets elements [r · share, (r + 1) · share) of what is reduced of all; a mean is a sum.
  Event reduce_shares(const ConstTensorView& x, ReduceOp op, std::int64_t share, void* own,
                      const CollectiveOptions& options);
  /// `own` is [r · share, (r + 1) · share) of the `bytes` that all ranks get.
  Event gather_shares(const void* own, std::int64_t bytes, std::int64_t share, void* out,
                      const CollectiveOptions& options);

  Event send(const ConstTensorView& x, int peer, int tag,
             const CollectiveOptions& options) override;
  Event recv(const TensorView& x, int peer, int tag, const CollectiveOptions& options) override;

  using CollectivesEngine::move_rows;
  Event move_rows(const ConstTensorView& x, const TensorView& out, const GpuRowTable& table,
                  const CollectiveOptions& options) override;
  Choice choice(std::size_t bytes, bool /*any_order*/) const override {
    return {.algorithm = is_small(static_cast<std::int64_t>(bytes)) ? Algorithm::one_shot
                                                                    : Algorithm::direct,
            .shares = {1.0},
            .latency_seconds = {0.0},
            .bytes_per_second = {0.0}};
  }
  Device device() const override { return engine_->device(); }
  Engine& engine() override { return *engine_; }

 private:
  static constexpr int kDefaultSms = 32;  ///< of a call

  CollectiveParameters parameters(CallKind kind, Dtype dtype, std::int64_t elements, int num_sms,
                                  int default_sms = kDefaultSms);
  std::int64_t chunk_of(const CollectiveParameters& parameters, std::int64_t piece) const;
  void place(CollectiveParameters& parameters, const void* data, std::int64_t bytes) const;
  void split(CollectiveParameters& parameters, const BlockCounts& counts, std::byte* slot) const;
  /// `largest`: bytes of a piece; 0 with counts, of which no rank knows the largest.
  Event run(CollectiveParameters& parameters, std::int64_t largest, bool one_shot,
            const Stream* stream, std::shared_ptr<std::byte> slot = {});
  // transfers.cpp
  CollectivePlace shown(Launch& launch, const void* data, std::int64_t bytes);
  Event transfer(Stage stage, const ConstTensorView& x, int peer, int tag,
                 const CollectiveOptions& options);
  bool is_small(std::int64_t bytes) const {
    return bytes <= static_cast<std::int64_t>(layout_.one_shot_bytes);
  }

  std::shared_ptr<CudaEngine> engine_;
  CollectiveLayout layout_;
  std::uint32_t segment_;
  int most_blocks_;
  std::shared_ptr<PinnedPool> counts_;
  std::vector<std::uint64_t> offers_;  ///< to each rank, so far
};

}  // namespace ferry::cuda
