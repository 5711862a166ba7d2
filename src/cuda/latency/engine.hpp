// Latency mode of the CUDA engine: one segment of registered memory for each exchange, which holds
// everything: what peers write, two results, and the words of the kernels.
#pragma once
#include <array>
#include <atomic>
#include <functional>
#include <memory>
#include <mutex>
#include <optional>
#include <vector>

#include "base/claim.hpp"
#include "core/engine.hpp"
#include "cuda/kernels/latency/kernels.hpp"
#include "cuda/latency/memory.hpp"
#include "cuda/throughput/engine.hpp"

namespace ferry::cuda {

inline constexpr const char* kLatencyDispatch = "latency dispatch";
inline constexpr const char* kLatencyCombine = "latency combine";

/// Who has one of the two buffers of results.
struct ResultBuffer {
  bool alive = false;
  std::uint64_t number = 0;        ///< of the dispatch that has it, or had it last
  unsigned long long capture = 0;  ///< in which that dispatch is; 0: in none
  int graphs = 0;                  ///< dispatches of graphs that write to it
};

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
  std::size_t result = 0;               ///< which of the two
  std::uint64_t rejoins = 0;            ///< of the exchange, and epochs, before this round
  std::optional<TensorView> wait_ns{};  ///< of the dispatch
  RowOrder order = RowOrder::expert_major;
  bool weighted = false;                 ///< weights came with it
  LatencyDispatchParameters dispatch{};  ///< without the input
  LatencyCombineParameters combine{};
  std::atomic<bool> combined{false};
};

/// The second half of a dispatch. One that could not begin may be called again.
struct ReceiveRows final : LatencyState {
  std::shared_ptr<CudaLatency> engine{};
  std::shared_ptr<LatencyRound> round{};
  std::optional<Stream> stream{};
  std::atomic<bool> called{false};
  void receive() override;
};

[[noreturn]] void refuse_second_receive(const char* call);
/// Throws when a rank goes on without this one.
void throw_evicted(const LatencyAlarm& alarm, const char* call, int rank);
std::optional<Stream> copy_of(const Stream* stream);

/// Of an exchange whose group has other domains than the engine's.
struct LatencyGroup {
  int rank = 0;
  Placement placement{};       ///< over all ranks
  std::vector<int> members{};  ///< the ranks of the own domain, ascending
  int domains = 1;
  std::byte* outbox = nullptr;  ///< as the exchange's memory says, pinned and zeroed
  std::byte* inbox = nullptr;
  std::shared_ptr<void> memory{};  ///< keeps both
  /// What an error of the engine says to the group's ranks.
  std::function<Error(const char* call, const Error& error)> told{};
};

/// A rank's memory of the exchange, held; null: its seat was a hole.
struct LatencyPeer {
  fabric::SegmentId segment = 0;
  std::shared_ptr<std::byte> memory{};
};

/// What the making of an exchange yields (create.cpp).
struct LatencyParts {
  LatencyConfig config{};
  LatencyMemory memory{};
  fabric::Segment segment{};
  LatencyView view{};
  std::shared_ptr<std::byte> alarm{};  ///< pinned, a LatencyAlarm; null: no masks
  std::vector<LatencyPeer> peers{};    ///< of each rank of the engine
  std::uint64_t epoch = 0;             ///< of the group
};

/// engine.cpp: memory, masks, epochs; dispatch.cpp; combine.cpp.
class CudaLatency final : public LatencyEngine,
                          public EpochMember,
                          public std::enable_shared_from_this<CudaLatency> {
 public:
  CudaLatency(std::shared_ptr<CudaEngine> engine, LatencyParts parts, const LatencyGroup& group);
  /// Once, before any call, in the epoch in which it was made.
  void begin();

  const LatencyView& view() const { return view_; }
  const LatencyConfig& config() const override { return config_; }
  LatencyReceived dispatch(const ConstTensorView& x, const ConstTensorView& topk_idx,
                           const LatencyDispatchOptions& options) override;
  LatencyCombined combine(const ConstTensorView& rows, const LatencyReceived& received,
                          const std::optional<ConstTensorView>& topk_weights,
                          const LatencyCombineOptions& options) override;

  std::vector<bool> masked() const override;
  void set_mask(int rank, bool masked) override;
  void clear_masks() override;
  const std::uint64_t* mask_count() const override;
  void rejoin() override;

  std::uint64_t newest_used() override;
  void begin_epoch(const engine::Epoch& next) override;

  /// The second halves. `stream` null: they block. `claim` is kept once they take place.
  void receive_rows(const LatencyRound& round, const Stream* stream, Claim& claim);
  void receive_sums(const LatencyRound& round, const std::optional<TensorView>& wait_ns,
                    const Stream* stream, Claim& claim);
  void drop(std::size_t result);

 private:
  int rank() const { return view_.group.rank; }
  int ranks() const { return view_.group.ranks; }
  /// Runs `work`; what the engine throws is said in the group's words.
  template <class Work>
  auto in_group(const char* call, const Work& work) const {
    try {
      return work();
    } catch (const Error& error) {
      if (!told_) throw;
      throw told_(call, error);
    }
  }
  LatencyReceived make_dispatch(const ConstTensorView& x, const ConstTensorView& topk_idx,
                                const LatencyDispatchOptions& options);
  LatencyCombined make_combine(const ConstTensorView& rows, const LatencyReceived& received,
                               const std::optional<ConstTensorView>& topk_weights,
                               const LatencyCombineOptions& options);
  /// Refuses an exchange without masks.
  LatencyAlarm& alarm() const;
  /// Throws when another rank goes on without this one, until it has rejoined; without masks, when
  /// a rank of the exchange is lost.
  void check_evicted(const char* call) const;
  std::vector<int> lost() const;
  /// The ranks that are left go on after this generation, in this epoch of the group.
  void go_on_after(std::uint64_t generation, std::uint64_t epoch);
  /// Between calls, of which none runs.
  template <class LaunchKernel>
  void run_alone(const char* kernel, const LaunchKernel& launch) const;
  /// Refuses a result from before the last rejoin or regroup.
  void check_current(const char* call, const LatencyRound& round) const;
  void change_mask(const char* call, int rank, bool masked);
  void launch_rejoin();
  void check_dispatch(const ConstTensorView& x, const ConstTensorView& topk_idx,
                      const LatencyDispatchOptions& options) const;
  void check_combine(const ConstTensorView& rows, const LatencyRound& round,
                     const std::optional<ConstTensorView>& topk_weights,
                     const LatencyCombineOptions& options) const;
  /// Asks the kernel of a call to tell of its waits (null: not) …
  std::uint64_t* asked(const std::optional<TensorView>& wait_ns) const;
  /// … and adds them to the caller's tensor, behind it.
  void add_waits(Launch& launch, const std::optional<TensorView>& wait_ns) const;
  template <class T>
  T* at(std::size_t offset) const {
    return reinterpret_cast<T*>(segment_.data + offset);
  }
  std::int64_t local_experts() const { return view_.placement.local_experts(view_.group.rank); }
  std::int64_t output_rows() const { return view_.group.ranks * config_.capacity; }
  /// Of a kernel, when every rank has so many tokens.
  int blocks(std::int64_t tokens) const;
  /// Of a dispatch of so many tokens. What comes is guessed: who gets more than it sends needs
  /// little longer with half the blocks.
  int dispatch_blocks(std::int64_t tokens, Halves halves) const;
  CallSignature signature(CallKind kind) const;
  /// One of the two buffers, until `drop`. Error(exhausted): there is none for this dispatch.
  std::size_t take_result(const Capture& capture);
  std::shared_ptr<void> use_in_graph(std::size_t result);
  std::shared_ptr<LatencyRound> begin(const LatencyDispatchOptions& options, std::size_t result,
                                      std::int64_t tokens, int topk);
  LatencyReceived make_tensors(const std::shared_ptr<LatencyRound>& round,
                               const LatencyDispatchOptions& options) const;
  void rank_major(LatencyRound& round) const;
  void enter_dispatch(Launch& launch);
  const std::byte* aligned(Launch& launch, const ConstTensorView& tensor) const;
  std::byte* aligned_out(Launch& launch, const LatencyCombineParameters& p) const;
  std::size_t out_bytes(const LatencyCombineParameters& p) const;
  void run_combine(Launch& launch, const LatencyCombineParameters& p, std::byte* out) const;
  Event end(Launch& launch, const char* call);

  std::shared_ptr<CudaEngine> engine_;
  LatencyConfig config_;
  LatencyMemory memory_;
  fabric::Segment segment_;
  LatencyView view_;
  std::shared_ptr<std::byte> alarm_;
  std::vector<LatencyPeer> peers_;
  std::uint64_t made_in_;                 // epoch
  std::shared_ptr<void> outside_memory_;  // of an exchange with other domains
  std::function<Error(const char*, const Error&)> told_;
  std::atomic<std::uint64_t> rejoins_{0};
  std::atomic<bool> must_rejoin_{false};  // the last attempt failed
  mutable std::mutex mutex_;              // of what follows: results are dropped on any thread
  std::vector<int> lost_{};               // ascending; of an epoch and all after it
  std::uint64_t dispatches_ = 0;
  std::array<ResultBuffer, 2> results_{};
};

/// Collective: registers the memory on every rank of the engine. `group`: of other domains, too.
std::shared_ptr<CudaLatency> make_cuda_latency(std::shared_ptr<CudaEngine> engine,
                                               const LatencyConfig& config,
                                               const LatencyGroup& group = {});

}  // namespace ferry::cuda
