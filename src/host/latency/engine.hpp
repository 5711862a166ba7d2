// The latency exchange of the host engine; exchange.hpp has what one generation of it holds,
// memory.hpp where that lies.
#pragma once
#include <array>
#include <atomic>
#include <functional>
#include <memory>
#include <mutex>
#include <optional>
#include <utility>
#include <vector>

#include "core/check.hpp"
#include "core/engine.hpp"
#include "host/latency/create.hpp"
#include "host/latency/masks.hpp"
#include "host/latency/memory.hpp"
#include "host/throughput/engine.hpp"
#include "protocol/credit.hpp"
#include "protocol/delivery.hpp"

namespace ferry::host {

/// Fixed buffers, twice; credits say when one may be written again (protocol/credit.hpp).
/// engine.cpp: buffers, who takes part; dispatch.cpp, combine.cpp: the calls. What moves is in
/// dispatch_send.cpp, dispatch_receive.cpp and combine_send.cpp (memory.hpp).
class HostLatency final : public LatencyEngine,
                          public OutlivesEpoch,
                          public std::enable_shared_from_this<HostLatency> {
 public:
  /// `number`: among the group's exchanges, the same on all ranks.
  HostLatency(std::shared_ptr<HostEngine> engine, const LatencyConfig& config,
              const AddedSegments& segments, const LatencyLayout& layout, std::uint64_t number);
  ~HostLatency() override;

  const LatencyConfig& config() const override { return memory_.config; }
  std::vector<bool> masked() const override;
  void set_mask(int rank, bool masked) override;
  void clear_masks() override;
  const std::uint64_t* mask_count() const override;
  void rejoin() override;
  Generation leave_epoch() override;
  void begin_epoch(const engine::Epoch& next,
                   const std::function<std::uint64_t(int)>& since) override;
  LatencyReceived dispatch(const ConstTensorView& x, const ConstTensorView& topk_idx,
                           const LatencyDispatchOptions& options) override;
  LatencyCombined combine(const ConstTensorView& rows, const LatencyReceived& received,
                          const std::optional<ConstTensorView>& topk_weights,
                          const LatencyCombineOptions& options) override;

  /// A result is gone. If it was never received, its rows may still be on their way: then the
  /// buffer goes back to the senders only when the next dispatch has seen them arrive.
  void drop(Generation generation, bool received);
  void receive_rows(Exchange& exchange);
  void sum_rows(const Exchange& exchange, const LatencyCombineCall& call);
  Event enter(const char* call, Stream* stream, std::function<void()> work,
              HostEngine::Call* inside = nullptr) {
    auto run = [this, call, work = std::move(work)] {
      engine_->channel().enter_call({call_named(call), number_}, memory_.config.masks);
      masks_.begin_call();
      work();
    };
    return engine_->enter(call, stream, std::move(run), inside, {}, asks());
  }
  Asks asks() const { return memory_.config.masks ? Asks::existence : Asks::no_failure; }
  /// Refuses calls of an exchange without masks that has lost ranks.
  void check_complete(const char* call);
  /// Throws Error(evicted) for a result from before a rejoin, and as `LatencyMasks` does.
  void check_still_joined(const char* call, Generation generation) const;

 private:
  int ranks() const { return engine_->size(); }
  /// Not lost since the exchange was made, nor before. For a call's work, or with mutex_ held.
  bool here(int rank) const { return here_[static_cast<std::size_t>(rank)] != 0; }
  bool is_here(int rank) {
    std::scoped_lock lock(mutex_);
    return here(rank);
  }
  RankBytes absent() const;
  void check_expert_capacity(const std::vector<std::int32_t>& routes) const;
  std::shared_ptr<Exchange> begin(const ConstTensorView& x, const ConstTensorView& topk_idx,
                                  const LatencyDispatchOptions& options);
  void settle_unreceived();
  /// Nothing reads `generation` any more: gives credit once all before it are released too. With
  /// mutex_ held.
  void release(Generation generation);
  void await_credits(Generation generation);

  /// Every rank, but for those that are masked here.
  RankBytes unmasked() const;
  /// A source that took its mask of this rank back sends again, but not what it left out: the flag
  /// of its next generation passes for this one's, and only the header tells.
  void leave_out_unsent(Exchange& exchange) const;
  /// Of the unmasked: to whom the rows of this dispatch went.
  RankBytes served(const Exchange& exchange) const;
  /// Of those: whose rows came. To others this rank must not say that its part of a combine is
  /// there.
  RankBytes answered(const Exchange& exchange) const;
  /// Sends to whom gives credit, in the order in which they do.
  void send_as_credits_come(Exchange& exchange, const ConstTensorView& x);
  /// Waits for what the ranks in `pending` send; returns those of whom it came. `wait_ns`: the
  /// caller's tensor; the time until a rank came, or was masked, is added there.
  RankBytes await_sources(const SourceWait& wait, const RankBytes& pending,
                          const std::optional<TensorView>& wait_ns = {});
  [[noreturn]] void throw_not_rejoined(const protocol::Status& status) const;
  void start_from(Generation agreed, const RankBytes& gone);
  void require_masks() const;
  LatencyDispatched dispatched(const Exchange& exchange) const;
  LatencyCombineCall combine_call(const Exchange& exchange,
                                  const std::optional<ConstTensorView>& topk_weights,
                                  const LatencyCombineOptions& options) const;
  void announce_combine(const Exchange& exchange, const LatencyCombineCall& call);
  /// What the ranks in `pending` announced must be what this rank did. Returns those that came.
  RankBytes await_announcements(const Exchange& exchange, const LatencyCombineCall& call,
                                const RankBytes& pending,
                                const std::optional<TensorView>& wait_ns = {});
  void check_announcement(const Exchange& exchange, const LatencyCombineCall& call,
                          int source) const;
  void send_sums(const Exchange& exchange, const LatencyCombineCall& call,
                 const ConstTensorView& rows, const RankBytes& to);
  void send_results(const Exchange& exchange, const LatencyCombineCall& call,
                    const ConstTensorView& rows);
  void send_sums_as_weights_come(const Exchange& exchange, const LatencyCombineCall& call,
                                 const ConstTensorView& rows, const RankBytes& to);
  std::shared_ptr<HostEngine> engine_;
  std::uint64_t epoch_ = engine_->epoch();  ///< in which it was made
  std::uint32_t number_;                    ///< also its space of tags
  RankBytes here_;  ///< [R]; a process that joins has no part in it. Changed with mutex_ held
  LatencyMemory memory_;
  protocol::Credit<> credit_;
  std::array<protocol::Delivery<>, 2> combined_;
  std::array<protocol::Delivery<protocol::AnnounceTraits>, 2> announced_;
  LatencyMasks masks_;
  protocol::Rejoin<> rejoin_;
  // Calls of a group run one after another.
  SumRoom sum_room_;
  std::array<RankBytes, 2> sent_{};  ///< `Exchange::sent` of the last dispatch in each buffer

  std::mutex mutex_;  // of what follows: results are dropped on any thread
  Generation generation_ = 0;
  std::array<bool, 2> alive_{};
  protocol::DropOrder<> drops_{};
  Generation released_ = 0;
  std::vector<Generation> unreceived_{};  // dropped before their rows were received
};

/// A hook serves once.
[[noreturn]] void refuse_second_receive(const char* call);

/// The second half of a dispatch.
struct ReceiveRows final : LatencyState {
  std::shared_ptr<HostLatency> engine;
  std::shared_ptr<Exchange> exchange;
  std::atomic<bool> called{false};
  void receive() override;
};

/// The second half of a combine.
struct SumRowsLater final : LatencyState {
  std::shared_ptr<HostLatency> engine;
  std::shared_ptr<Exchange> exchange;
  LatencyCombineCall call{};
  std::atomic<bool> called{false};
  void receive() override;
};

}  // namespace ferry::host
