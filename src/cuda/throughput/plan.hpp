// A plan of the CUDA engine, and how it is made: the count exchange on the GPU.
#pragma once
#include <atomic>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <mutex>
#include <vector>

#include "core/plan_state.hpp"
#include "cuda/kernels/throughput/kernels.hpp"
#include "cuda/runtime/gpu_memory.hpp"
#include "cuda/throughput/call.hpp"
#include "ferry/group.hpp"

namespace ferry::cuda {

class CudaEngine;

/// A plan in the memory of this GPU.
class CudaPlan final : public PlanState {
 public:
  /// Its stream may be gone afterwards.
  ~CudaPlan();

  Held memory{};  ///< empty: there was none, and the plan only says so
  PlanView view{};
  bool captured = false;
  /// Rows of one source do not lie together at their ranks: destinations say where they lie, and
  /// what counts on the order of a source's rows is left out (domains/plan.cpp).
  bool scattered = false;
  const std::int32_t* token_names = nullptr;  ///< [T], or null: what source_token says of a token
  std::size_t routes_state = 0;        ///< where in `memory` it says whether the routes have come
  std::shared_ptr<CallRecord> made{};  ///< by this call
  std::shared_ptr<EventPool> events{};
  std::shared_ptr<std::byte> slot{};  ///< pinned counts
  HostCounts* counts = nullptr;
  std::int32_t* count_words = nullptr;

  /// Of received rows, once a dispatch has brought them. Guarded by the group's turn.
  struct Routes {
    Held side{};                           ///< registered: tokens and ids, as peers wrote them
    const std::int32_t* ids = nullptr;     ///< i32 [rows, K], local ids
    std::int32_t* source_token = nullptr;  ///< i32 [rows], inside `side`
    std::int64_t rows = 0;
    Tensor topk_idx{};                      ///< i64 [≥ rows, K]; of `rows` rows: inside `side`
    Tensor tokens{};                        ///< i32 [≥ rows]; the same
    std::shared_ptr<CallRecord> carrier{};  ///< the dispatch that brought them
  };
  Routes gpu_routes{};
  /// gpu_routes.carrier, for those who have not the turn: only to be compared.
  std::atomic<const CallRecord*> carrier{nullptr};
  struct Slots {
    std::int64_t alignment = 1;
    Tensor rows{};                        ///< i64 [capacity, K]
    Tensor offsets{};                     ///< i64 [local experts + 1]
    std::uint64_t* made = nullptr;        ///< on the GPU, behind them: 1 when both are there
    std::shared_ptr<CallRecord> maker{};  ///< the dispatch
  };
  std::vector<Slots> slot_rows{};  ///< of the expert-major dispatches, one for each alignment

  /// For calls that use the routes: the GPU refuses them, on all ranks alike, unless a dispatch has
  /// brought them.
  PlanView routed() const {
    PlanView same = view;
    same.layout.state = routes_state;
    return same;
  }
  /// The GPU has said what became of the counts.
  bool told() const { return std::atomic_ref(counts->done).load(std::memory_order_acquire) != 0; }
  /// They are in `exchange`; false: not there (yet).
  bool counts_known();

 private:
  void fill_exchange();

  std::once_flag filled_;
};

/// The state of a plan of this engine; refuses others.
std::shared_ptr<CudaPlan> plan_of(CudaEngine& engine, const Plan& plan, const char* call);

Plan plan_routes(CudaEngine& engine, const ConstTensorView& topk_idx, const PlanOptions& options);
/// All of a plan but its call.
std::shared_ptr<CudaPlan> prepare_plan(CudaEngine& engine, Launch& launch,
                                       const ConstTensorView& topk_idx,
                                       std::uint64_t placement_digest, PlanParameters& parameters);
void enter_plan(Launch& launch, const std::shared_ptr<CudaPlan>& plan,
                const PlanParameters& parameters);

/// Takes part in a call for which this rank has no memory, so that every rank learns of it.
void tell_no_room(CudaEngine& engine, Launch& launch, const CallSignature& call, std::size_t bytes);
/// Takes part in a dispatch whose plan this rank has no memory for.
[[noreturn]] void refuse_without_plan(CudaEngine& engine, Launch& launch, const CudaPlan& plan,
                                      const CallSignature& call);

}  // namespace ferry::cuda
