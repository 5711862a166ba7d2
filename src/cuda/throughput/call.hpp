// One call of a group on its way: its place in the order, its stream, what it holds.
#pragma once
#include <atomic>
#include <cstdint>
#include <functional>
#include <initializer_list>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "core/call.hpp"
#include "cuda/kernels/base/group_view.hpp"
#include "cuda/runtime/gpu_memory.hpp"
#include "cuda/throughput/call_clock.hpp"
#include "ferry/error.hpp"
#include "ferry/stream.hpp"

namespace ferry::cuda {

class CudaEngine;

/// What the kernels of a group tell the CPU about its end; pinned memory. Events keep it.
struct GroupWords {
  std::shared_ptr<std::byte> slot{};
  Failure* fatal = nullptr;        ///< the first fatal failure
  std::uint32_t* abort = nullptr;  ///< not 0 asks waiting kernels to stop
  /// Acquire: the record behind it can be read then.
  bool failed() const {
    return std::atomic_ref(fatal->written).load(std::memory_order_acquire) != 0;
  }
  void raise_abort() const { std::atomic_ref(*abort).store(1, std::memory_order_release); }
};

/// What a call has in pinned memory.
struct CallSlot {
  Failure failure{};
  std::uint64_t dead_then = 0;  ///< LocalWords::failed at its end, if the CPU asked for it
  std::uint64_t any_waits = 0;  ///< commit: not 0: a process waits for a place, says some rank
  SecondGrant second{};
};

/// How an epoch of the group has ended, for its calls. Events keep it.
struct EpochEnd {
  std::atomic<bool> over{false};  ///< what follows is there
  Failure fatal{};                ///< its first fatal failure, if it had one
  std::optional<Error> error{};   ///< the same
};

/// What is known of a call after its launch.
struct CallRecord final : Use {
  const char* call = "";
  const char* routes_of = "plan";  ///< of a plan: the caller's call, which has topk_idx
  CallSignature signature{};
  std::int64_t max_recv_rows = 0;
  std::shared_ptr<std::byte> slot{};         ///< pinned, a CallSlot
  Failure* failure = nullptr;                ///< reasons that are not fatal
  std::shared_ptr<const void> fails_in{};    ///< pinned, if `failure` is not in the slot
  std::uint64_t generation = 0;              ///< of the call, if the CPU knows it, else 0
  const std::uint64_t* dead_then = nullptr;  ///< pinned, else: LocalWords::failed at its end
  std::vector<engine::Region> granted{};     ///< where peers may write in this call
  std::shared_ptr<const EpochEnd> epoch{};   ///< in which it was made
  std::vector<std::shared_ptr<CallRecord>> needs{};  ///< earlier calls whose routes it uses
  /// Of a dispatch: its plan's call, and pinned why that was refused.
  std::shared_ptr<CallRecord> plan{};
  std::shared_ptr<const Failure> plan_failure{};
  std::weak_ptr<void> asker{};  ///< while it lives, somebody may still ask
  /// Of a call whose group is larger than the engine's: what it threw in the group's words.
  std::function<Error(const Error&)> told_outside{};
  std::function<void()> on_failure{};   ///< once, when the failure is seen
  std::function<void()> on_wait{};      ///< when somebody has waited for the end; may throw
  int transfer_with = -1;               ///< of send and recv: the peer
  std::uint64_t told_replay = 0;        ///< captured: generation of the last refusal told of
  std::atomic<bool> told{false};        ///< somebody has seen how it ended
  std::atomic<bool> ended_well{false};  ///< seen to have ended before any fatal failure

  CallSlot& pinned() const { return *reinterpret_cast<CallSlot*>(slot.get()); }
  /// Its end is this event, or a later one, unless it is known already.
  void ends_at(GpuEvent marker);
  /// No event yet: behind it in the stream the next kernel would not come early. The call tells of
  /// its end in `word`, pinned; an event is recorded when somebody needs one.
  void ends_untold(const std::uint64_t* word, cudaStream_t stream);
  /// Never blocks. Throws Error(system) when the GPU has failed.
  bool has_ended() const override;
  /// Its event, if it has one.
  GpuEvent marked() const {
    std::scoped_lock lock(mutex_);
    return done_;
  }
  /// What a stream can wait for. Null: the call has ended, or nothing can be recorded now.
  GpuEvent end(EventPool& events) override;
  bool refused() const {
    return std::atomic_ref(failure->written).load(std::memory_order_acquire) != 0;
  }
  /// The caller learns now that it was refused.
  void tell() {
    if (!told.exchange(true, std::memory_order_acq_rel) && on_failure) on_failure();
  }
  /// A later call tells of the refusal, for it is refused with this one.
  void told_by_another() { told.store(true, std::memory_order_release); }
  bool is_over() const { return epoch->over.load(std::memory_order_acquire); }
  /// Whether it came to nothing, as the group failed. To be asked when it has ended.
  bool was_lost(const GroupWords& words) const {
    // In this order: the words are made anew after the epoch is over.
    const bool failed = words.failed() && !ended_before(*words.fatal);
    if (!is_over()) return failed;
    return epoch->error.has_value() && !ended_before(epoch->fatal);
  }

 private:
  /// Whether it had ended when the group failed.
  bool ended_before(const Failure& fatal) const {
    return dead_then != nullptr ? *dead_then == 0 : generation != 0 && generation < fatal.written;
  }
  bool has_told() const;

  mutable std::mutex mutex_;  // the monitor asks, too
  GpuEvent done_{};
  const std::uint64_t* word_ = nullptr;  // pinned; not looked at again once it has told
  mutable bool told_ = false;
  cudaStream_t stream_ = nullptr;
};

/// The making of one call. Calls of a group are made one at a time; on the GPU each runs after the
/// one before, whatever streams they are on.
class Launch {
 public:
  /// `stream` null: the group's own, and the call returns when it has ended. `transfer_with`: the
  /// peer of a call of two ranks, which has no place in the order of calls.
  Launch(CudaEngine& engine, const char* call, const Stream* stream, int transfer_with = -1);
  /// Comes directly behind `before`, which is still being made: on its stream, in its turn.
  Launch(Launch& before, const char* call);
  ~Launch();
  Launch(const Launch&) = delete;
  Launch& operator=(const Launch&) = delete;

  const char* name() const { return record_->call; }
  cudaStream_t stream() const { return stream_; }
  const Capture& capture() const { return capture_; }
  bool blocking() const { return blocking_; }
  User user() const;
  const std::shared_ptr<CallRecord>& record() const { return record_; }

  /// Keeps a piece until the call has ended (captured: as long as the graph).
  std::byte* temporary(Held held);
  /// Keeps what a result or a plan holds as long as the graph, when there is one. No memory that
  /// was not taken in the same capture: `use` is for that.
  void outlives(const std::shared_ptr<void>& owner);
  /// Memory that was made on any stream is used by this call. A graph keeps it instead.
  void use(const void* data, const std::shared_ptr<void>& owner);
  /// Keeps pinned memory that the kernels use until the call has ended, and as long as the graph.
  /// Not GPU memory: it goes back in stream order while its streams are sure to exist.
  void keep(std::shared_ptr<void> used) { kept_.push_back(std::move(used)); }
  /// Peers may write there until the call has ended.
  void grant(std::initializer_list<Held> pieces);
  /// Whether that is the call before this one, captured into the same graph. Before `enter`.
  bool follows_in_graph(const std::shared_ptr<CallRecord>& before) const;
  /// The kernels tell the CPU of the end of the call by this word, which `keep` has, last of all.
  /// So an event can wait until somebody needs it.
  void tells_end(const std::uint64_t* word) { told_ = word; }
  /// The tuner wants to know what this call takes.
  void time(std::uint64_t number) { timing_.emplace().number = number; }
  /// If so: from here on, before its first kernel.
  void begin_timing();
  /// Until here, or else until it is finished.
  void end_timing();
  /// Just before the first kernel that waits for peers: the number of this call, the same on all
  /// ranks: in the epoch, or behind kInGraph in its graph. From here on the call takes place.
  std::uint64_t enter(const CallSignature& signature);
  /// 0: not entered.
  std::uint64_t number() const { return number_; }
  /// The same for a call that has a generation of its own (latency mode).
  void enter_apart(const CallSignature& signature);
  /// The same of a call of two ranks.
  void enter_beside() { entered_ = true; }
  /// Fails the group when a kernel could not be launched.
  void run(cudaError_t result, const char* kernel);
  /// All kernels are launched. The event of the call; other calls may be made now.
  Event finish();

 private:
  bool is_beside() const { return record_->transfer_with >= 0; }
  void order_after_last();
  std::uint64_t next_number();
  void end_turn();
  void give_up_end();
  void watch_end();
  void capture_end(GpuEvent event);
  /// Without an event behind it.
  bool ends_untold() const;
  GpuEvent mark_end();

  CudaEngine& engine_;
  Launch* before_ = nullptr;  // whose turn it is, too
  std::unique_lock<std::timed_mutex> turn_;
  std::optional<OnDevice> here_;
  std::shared_ptr<CallRecord> record_;
  cudaStream_t stream_ = nullptr;
  unsigned long long stream_id_ = 0;
  bool blocking_ = false;
  Capture capture_{};
  std::vector<Held> temporaries_;
  std::vector<std::shared_ptr<void>> kept_;
  std::vector<std::shared_ptr<void>> graph_;
  std::optional<CallClock::Timing> timing_{};
  const std::uint64_t* told_ = nullptr;
  bool entered_ = false;
  std::uint64_t number_ = 0;
  bool apart_ = false;
  bool ended_ = false;
};

}  // namespace ferry::cuda
