// Collectives of GPUs in several domains. Inside a domain kernels reduce and spread
// (domain_gpus.hpp); what a domain has reduced lies in pinned memory then, and crosses by the
// collectives of the host engine, on rails: the i-th rank of every domain, for as many i as the
// smallest domain has ranks. A rail has one rank of each domain, in the order of the domains, so
// its sums are those of the definition.
//
// A call runs on a thread of its own, one after another: it compares the call with those of all
// ranks, then goes step by step through the tensor. While one step crosses, the GPU reduces the
// next one and spreads the one before. The caller's stream waits for a word meanwhile, and no SM is
// held for the network.
#pragma once
#include <atomic>
#include <cstdint>
#include <functional>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <vector>

#include "core/call.hpp"
#include "core/domains.hpp"
#include "core/engine.hpp"
#include "cuda/collectives/domain_gpus.hpp"

namespace ferry::cuda {

/// What creation yields.
struct DomainCollectivesParts {
  GroupConfig config{};
  Domains domains{std::vector<int>{}};
  std::shared_ptr<CollectivesEngine> all{};   ///< of the host, among all ranks
  std::shared_ptr<CollectivesEngine> rail{};  ///< among those of this rank's rail; null: none
  std::unique_ptr<DomainGpus> gpus{};
  Stream thread{std::shared_ptr<Stream::Queue>()};  ///< of nobody else
};

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
  /// A call, as all ranks must make it; `counts`: of all_to_all.
  struct Call {
    CallSignature signature{};
    int num_sms = 0;
    std::vector<std::int64_t> counts{};
  };
  /// What is done with one step of a call, each with its room: the GPUs bring it to `leaving`, it
  /// crosses, and the GPUs take it from there.
  struct Steps {
    std::function<void(std::int64_t step, const DomainRoom& room)> leave{};
    std::function<void(std::int64_t step, const DomainRoom& room)> cross{};
    std::function<void(std::int64_t step, const DomainRoom& room)> spread{};
  };

  [[noreturn]] void no_rows(bool adds) const;
  void check_usable(const char* call) const;
  Event enter(Call call, Stream* stream, std::function<void()> work);
  void finish(const char* call, const Event& done);
  // On the thread.
  void carry(const char* name, const Call& call, const Event& before,
             const std::function<void()>& work);
  std::optional<Error> agree(const char* name, const Call& call);
  void take_steps(std::int64_t count, const Steps& steps);
  void await(const Event& mark);
  [[noreturn]] void fail_all(const char* call, const Error& error);
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
  std::int64_t room() const { return static_cast<std::int64_t>(parts_.gpus->room_bytes()); }

  DomainCollectivesParts parts_;
  const int rails_;
  std::int64_t largest_domain_ = 1;
  std::vector<int> rail_{};         ///< the ranks of this rank's
  std::int64_t longest_block_ = 0;  // of the all_to_all that the thread carries
  std::mutex turn_;                 // of callers
  std::uint64_t calls_ = 0;
  Event last_{};
  std::atomic<bool> leaving_{false};
  mutable std::mutex dead_mutex_;
  std::optional<Error> dead_{};
};

}  // namespace ferry::cuda
