// The CUDA engine over several domains, throughput mode: an engine for the ranks of the own domain,
// and around it what crosses to others. What crosses goes through a staging buffer in pinned
// memory, posted by a proxy (engine/proxy.hpp) while the stream waits for a word and no SM is held;
// what has come joins the own tokens, and the engine inside carries all of them as if they were
// this rank's (core/crossing_lists.hpp). Sums go back the same way. All that touches the staging
// buffer is on a stream beside the caller's, so that the network, the staging buffer and the domain
// work at once.
//
// The CPU makes the plans: it reads the routes, and waits for the counts of the other ranks. Calls
// on streams do not wait for the network. Nothing can be captured into a graph.
#pragma once
#include <array>
#include <atomic>
#include <cstdint>
#include <functional>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <vector>

#include "core/crossing_lists.hpp"
#include "core/domains.hpp"
#include "core/engine.hpp"
#include "cuda/domains/staging.hpp"
#include "cuda/kernels/throughput/crossing.hpp"
#include "cuda/latency/proxy/proxy.hpp"
#include "cuda/runtime/pinned.hpp"
#include "cuda/throughput/engine.hpp"
#include "engine/membership/carrier.hpp"
#include "engine/membership/current_view.hpp"
#include "engine/membership/regroup.hpp"
#include "engine/proxy.hpp"
#include "engine/vault/vault.hpp"

namespace ferry::cuda {

class DomainCall;
class DomainEngine;
class DomainVault;

/// Commands that may lie in the ring: 128 KiB of pinned memory, and chunks of half a gigabyte.
inline constexpr std::uint64_t kRingSlots = 2048;

/// How tokens of a plan cross, one way: made by the first call that needs it.
struct CrossingTables {
  CrossingLists lists{};
  std::int64_t count = 0;               ///< of domain tokens
  std::int64_t own = 0;                 ///< the first ones; the others lie as in the staging buffer
  Plan inside{};                        ///< of the domain tokens, by the engine inside
  Held memory{};                        ///< the tables below
  const std::int32_t* from = nullptr;   ///< [V], of which only the own are asked for
  const std::int32_t* names = nullptr;  ///< [V]
  const std::int32_t* sent = nullptr;   ///< [out rows]: own tokens that cross
  const std::int32_t* returned = nullptr;    ///< [in rows]: domain tokens whose sums cross back
  const std::int64_t* sum_offset = nullptr;  ///< [T + 1]
  const std::int32_t* sums = nullptr;        ///< parts
  const std::int32_t* ids = nullptr;         ///< [V, K]
  const std::int64_t* first = nullptr;       ///< [sources + 1]
  const std::int32_t* shift = nullptr;       ///< [sources, ranks of the domain]
  StagingBlocks out{};
  StagingBlocks in{};
};

struct DomainPlan final : PlanState {
  /// By Crossing - 1: direct, hierarchical. Guarded by the group's turn.
  std::array<std::unique_ptr<CrossingTables>, 2> tables{};
  Held matrix{};  ///< rank_rows
  std::unique_ptr<CrossingTables>& of(Crossing how) {
    return tables[static_cast<std::size_t>(how) - 1];
  }
};

/// Rows on their way: those of a plan's tokens to other domains, or the sums back.
struct CrossingWay {
  const char* stage = "";
  const DomainPlan* plan = nullptr;
  Crossing how = Crossing::hierarchical;
  bool back = false;
  CrossingLayout layout{};

  const std::vector<CrossingBlock>& sent(const CrossingTables& tables) const {
    return back ? tables.lists.in : tables.lists.out;
  }
  const std::vector<CrossingBlock>& received(const CrossingTables& tables) const {
    return back ? tables.lists.out : tables.lists.in;
  }
  /// Where the block of `source` begins in the staging buffer of `target`; of source = ranks: its
  /// end.
  std::size_t place(int target, int source) const;
};

/// What creation yields (create.cpp).
struct DomainParts {
  Domains domains{std::vector<int>{}};
  std::shared_ptr<engine::Memory> memory{};  ///< all ranks, between their CPUs
  fabric::Segment control{};
  ControlLayout layout{};
  std::shared_ptr<CudaEngine> inside{};
};

class DomainEngine final : public Engine, public std::enable_shared_from_this<DomainEngine> {
 public:
  DomainEngine(const GroupConfig& config, DomainParts parts);
  ~DomainEngine() override;

  int rank() const override { return channel_.rank(); }
  int size() const override { return channel_.size(); }
  const GroupConfig& config() const override { return config_; }
  std::string fabric_name() const override { return std::string(parts_.memory->fabric->name()); }
  int domains() const override { return parts_.domains.count(); }
  int domain_of(int rank) const override { return parts_.domains.of(rank); }

  Plan plan(const ConstTensorView& topk_idx, const PlanOptions& options) override;
  Received dispatch(const ConstTensorView& x, const Plan& plan,
                    const DispatchOptions& options) override;
  Combined combine(const ConstTensorView& rows, const Plan& plan,
                   const CombineOptions& options) override;
  std::shared_ptr<LatencyEngine> make_latency(const LatencyConfig& config) override;

  Tensor empty(const Extents& shape, Dtype dtype) override;
  bool is_registered(const void* pointer) const override { return inside().is_registered(pointer); }
  void record_stream(const void* pointer, const Stream& stream) override {
    inside().record_stream(pointer, stream);
  }
  std::shared_ptr<VaultEngine> make_vault(std::size_t version_bytes) override;
  void barrier() override;
  std::vector<std::vector<std::byte>> gather(std::span<const std::byte> mine) override;
  ferry::GroupView group_view() const override { return now_.get(); }
  ferry::GroupView regroup() override;
  bool commit(std::uint64_t step) override;
  std::uint64_t epoch() const override { return now_.epoch(); }
  MemoryStats memory() const override;
  TimeStats time() const override { return inside().time(); }
  NetworkStats network() const override { return parts_.memory->fabric->network_use(); }
  std::vector<NicStats> nics() const override { return parts_.memory->fabric->nics(); }
  void destroy() override;
  bool destroyed() const override { return channel_.left(); }
  Metrics metrics() const override { return channel_.record().metrics(); }

  // For the calls (dispatch.cpp, combine.cpp).
  CudaEngine& inside() const { return *parts_.inside; }
  Device device() const { return inside().device(); }
  void check_usable(const char* call);
  std::shared_ptr<DomainPlan> plan_of(const Plan& plan, const char* call);

  /// Throws how a call ended, if not well; its stream has passed its end.
  void check_ended(const engine::CrossingCall& call, const Event& inside);
  bool failed() const { return channel_.dead().has_value(); }
  /// What an error of the engine inside says to the group's ranks.
  Error outside(const Error& error) const;
  /// The same of a latency call, which only names ranks of the engine inside once that is dead.
  Error told_of_latency(const char* call, const Error& error);

 private:
  friend class DomainCall;
  friend class DomainDispatch;
  friend class DomainCombine;
  friend class DomainEpochChange;
  friend class DomainVault;

  void fail(const char* call, const Error& error);
  Error told(const char* stage, const Error& thrown);
  void finish(const char* call, const Event& event);
  /// Whoever comes out has launched and ended all before it, as have the ranks of its domain.
  void meet_inside(const char* call);

  // plan.cpp
  std::vector<std::int32_t> read_routes(DomainCall& call, const ConstTensorView& topk_idx,
                                        std::optional<Error>& invalid);
  void swap_counts(DomainPlan& state, RouteCounts own, std::uint64_t placement_digest,
                   const std::optional<Error>& invalid);
  CrossingTables& tables(DomainCall& call, const std::shared_ptr<DomainPlan>& state, Crossing how);
  std::vector<CrossedRoutes> swap_routes(DomainPlan& state, const CrossingLists& lists,
                                         std::vector<std::int32_t>& come);
  void upload(DomainCall& call, const DomainTokens& tokens, CrossingTables& to);
  void plan_inside(DomainCall& call, int topk, int sources, CrossingTables& to);
  /// Through pinned memory: a copy of other memory blocks inside the driver.
  void to_gpu(DomainCall& call, void* to, const void* from, std::size_t bytes);
  void share_routes(DomainCall& call, DomainPlan& state, Crossing how);

  // latency.cpp
  struct LatencyStep;
  void share_latency_memory(LatencyStep& step);
  void agree_on_latency(const std::optional<Error>& failed);
  std::unique_ptr<LatencyCrossing> make_crossing(const LatencyStep& step, const LatencyView& view);

  Crossing crossing_of(const DomainPlan& state, Crossing asked) const;
  void make_room(const CrossingWay& way, const CrossingTables& tables);

  GroupConfig config_;
  GroupConfig proxy_config_;  ///< whose waits are on the proxy's thread: asks no caller
  DomainParts parts_;
  Domains topology_;  ///< of the ranks of this epoch; parts_.domains: of all
  Placement placement_;
  engine::Channel channel_;
  std::shared_ptr<engine::Carrier> carrier_;  ///< null: no network that carries texts
  std::shared_ptr<const engine::ArbiterFile> arbiter_;
  std::unique_ptr<engine::Regroup> regroup_{};  // of the thread whose turn it is
  engine::CurrentView now_;
  StagingBuffers staging_;
  std::shared_ptr<std::byte> ring_memory_;
  std::shared_ptr<std::byte> words_memory_;
  engine::ProxyWords words_{};
  std::unique_ptr<engine::Proxy> proxy_{};
  std::unique_ptr<LatencyProxy> latency_proxy_{};  ///< from the first exchange on
  std::uint64_t exchanges_ = 0;                    // guarded by turn_
  std::atomic<std::size_t> latency_bytes_{0};      // registered for what crosses
  std::optional<Stream> own_stream_{};  ///< of calls without one: that of the engine inside
  cudaStream_t beside_ = nullptr;       ///< into the staging buffer and out of it

  PinnedBuffer buffer_{};
  GpuEvent buffer_used_{};  // until then

  std::timed_mutex turn_;  // of calls
  GpuEvent last_{};        // the end of the last call
  unsigned long long last_stream_ = 0;
  std::uint64_t portions_ = 0;  // that came, or will; of this epoch, as the next two
  std::uint64_t commands_ = 0;  // made so far
  std::uint64_t plans_ = 0;
  std::unique_ptr<DomainVault> vault_group_;  // of `vault_`
  engine::GroupVault vault_{};
  std::atomic<bool> leaving_{false};
};

// The calls: dispatch.cpp, combine.cpp.
Received dispatch(DomainEngine& engine, const ConstTensorView& x, const Plan& plan,
                  const DispatchOptions& options);
Combined combine(DomainEngine& engine, const ConstTensorView& rows, const Plan& plan,
                 const CombineOptions& options);

/// What a call used ends with it.
class DomainUse final : public Use {
 public:
  GpuEvent end(EventPool&) override {
    std::scoped_lock lock(mutex_);
    return end_;
  }
  bool has_ended() const override {
    std::scoped_lock lock(mutex_);
    return launched_ && is_done(end_);
  }
  /// All is launched; null: nothing was, or the GPU is going away.
  void ends_at(GpuEvent end) {
    std::scoped_lock lock(mutex_);
    end_ = std::move(end);
    launched_ = true;
  }

 private:
  mutable std::mutex mutex_;
  GpuEvent end_{};
  bool launched_ = false;
};

/// The making of one call: the turn, the stream, and memory in its order.
class DomainCall {
 public:
  DomainCall(DomainEngine& engine, const char* call, Stream* stream);
  ~DomainCall();
  DomainCall(const DomainCall&) = delete;
  DomainCall& operator=(const DomainCall&) = delete;

  const char* name() const { return name_; }
  Stream* stream() const { return stream_; }
  cudaStream_t native() const { return native_; }
  bool blocking() const { return blocking_; }
  User user() const;
  /// Of this GPU, in stream order: its next user comes after what was launched before it is
  /// dropped.
  Held take(std::size_t bytes) const;
  /// Memory that was taken by another call is used by this one.
  void use(const Held& held) const;
  const float* floats(const std::optional<ConstTensorView>& tensor) const;
  /// Rows of a caller, aligned to 16 bytes: themselves, or a copy that `copy` keeps.
  const std::byte* aligned(const ConstTensorView& rows, Held& copy) const;

  /// Hands the call to the proxy, packs its rows (`pack`: from where) and makes its commands:
  /// beside the call's stream, behind what is in it now. From here on the call takes place.
  void send(const CrossingWay& way, const CrossingTables& tables, const StepMessage& head,
            PackParameters pack, std::function<void(engine::Channel&)> agree = {});
  /// Of what comes: in how many portions.
  int portions() const { return crossing_->portions; }
  /// For each portion, when it has come: what `use` launches on the stream that it is given. Behind
  /// what is in the call's stream now; what comes next in that comes behind all of this.
  void receive(const std::function<void(int portion, cudaStream_t stream)>& use);
  /// The call's last kernel is launched: its event.
  Event finish(Event inside);

 private:
  void pack_in_parts(const engine::CrossingCall& call, PackParameters pack);
  void await_portion(int portion);
  /// `behind` goes on when all that is in `before` now has ended.
  void order(cudaStream_t before, cudaStream_t behind);

  DomainEngine& engine_;
  const char* name_;
  std::unique_lock<std::timed_mutex> turn_;
  std::optional<OnDevice> here_;
  bool blocking_;
  Stream* stream_;
  cudaStream_t native_;
  unsigned long long id_ = 0;
  std::shared_ptr<DomainUse> uses_ = std::make_shared<DomainUse>();
  std::shared_ptr<engine::CrossingCall> crossing_{};  // once it takes place
  bool received_ = false;
  bool finished_ = false;
};

}  // namespace ferry::cuda
