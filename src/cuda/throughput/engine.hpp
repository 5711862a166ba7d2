// The CUDA engine, throughput mode: everything that ranks tell each other in a call they tell on
// the GPU; the CPU launches, hands out memory, and looks after the peers.
#pragma once
#include <algorithm>
#include <atomic>
#include <chrono>
#include <cstdint>
#include <deque>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <optional>
#include <span>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "core/engine.hpp"
#include "core/placement.hpp"
#include "core/plan_state.hpp"
#include "cuda/kernels/throughput/kernels.hpp"
#include "cuda/runtime/gpu_memory.hpp"
#include "cuda/runtime/pinned.hpp"
#include "cuda/runtime/segment_exchange.hpp"
#include "cuda/throughput/call.hpp"
#include "cuda/throughput/failure.hpp"
#include "cuda/throughput/gpu_page.hpp"
#include "cuda/throughput/plan.hpp"
#include "cuda/throughput/quarantine.hpp"
#include "engine/channel.hpp"
#include "engine/late_tuner.hpp"
#include "engine/membership/current_view.hpp"
#include "engine/membership/regroup.hpp"
#include "engine/memory.hpp"
#include "engine/row_guess.hpp"
#include "engine/time_swap.hpp"
#include "engine/vault/vault.hpp"

namespace ferry::cuda {

class VaultOnGpu;

/// What creation yields (create.cpp).
struct Parts {
  std::shared_ptr<engine::Memory> cpu{};  ///< the host's fabric
  fabric::Segment cpu_control{};
  std::shared_ptr<GpuMemory> gpu{};
  fabric::Segment control{};  ///< in GPU memory: flags, mailboxes, then the table of segments
  DeviceControlLayout layout{};
  int sharing = 1;  ///< ranks on this GPU
  int num_sms = 1;  ///< of this GPU
};

/// What the monitor reads to know whether a call still waits for a peer.
struct PeerWords {
  std::uint64_t last;    ///< call that has ended here
  std::uint64_t own;     ///< first word of this rank's message in the call after it
  std::uint64_t theirs;  ///< of the peer's
  std::uint64_t blocks;  ///< of the peer's dispatch
  std::uint64_t delivered[kMaxBlocks];
  std::uint64_t done;
};

/// What has its part in a change of epochs beside the calls: a latency exchange. No kernel of the
/// group runs then.
class EpochMember {
 public:
  virtual ~EpochMember() = default;
  /// The newest generation of its own that this rank knows of.
  virtual std::uint64_t newest_used() = 0;
  /// The channel and the memory of the peers are those of the next epoch, whose first generation is
  /// above what `newest_used` says on each of its ranks.
  virtual void begin_epoch(const engine::Epoch& next) = 0;
};

/// Of a latency exchange, until the group ends.
struct LatencySegment {
  fabric::Segment memory{};
  /// Offset of a u32 for each rank, which says that nothing of it comes any more (cuda::Gone); 0:
  /// the exchange has no masks.
  std::size_t gone = 0;
  std::weak_ptr<EpochMember> exchange{};
  /// Memory of peers that it writes to; as long as the exchange lives, or kernels of it may run.
  std::vector<std::shared_ptr<std::byte>> held{};
  std::vector<bool> told{};  ///< of whose end; for `gone`
};

/// What the CPU writes at once into the control segment, at most.
inline constexpr std::size_t kWriteBytes =
    round_up(std::max(sizeof(LocalWords), kMaxSegments * sizeof(PeerSegment)), kLineBytes);

/// Flags and mailboxes of the ranks' CPUs.
ControlLayout cpu_layout(int ranks);
/// The same of what they offer each other (SegmentExchange), behind them.
ControlLayout offer_layout(int ranks);
/// The same, with how processes that join reach GPU memory, or with what a tuner tells.
std::size_t cpu_control_bytes(const GroupConfig& config, int ranks);

class CudaEngine final : public Engine, public std::enable_shared_from_this<CudaEngine> {
 public:
  CudaEngine(const GroupConfig& config, Parts parts);
  ~CudaEngine() override;
  /// After creation: fills the table of segments and starts the monitor.
  void start();
  /// Instead, of a process that takes the place of a lost rank: waits until the others take it in.
  /// `ticket`: 0: it begins the group.
  void start_alone(std::uint64_t ticket);

  int rank() const override { return channel_.rank(); }
  int size() const override { return channel_.size(); }
  const GroupConfig& config() const override { return config_; }
  std::vector<TunedCall> tuning() const override;
  std::string fabric_name() const override { return std::string(parts_.cpu->fabric->name()); }

  Plan plan(const ConstTensorView& topk_idx, const PlanOptions& options) override;
  Received dispatch(const ConstTensorView& x, const Plan& plan,
                    const DispatchOptions& options) override;
  Received plan_and_dispatch(const ConstTensorView& x, const ConstTensorView& topk_idx,
                             const DispatchOptions& options) override;
  Combined combine(const ConstTensorView& rows, const Plan& plan,
                   const CombineOptions& options) override;
  /// Defined by latency mode (latency/engine.cpp), which is built on this engine.
  std::shared_ptr<LatencyEngine> make_latency(const LatencyConfig& config) override;
  std::shared_ptr<VaultEngine> make_vault(std::size_t version_bytes) override;

  Tensor empty(const Extents& shape, Dtype dtype) override;
  bool is_registered(const void* pointer) const override;
  void record_stream(const void* pointer, const Stream& stream) override;
  void barrier() override;
  std::vector<std::vector<std::byte>> gather(std::span<const std::byte> mine) override;
  ferry::GroupView group_view() const override { return now_.get(); }
  ferry::GroupView regroup() override;
  bool commit(std::uint64_t step) override;
  std::uint64_t epoch() const override { return now_.epoch(); }
  MemoryStats memory() const override;
  TimeStats time() const override;
  void destroy() override;
  bool destroyed() const override { return channel_.left(); }
  Metrics metrics() const override { return channel_.record().metrics(); }

  // For the jobs of this engine (plan.cpp, dispatch.cpp, combine.cpp) and their events.
  engine::Channel& channel() { return channel_; }
  void check_usable(const char* call);
  GpuMemory& gpu() { return *parts_.gpu; }
  Device device() const { return {DeviceKind::cuda, parts_.gpu->device()}; }
  const GroupView& view() const { return view_; }
  const GroupWords& words() const { return words_; }
  /// Zeroed memory that kernels and the CPU share, enough for the counts of a plan, for a while:
  /// whoever makes and frees its own waits for every kernel on this GPU, and they may wait for
  /// peers.
  std::shared_ptr<std::byte> pinned_words() { return counts_->take(); }
  const Placement& placement() const { return placement_; }
  /// Checks `asked`; 0: the default. Ranks that share a GPU share its SMs.
  int sms_for(const char* call, int asked, int by_default = 16) const;
  /// The same of a dispatch or combine of so many tokens of this rank: the default is the tuner's.
  /// `split`: of two parts with others' work between, or captured: nothing is tried or timed.
  int tuned_sms(Launch& launch, int asked, std::int64_t tokens, bool split, TuningKey key);
  /// Of a group whose lost ranks are replaced.
  bool elastic() const { return !config_.elastic.empty(); }
  bool shares_gpu() const { return parts_.sharing > 1; }
  /// For what a call does in this GPU's memory alone: all of this rank's share.
  int local_sms() const { return std::max(1, parts_.num_sms / parts_.sharing); }
  enum class Pieces {
    any,    ///< makes room first if there is none
    spare,  ///< of what there is
    idle,   ///< as any, for kernels that run already: of pieces that nobody uses any more
  };
  /// Registered pieces for a call, all of them or none. None: the GPU's memory is exhausted.
  std::optional<std::vector<Held>> take_registered(Launch& launch,
                                                   const std::vector<std::size_t>& sizes,
                                                   Pieces pieces = Pieces::any);
  /// What calls that guess their rows share; guarded by the group's turn.
  engine::RowGuess& row_guess() { return row_guess_; }
  /// Of dispatches that guessed; for tests and benchmarks.
  struct Guesses {
    std::atomic<std::uint64_t> made{0};
    std::atomic<std::uint64_t> too_low{0};
  };
  Guesses& guesses() { return guesses_; }
  Tensor local_tensor(Launch& launch, const Extents& shape, Dtype dtype);
  /// Fails the group in the midst of a call.
  void give_up(const char* call, const std::exception& why);
  /// Registers a segment and offers it to the peers, who have mapped it on return. bytes 0: the
  /// GPU's memory is exhausted.
  fabric::Segment add_segment(const char* call, std::size_t bytes);
  void add_latency_memory(LatencySegment segment);
  /// Pinned and zeroed: a LatencyAlarm.
  std::shared_ptr<std::byte> take_alarm() { return alarms_->take(); }
  bool is_latency_memory(const void* pointer) const;
  /// Latency exchanges are of a larger group than this engine, whose ranks are `members` of it,
  /// ascending: the kernels of those exchanges count ranks as that group does. Before any call.
  void join_group(std::vector<int> members) { members_ = std::move(members); }
  const std::vector<int>& members() const { return members_; }
  /// A rank of this engine, as latency exchanges count.
  int group_rank(int rank) const {
    return members_.empty() ? rank : members_[static_cast<std::size_t>(rank)];
  }
  /// That group goes on with fewer ranks (regroup.hpp).
  void regroup_inside(const std::function<engine::Epoch(engine::Generation used)>& agree);
  /// The rank beyond this engine on whose account it has failed, of the larger group; none.
  std::optional<Failure> failed_beyond() const { return fatal_.beyond(); }
  /// Waits for calls on their way; false: not all have ended by then.
  bool settle(std::chrono::nanoseconds most) { return drain(most); }
  /// Tells the peers' messages what this CPU does while kernels wait for it, until its call is
  /// launched.
  void stay_in(CallKind kind);
  /// Waits for a call that returns finished results. Ctrl-C fails the group, which ends the call.
  void finish(const char* call, const Event& event);
  /// The error of a group whose kernels have told of a fatal failure.
  Error fatal_error() { return fatal_.error(*this); }

 private:
  friend class Launch;
  friend class EpochChange;
  friend class VaultOnGpu;
  void check_can_regroup(const char* call) const;
  /// Until all calls on their way have ended; by the thread whose turn it is. Throws
  /// Error(deadline).
  void await_calls(const char* call);
  /// The words of that error.
  std::string still_runs(const char* call) const;
  void throw_untold(const char* call);
  /// What calls took that have ended, from here and from the peers.
  void take_times();
  void note_end(CallRecord& record);
  /// Whether a rank that was lost may still write to this one's memory.
  bool lost_may_write();
  void free_held();
  Held take_unwritten(std::size_t bytes, const User& user, Pieces pieces);
  /// In its control segment: takes what is stored for lost ranks.
  std::byte* nowhere() const;
  void write_control(const void* from, std::size_t offset, std::size_t bytes);
  bool grow(const char* call, std::size_t bytes);
  void write_table(int peer, fabric::SegmentId segment, std::byte* data, std::size_t bytes);
  void write_table(int peer);
  bool map(int peer, const GpuPage& page);
  bool map_offer(const SegmentExchange::Offer& offer);
  void load_copies();
  bool drain(std::chrono::nanoseconds most);
  bool comes_to_rest(std::chrono::nanoseconds most);
  /// Until all that this process has launched on the GPU has ended. Throws Error(system).
  void await_device(std::chrono::nanoseconds most, const char* call);
  void monitor();
  void look_after_peers();
  void serve_offers();
  void tell_of_gone();
  std::vector<std::shared_ptr<EpochMember>> exchanges();
  bool tell_of_death(std::byte* word);
  std::uint64_t ended_calls();
  /// Whether the call that runs on the GPU now still needs something from this peer.
  bool awaits(int peer);
  /// Whether a send or a recv is under way. −1: with any rank.
  bool has_transfer(int peer = -1);
  bool transfers_with(int peer);
  void read_control(std::byte* to, std::size_t offset, std::size_t bytes);
  void wait_aux(std::chrono::nanoseconds most);

  GroupConfig config_;
  Parts parts_;
  std::vector<int> members_{};
  Placement placement_;
  engine::Channel channel_;
  SegmentExchange segments_;
  /// Of this rank, which not all have mapped: a death or `regroup` cut the offer off. Offered again
  /// before more is registered.
  std::vector<fabric::Segment> offered_{};
  /// By peer, whose offer could not be mapped since then; of the monitor.
  std::map<int, std::chrono::steady_clock::time_point> refused_since_{};
  std::shared_ptr<PinnedPool> failures_;
  std::shared_ptr<PinnedPool> counts_;
  std::shared_ptr<PinnedPool> alarms_;
  GroupWords words_{};
  GroupView view_{};
  cudaStream_t aux_ = nullptr;  // small copies beside running calls

  std::timed_mutex turn_;               // of calls
  std::shared_ptr<CallRecord> last_{};  // of the last call that was not captured
  unsigned long long last_stream_ = 0;
  GpuEvent captured_last_{};  // of the last one that was
  unsigned long long captured_stream_ = 0;
  unsigned long long capture_id_ = 0;
  unsigned long long counted_capture_ = 0;
  std::uint64_t captured_calls_ = 0;  // into that one
  bool has_graphs_ = false;           // or had
  std::uint64_t calls_ = 0;           // without those that were captured
  engine::LateTuner tuner_;
  CallClock clock_;
  std::optional<engine::TimeSwap> times_{};  // where calls are timed
  engine::RowGuess row_guess_{};
  Guesses guesses_{};
  engine::CurrentView now_;
  std::unique_ptr<engine::Regroup> regroup_{};  // of the thread whose turn it is
  std::shared_ptr<EpochEnd> epoch_end_ = std::make_shared<EpochEnd>();
  Quarantine quarantine_{};
  std::unique_ptr<VaultOnGpu> vault_on_gpu_;  // of `vault_`
  engine::GroupVault vault_{};
  std::mutex watching_;  // the monitor looks at the group
  bool held_ = false;    // as LocalWords has it; guarded by watching_
  std::size_t control_bytes_ = 0;

  std::mutex flight_mutex_;
  struct Flight {
    std::shared_ptr<CallRecord> record{};
    std::vector<std::shared_ptr<void>> kept{};  ///< until the call has ended
  };
  std::deque<Flight> in_flight_;
  bool stays_ = false;                               // in a call whose kernels wait for this CPU
  std::vector<std::shared_ptr<CallRecord>> untold_;  // refused, and nobody has asked
  std::vector<std::weak_ptr<CallRecord>> captured_;  // of graphs; guarded by turn_

  std::mutex wire_mutex_;                 // the table, aux_
  std::shared_ptr<std::byte> staging_{};  // pinned: for writing, for reading, for what says dead
  mutable std::mutex latency_mutex_;
  std::vector<LatencySegment> latency_segments_{};
  FatalFailure fatal_{};
  std::atomic<std::uint64_t> exchange_ns_{0};
  std::atomic<std::uint64_t> wait_ns_{0};
  std::atomic<bool> leaving_{false};
  std::atomic<bool> stopping_{false};
  std::thread monitor_{};
};

}  // namespace ferry::cuda
