// Collectives of GPUs in several domains. Inside a domain kernels reduce and spread
// (domain_gpus.hpp); what a domain has reduced lies in pinned memory then, and crosses by the
// collectives of the host engine, on rails: the i-th rank of every domain, for as many i as the
// smallest domain has ranks. A rail has one rank of each domain, in the order of the domains, so
// its sums are those of the definition.
//
// The caller compares its call with those of all ranks, then starts all that the GPU will do, step
// by step through the tensor: a word that it stores says what may cross, and it waits for another
// before it spreads what came. A thread of its own carries the steps, one call after another, and
// makes no CUDA call meanwhile (domain_gpus.hpp says why). While one step crosses, the GPU reduces
// the next one and spreads the one before. No SM is held for the network.
#pragma once
#include <atomic>
#include <cstdint>
#include <functional>
#include <future>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <vector>

#include "core/call.hpp"
#include "core/domains.hpp"
#include "core/engine.hpp"
#include "cuda/collectives/domain_gpus.hpp"
#include "cuda/collectives/domain_transfers.hpp"

namespace ferry::cuda {

/// What creation yields.
struct DomainCollectivesParts {
  GroupConfig config{};
  Domains domains{std::vector<int>{}};
  std::shared_ptr<CollectivesEngine> calls{};  ///< of the host, among all ranks: to compare calls
  std::shared_ptr<CollectivesEngine> all{};    ///< and to move data
  std::shared_ptr<CollectivesEngine> rail{};   ///< among those of this rank's rail; null: none
  std::unique_ptr<DomainGpus> gpus{};
  Stream thread{std::shared_ptr<Stream::Queue>()};  ///< of nobody else
};

/// An error of ranks that are counted from 0 as the group, in which they are `ranks`, counts them.
Error told_of(const Error& error, const std::vector<int>& ranks, int self);
inline bool same_reason(const Error& one, const Error& other) {
  return one.kind() == other.kind() && one.peer() == other.peer();
}

class DomainCollectives final : public CollectivesEngine, public Engine {
 public:
  explicit DomainCollectives(DomainCollectivesParts parts);
  ~DomainCollectives() override;

  Event all_reduce(const TensorView& x, const ReduceOptions& options) override;
  Event reduce_scatter(const ConstTensorView& x, const TensorView& out,
                       const ReduceOptions& options) override;
  Event all_gather(const ConstTensorView& x, const TensorView& out,
                   const CollectiveOptions& options) override;
  Event broadcast(const TensorView& x, int root, const CollectiveOptions& options) override;
  Event all_to_all(const ConstTensorView& x, const TensorView& out, BlockCounts counts,
                   const CollectiveOptions& options) override;
  Event send(const ConstTensorView& x, int peer, int tag,
             const CollectiveOptions& options) override;
  Event recv(const TensorView& x, int peer, int tag, const CollectiveOptions& options) override;
  Event move_rows(const ConstTensorView& /*x*/, const TensorView& /*out*/, RowTable table,
                  const CollectiveOptions& /*options*/) override {
    no_rows(table.adds);
  }
  Event move_rows(const ConstTensorView& /*x*/, const TensorView& /*out*/, const GpuRowTable& table,
                  const CollectiveOptions& /*options*/) override {
    no_rows(table.adds);
  }
  /// As the links between all ranks were measured.
  Choice choice(std::size_t bytes, bool any_order) const override {
    return parts_.all->choice(bytes, any_order);
  }
  CompressionStats compression() const override {
    return parts_.rail ? parts_.rail->compression() : CompressionStats{};
  }
  Device device() const override { return parts_.gpus->device(); }
  Engine& engine() override { return *this; }

  int rank() const override { return parts_.all->engine().rank(); }
  int size() const override { return parts_.domains.ranks(); }
  const GroupConfig& config() const override { return parts_.config; }
  std::string fabric_name() const override { return parts_.all->engine().fabric_name(); }
  int domains() const override { return parts_.domains.count(); }
  int domain_of(int rank) const override { return parts_.domains.of(rank); }
  Tensor empty(const Extents& shape, Dtype dtype) override;
  bool is_registered(const void* pointer) const override {
    return parts_.gpus->engine().is_registered(pointer);
  }
  void record_stream(const void* pointer, const Stream& stream) override {
    parts_.gpus->engine().record_stream(pointer, stream);
  }
  void barrier() override;
  MemoryStats memory() const override;
  TimeStats time() const override { return parts_.all->engine().time(); }
  NetworkStats network() const override;
  void destroy() override;
  bool destroyed() const override { return leaving_.load(std::memory_order_acquire); }

  [[noreturn]] Plan plan(const ConstTensorView& topk_idx, const PlanOptions& options) override;
  [[noreturn]] Received dispatch(const ConstTensorView& x, const Plan& plan,
                                 const DispatchOptions& options) override;
  [[noreturn]] Combined combine(const ConstTensorView& rows, const Plan& plan,
                                const CombineOptions& options) override;
  [[noreturn]] std::shared_ptr<LatencyEngine> make_latency(const LatencyConfig& config) override;

 private:
  /// A call, as all ranks must make it but for `touched`; `counts`: of all_to_all.
  struct Call {
    CallSignature signature{};
    int num_sms = 0;
    DomainGpus::Touched touched{};
    std::vector<std::int64_t> counts{};
  };
  /// What is done with one step of a call, each with its room: the GPUs bring it to `leaving`, it
  /// crosses, and the GPUs take it from there.
  struct Steps {
    std::function<void(std::int64_t step, const DomainRoom& room)> leave{};
    std::function<void(std::int64_t step, const DomainRoom& room)> cross{};
    std::function<void(std::int64_t step, const DomainRoom& room)> spread{};
  };

  /// The steps of a call among those of all calls.
  struct StepRange {
    std::uint64_t first = 0;
    std::int64_t count = 0;
    std::uint64_t number(std::int64_t step) const {
      return first + static_cast<std::uint64_t>(step);
    }
    std::uint64_t last() const { return number(count - 1); }
  };

  [[noreturn]] void no_rows(bool adds) const;
  Event transfer(bool sends, const TensorView& x, int peer, int tag,
                 const CollectiveOptions& options);
  void check_usable(const char* call) const;
  /// How many steps; asked when all ranks have made the call.
  using Count = std::function<std::int64_t()>;
  Event enter(const Call& call, Stream* stream, const Count& count, const Steps& steps);
  void finish(const char* call, const Event& done);
  std::optional<Error> agree(const char* name, const Call& call);
  void start(const StepRange& range, const Steps& steps);
  /// Runs it; what it throws fails the collectives of all ranks.
  void guard(const char* call, const std::function<void()>& work);
  Error fail_all(const char* call, const Error& error);
  std::optional<Error> dead() const;
  Event last() const;
  // On the thread.
  void carry(const StepRange& range, const Steps& steps, std::promise<Event>& started);
  void await(const std::function<bool()>& done) const;
  void check_alive() const;
  /// Runs what counts ranks from 0 as those of `ranks`, and names them as the group does.
  void among(const std::vector<int>& ranks, const std::function<void()>& work) const;

  const std::vector<int>& members() const { return parts_.domains.members(domain()); }
  int domain() const { return parts_.domains.of(rank()); }
  int place() const { return parts_.domains.index(rank()); }
  /// Elements, or bytes, of `count` that a rail carries, at most.
  std::int64_t share_of(std::int64_t count) const;
  /// And this rank's.
  std::int64_t own_share(std::int64_t count, std::int64_t share) const;
  TensorView host(std::byte* data, Dtype dtype, std::int64_t count) const {
    return {data, dtype, {count}};
  }
  TensorView gpu(const void* data, Dtype dtype, std::int64_t count) const {
    return {const_cast<void*>(data), dtype, {count}, device()};
  }
  DomainRoom room(std::int64_t step) const;
  std::int64_t room() const { return static_cast<std::int64_t>(parts_.gpus->room_bytes()); }

  DomainCollectivesParts parts_;
  const int rails_;
  std::int64_t largest_domain_ = 1;
  std::vector<int> rail_{};         ///< the ranks of this rank's
  std::mutex turn_;                 // of callers
  std::int64_t longest_block_ = 0;  // of the all_to_all that is made
  std::uint64_t steps_ = 0;         // of all calls
  std::atomic<bool> leaving_{false};
  mutable std::mutex state_;  // of what follows
  Event last_{};
  std::optional<Error> dead_{};
  DomainTransfers transfers_;
};

}  // namespace ferry::cuda
