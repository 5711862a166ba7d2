// Latency mode of the CUDA engine: one segment of registered memory for each exchange, which holds
// everything: what peers write, two results, and the words of the kernels.
#pragma once
#include <array>
#include <atomic>
#include <memory>
#include <mutex>
#include <optional>

#include "core/claim.hpp"
#include "core/engine.hpp"
#include "cuda/cuda_engine.hpp"
#include "cuda/kernels/latency.hpp"

namespace ferry::cuda {

inline constexpr const char* kLatencyDispatch = "latency dispatch";
inline constexpr const char* kLatencyCombine = "latency combine";

/// One result and what its combine needs; offsets in the segment.
struct LatencyResultLayout {
  std::size_t handle = 0;        ///< LatencyHandle
  std::size_t slots = 0;         ///< i32 [R, capacity, topk]
  std::size_t routes = 0;        ///< i32 [capacity, topk]: own
  std::size_t weights = 0;       ///< f32 [capacity, topk]: own, for a combine with a hook
  std::size_t x = 0;             ///< [local experts, R · capacity, hidden]
  std::size_t scales = 0;        ///< f32 [local experts, C, R · capacity]
  std::size_t counts = 0;        ///< i32 [local experts]
  std::size_t source_token = 0;  ///< i32 [local experts, R · capacity]
  std::size_t ranges = 0;        ///< i64 [local experts, R]
};

/// The segment of one rank; all ranks have the same.
struct LatencyMemory {
  DeviceLatencyLayout wire{};
  std::size_t words = 0;  ///< LatencyWords
  std::array<LatencyResultLayout, 2> results{};
  std::size_t bytes = 0;
};
LatencyMemory make_latency_memory(const LatencyConfig& config, std::int64_t experts, int ranks);

class CudaLatency;

/// Keeps one of the two results in use.
class LatencyLease {
 public:
  LatencyLease(std::shared_ptr<CudaLatency> engine, std::size_t result)
      : engine_(std::move(engine)), result_(result) {}
  ~LatencyLease();
  LatencyLease(const LatencyLease&) = delete;
  LatencyLease& operator=(const LatencyLease&) = delete;

 private:
  std::shared_ptr<CudaLatency> engine_;
  std::size_t result_;
};

/// One dispatch and its combine.
struct LatencyRound {
  std::shared_ptr<LatencyLease> lease{};
  LatencyDispatchParameters dispatch{};  ///< without the input
  LatencyCombineParameters combine{};
  std::atomic<bool> combined{false};
};

class CudaLatency final : public LatencyEngine, public std::enable_shared_from_this<CudaLatency> {
 public:
  CudaLatency(std::shared_ptr<CudaEngine> engine, const LatencyConfig& config,
              const LatencyMemory& memory, const fabric::Segment& segment, const LatencyView& view);

  const LatencyConfig& config() const override { return config_; }
  LatencyReceived dispatch(const ConstTensorView& x, const ConstTensorView& topk_idx,
                           const LatencyDispatchOptions& options) override;
  LatencyCombined combine(const ConstTensorView& rows, const LatencyReceived& received,
                          const std::optional<ConstTensorView>& topk_weights,
                          const LatencyCombineOptions& options) override;

  /// The second halves. `stream` null: they block. `claim` is kept once they take place.
  void receive_rows(const LatencyRound& round, const Stream* stream, Claim& claim);
  void receive_sums(const LatencyRound& round, const Stream* stream, Claim& claim);
  void drop(std::size_t result);

 private:
  template <class T>
  T* at(std::size_t offset) const {
    return reinterpret_cast<T*>(segment_.data + offset);
  }
  std::int64_t local_experts() const { return view_.placement.local_experts(view_.group.rank); }
  std::int64_t output_rows() const { return view_.group.ranks * config_.capacity; }
  int blocks() const;
  CallSignature signature(CallKind kind) const;
  std::shared_ptr<LatencyRound> begin(const LatencyDispatchOptions& options, std::int64_t tokens,
                                      int topk);
  LatencyReceived make_tensors(const std::shared_ptr<LatencyRound>& round,
                               const LatencyDispatchOptions& options) const;
  void enter_dispatch(Launch& launch);
  const std::byte* aligned(Launch& launch, const ConstTensorView& tensor) const;
  Event end(Launch& launch, const char* call);

  std::shared_ptr<CudaEngine> engine_;
  LatencyConfig config_;
  LatencyMemory memory_;
  fabric::Segment segment_;
  LatencyView view_;
  std::mutex mutex_;  // of what follows: results are dropped on any thread
  std::uint64_t dispatches_ = 0;
  std::array<bool, 2> alive_{};
};

/// Collective: registers the memory on every rank of the group.
std::shared_ptr<LatencyEngine> make_cuda_latency(std::shared_ptr<CudaEngine> engine,
                                                 const LatencyConfig& config);

}  // namespace ferry::cuda
