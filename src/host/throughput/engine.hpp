// The host engine: CPU memory, streams are worker threads.
#pragma once
#include <atomic>
#include <condition_variable>
#include <cstdint>
#include <functional>
#include <memory>
#include <mutex>
#include <optional>
#include <set>
#include <span>
#include <string>
#include <vector>

#include "core/call.hpp"
#include "core/domains.hpp"
#include "core/engine.hpp"
#include "core/exchange_plan.hpp"
#include "core/plan_state.hpp"
#include "engine/channel.hpp"
#include "engine/growth.hpp"
#include "engine/membership/current_view.hpp"
#include "engine/membership/regroup.hpp"
#include "engine/memory.hpp"
#include "engine/regions.hpp"
#include "engine/vault/vault.hpp"
#include "fabric/domains/shared_doors.hpp"
#include "host/throughput/latency_pool.hpp"
#include "host/throughput/tuning.hpp"

namespace ferry::host {

using engine::AddedSegments;
using engine::Arena;
using engine::Awaited;
using engine::Channel;
using engine::FabricReach;
using engine::GroupWatch;
using engine::lease;
using engine::Memory;
using engine::Region;
using engine::Regions;
using engine::segment_bytes;
using protocol::Generation;

class HostEngine;

/// Collective: registers the control segment and the arena, and lets the peers attach.
/// The configuration was checked and is the same on all ranks.
/// `domains`: of ranks that `fabric` gives pointers to; by rank the same on all ranks.
/// `body_bytes`: that messages must hold besides what an exchange of tokens needs.
std::shared_ptr<HostEngine> make_host_engine(Bootstrap& bootstrap, const GroupConfig& config,
                                             const Domains& domains,
                                             std::unique_ptr<fabric::Fabric> fabric,
                                             std::size_t body_bytes = 0);

/// Of a process that begins alone: not collective. `fabric`: its lobby is open.
std::shared_ptr<HostEngine> begin_host_engine(const GroupConfig& config, const Domains& domains,
                                              std::unique_ptr<fabric::Fabric> fabric);

/// Of a process that takes a lost rank's place: not collective. `fabric`: its lobby is open, with
/// this ticket. Returns when the ranks have taken it in.
std::shared_ptr<HostEngine> join_host_engine(const GroupConfig& config, const Domains& domains,
                                             std::unique_ptr<fabric::Fabric> fabric,
                                             std::uint64_t ticket);

/// What MemoryStats is right after creation.
MemoryStats host_memory_hint(const GroupConfig& config, int ranks);

/// Largest message of a group: the counts of a plan, a segment's handle, or `body_bytes`, after the
/// head.
std::size_t message_bytes(std::int64_t experts, const Domains& domains, std::size_t body_bytes = 0);

/// A dense tensor in ordinary memory, not initialised.
Tensor heap_tensor(const Extents& shape, Dtype dtype);

/// What a call asks of its group: that it has not failed; or only that it is not destroyed, for an
/// exchange that goes on without ranks that failed. Errors of such a call leave the group as it is.
enum class Asks { no_failure, existence };

/// Goes on in the next epoch of its group: a latency exchange.
class OutlivesEpoch {
 public:
  virtual ~OutlivesEpoch() = default;
  /// Nothing is called any more until the next epoch begins. The newest generation that it used.
  virtual Generation leave_epoch() = 0;
  /// `since(rank)`: the epoch in which the process joined that has that rank's place.
  virtual void begin_epoch(const engine::Epoch& next,
                           const std::function<std::uint64_t(int)>& since) = 0;
};

class HostEngine final : public Engine,
                         public engine::VaultGroup,
                         public std::enable_shared_from_this<HostEngine> {
 public:
  HostEngine(std::shared_ptr<Memory> memory, const GroupConfig& config, const Domains& domains,
             const fabric::Segment& control, std::size_t body_bytes);
  ~HostEngine() override;

  int rank() const override { return channel_.rank(); }
  int size() const override { return channel_.size(); }
  const GroupConfig& config() const override { return config_; }
  std::string fabric_name() const override { return std::string(memory_->fabric->name()); }
  int domains() const override { return domains_.count(); }
  int domain_of(int rank) const override { return domains_.of(rank); }

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
  void barrier() override;
  std::vector<std::vector<std::byte>> gather(std::span<const std::byte> mine) override;
  GroupView group_view() const override { return now_.get(); }
  GroupView regroup() override;
  bool commit(std::uint64_t step) override;
  MemoryStats memory() const override;
  TimeStats time() const override;
  NetworkStats network() const override { return memory_->fabric->network_use(); }
  std::vector<TunedCall> tuning() const override { return tuner_.tuned(); }
  std::vector<NicStats> nics() const override { return memory_->fabric->nics(); }
  Metrics metrics() const override { return channel_.record().metrics(); }
  void start_trace(std::size_t most) override { channel_.record().start_trace(most); }
  Trace take_trace() override { return channel_.record().take_trace(); }
  void destroy() override;
  bool destroyed() const override { return channel_.left(); }

  // For the jobs of this engine (dispatch.cpp, combine.cpp, latency/engine.cpp).
  Channel& channel() override { return channel_; }
  const std::shared_ptr<Memory>& shared_memory() const override { return memory_; }
  const Placement& placement() const { return placement_; }
  /// The domains of the ranks of this epoch. For a call's work.
  const Domains& topology() const override { return topology_; }
  CallTuner& tuner() { return tuner_; }

  std::uint64_t epoch() const override { return now_.epoch(); }
  /// Of a process that begins alone, at once after creation: it is the only one of its epoch.
  void begin();
  /// Of a process that takes a lost rank's place, at once after creation: waits until it is in.
  void join(std::uint64_t ticket);
  std::shared_ptr<void> kept() override { return shared_from_this(); }
  engine::CurrentView& now() override { return now_; }
  engine::Regroup* membership_if_changed() override { return regroup_.get(); }
  void in_turn(const char* call, const std::function<void()>& work) override {
    enter(call, nullptr, work);
  }
  /// Throws Error(unsupported) when ranks were lost.
  void check_whole(const char* call) const { now_.check_whole(call); }

  /// A thread is inside a call, before the call has its place in the order. A second thread waits
  /// until the first has its place, so that what a call decides before (plan, buffer) is decided in
  /// that order too. Ends with `enter`, or with the object.
  class Call;

  /// Runs work in the order in which calls were made, on `stream` or, without one, here and now.
  /// `work` keeps alive what it needs; the engine is kept alive for it. Whatever work throws fails
  /// the group, unless it said `all_ranks_throw`.
  /// `entered` runs once the call has its place and before the work begins.
  Event enter(const char* call, Stream* stream, std::function<void()> work, Call* inside = nullptr,
              const std::function<void()>& entered = {}, Asks asks = Asks::no_failure);
  /// `inside`: the call that ends with it; null: the same thread makes another call right after.
  Plan enter_plan(const ConstTensorView& topk_idx, const PlanOptions& options, Call* inside);
  /// Waits for work that uses the caller's memory: returns or throws when it has ended, and not
  /// before. Ctrl-C fails the group, which ends the work soon.
  void finish(const char* call, const Event& event);

  /// Said by work before it throws what every rank throws in this step, before anything moved: the
  /// group can go on.
  void all_ranks_throw() { channel_.all_ranks_throw(); }
  /// Waits for a plan's counts, from inside work.
  void await_counts(const PlanState& plan);

  /// engine::agree_on_room for rows.
  void agree(const char* stage, StepMessage& head, const std::function<bool()>& prepare) {
    engine::agree_on_room(channel_, stage, head, prepare,
                          {*memory_, "rows, columns and max_recv_rows", [this] { free_held(); }});
  }

  /// Registers one more segment on every rank that wants one, and attaches it everywhere.
  AddedSegments add_segments(const engine::Growth& growth) {
    return engine::add_segments(channel_, *memory_, growth);
  }

  /// Tells `each` of every epoch from now on, as long as it lives. For a call's work.
  void outlives_epochs(std::weak_ptr<OutlivesEpoch> each) { outliving_.push_back(std::move(each)); }
  LatencyPool& latency_pool() { return latency_pool_; }
  /// Whether a rank that was lost may still write to this one's memory. For a call's work.
  bool lost_may_write() const { return regroup_ && regroup_->lost_may_write(); }
  /// Whether a peer has called regroup, in this epoch. For a call's work.
  bool wants_regroup(int peer) const;
  std::atomic<std::uint64_t>& exchange_ns() { return exchange_ns_; }

 private:
  class Turn;
  ControlLayout control_layout() const;
  engine::Regroup& membership(std::uint64_t ticket = 0);
  void check_can_regroup(const char* call) const;
  void go_on(const engine::Epoch& next);
  std::vector<std::shared_ptr<OutlivesEpoch>> outliving();
  void run_work(const char* call, const std::function<void()>& work, Asks asks);
  /// Throws when the group is destroyed or, if asked, dead.
  void check_group(const char* call, Asks asks) const;
  /// Throws when a thread that waits for others of this rank should give up: destroyed, dead.
  void check_waiting(const char* call, Asks asks);
  void pass_turn();  // with turn_mutex_ held

  GroupConfig config_;
  Domains domains_;   // of all ranks, lost ones, too
  Domains topology_;  // of the epoch; changed by the thread whose turn it is
  std::shared_ptr<Memory> memory_;
  Placement placement_;
  Channel channel_;
  CallTuner tuner_;
  std::size_t control_bytes_;
  std::size_t body_bytes_;
  std::shared_ptr<engine::Carrier> carrier_;  // null: all ranks share memory, or cannot regroup
  std::shared_ptr<const engine::ArbiterFile> arbiter_{};
  std::shared_ptr<const fabric::SharedDoors> doors_;  // null: none in a directory
  std::unique_ptr<engine::Regroup> regroup_{};        // of the thread whose turn it is
  engine::CurrentView now_;
  LatencyPool latency_pool_{};
  std::vector<std::weak_ptr<OutlivesEpoch>> outliving_{};  // of the thread whose turn it is
  engine::GroupVault vault_{};
  std::atomic<std::uint64_t> exchange_ns_{0};
  std::uint64_t plans_ = 0;  // of the thread whose turn it is

  std::mutex turn_mutex_;
  std::condition_variable turn_changed_;
  bool calling_ = false;  // a thread is in a Call
  std::uint64_t next_ticket_ = 0;
  std::uint64_t serving_ = 0;
  bool running_ = false;              // the call `serving_` has begun
  std::set<std::uint64_t> given_up_;  // tickets whose owner did not wait
};

// The calls: dispatch.cpp, combine.cpp.
Received dispatch(HostEngine& engine, const ConstTensorView& x, const Plan& plan,
                  const DispatchOptions& options);
Received plan_and_dispatch(HostEngine& engine, const ConstTensorView& x,
                           const ConstTensorView& topk_idx, const DispatchOptions& options);
Combined combine(HostEngine& engine, const ConstTensorView& rows, const Plan& plan,
                 const CombineOptions& options);

// doors.cpp: of elastic groups of several domains; otherwise they do nothing.

std::shared_ptr<const fabric::SharedDoors> shared_doors_of(const GroupConfig& config,
                                                           fabric::Fabric& fabric);
/// Of rank 0, before any rank shows its card: those of earlier groups go.
void clear_doors(const GroupConfig& config, fabric::Fabric& fabric);
/// Of a process that begins alone: until the result is dropped, no other one begins a group of that
/// name. Throws Error(refused) when another has the turn.
std::optional<fabric::TurnToBegin> turn_to_begin(const GroupConfig& config, fabric::Fabric& fabric);
/// Of a process that begins alone, before and after it shows its card. Throws Error(refused) where
/// ranks of such a group may run on other hosts.
void check_only_group(const GroupConfig& config, fabric::Fabric& fabric);
/// This rank has registered its memory.
void show_card(const GroupConfig& config, fabric::Fabric& fabric);
engine::Regroup::Cards shared_cards(std::shared_ptr<const fabric::SharedDoors> doors);

class HostEngine::Call {
 public:
  Call(HostEngine& engine, const char* call, Asks asks = Asks::no_failure);
  ~Call() { end(); }
  Call(const Call&) = delete;
  Call& operator=(const Call&) = delete;
  void end();

 private:
  friend class HostEngine;
  HostEngine& engine_;
  bool inside_ = true;
};

}  // namespace ferry::host
