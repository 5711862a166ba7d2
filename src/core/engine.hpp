// What an engine offers to the public classes. The host engine and the CUDA engine implement it;
// src/api/ picks one when a group is created.
#pragma once
#include <cstdint>
#include <memory>
#include <span>
#include <string>
#include <vector>

#include "core/access.hpp"
#include "ferry/collectives.hpp"
#include "ferry/group.hpp"
#include "ferry/latency.hpp"
#include "ferry/vault.hpp"

namespace ferry {

class LatencyEngine {
 public:
  virtual ~LatencyEngine() = default;
  virtual const LatencyConfig& config() const = 0;
  virtual LatencyReceived dispatch(const ConstTensorView& x, const ConstTensorView& topk_idx,
                                   const LatencyDispatchOptions& options) = 0;
  virtual LatencyCombined combine(const ConstTensorView& rows, const LatencyReceived& received,
                                  const std::optional<ConstTensorView>& topk_weights,
                                  const LatencyCombineOptions& options) = 0;
  /// For an exchange without masks.
  virtual std::vector<bool> masked() const { no_masks(); }
  virtual void set_mask(int /*rank*/, bool /*masked*/) { no_masks(); }
  virtual void clear_masks() { no_masks(); }
  virtual const std::uint64_t* mask_count() const { no_masks(); }
  virtual void rejoin() { no_masks(); }

 private:
  [[noreturn]] static void no_masks() {
    throw Error(ErrorKind::invalid_argument,
                "latency masks: the exchange was made without masks; expected "
                "LatencyConfig::masks = true");
  }
};

class VaultEngine {
 public:
  virtual ~VaultEngine() = default;
  virtual std::optional<std::uint64_t> recover(std::span<const std::int64_t> wanted) = 0;
  virtual std::vector<std::int64_t> keys() const = 0;
  virtual void get(std::int64_t key, std::span<const VaultTarget> into,
                   const Stream* stream) const = 0;
  virtual void put(std::uint64_t step, std::span<const VaultPart> parts, const Stream* stream) = 0;
};

/// The second half of a call that was made with a hook.
struct LatencyState {
  virtual ~LatencyState() = default;
  virtual void receive() = 0;
};

class Engine {
 public:
  virtual ~Engine() = default;
  virtual int rank() const = 0;
  virtual int size() const = 0;
  virtual const GroupConfig& config() const = 0;
  virtual std::string fabric_name() const = 0;
  virtual int domains() const { return 1; }
  virtual int domain_of(int /*rank*/) const { return 0; }

  virtual Plan plan(const ConstTensorView& topk_idx, const PlanOptions& options) = 0;
  virtual Received dispatch(const ConstTensorView& x, const Plan& plan,
                            const DispatchOptions& options) = 0;
  virtual Received plan_and_dispatch(const ConstTensorView& x, const ConstTensorView& topk_idx,
                                     const DispatchOptions& options) {
    const Plan made = plan(topk_idx, {options.stream});
    Received received = dispatch(x, made, options);
    received.plan = made;
    return received;
  }
  virtual Combined combine(const ConstTensorView& rows, const Plan& plan,
                           const CombineOptions& options) = 0;
  virtual std::shared_ptr<LatencyEngine> make_latency(const LatencyConfig& config) = 0;

  virtual std::shared_ptr<VaultEngine> make_vault(std::size_t version_bytes);

  virtual Tensor empty(const Extents& shape, Dtype dtype) = 0;
  virtual bool is_registered(const void* pointer) const = 0;
  virtual void record_stream(const void* /*pointer*/, const Stream& /*stream*/) {}
  virtual void barrier() = 0;
  /// Collective. [R]: the bytes of each rank of this epoch, nothing of the others.
  virtual std::vector<std::vector<std::byte>> gather(std::span<const std::byte> mine);
  virtual GroupView group_view() const;
  virtual GroupView regroup();
  virtual bool commit(std::uint64_t step);
  virtual std::uint64_t epoch() const { return 1; }
  virtual MemoryStats memory() const = 0;
  virtual TimeStats time() const = 0;
  virtual NetworkStats network() const { return {}; }
  virtual std::vector<TunedCall> tuning() const { return {}; }
  virtual std::vector<NicStats> nics() const { return {}; }
  /// Of the CUDA engine, whose calls run on the GPU: nothing but failures.
  virtual Metrics metrics() const { return {}; }
  virtual void start_trace(std::size_t most);
  virtual Trace take_trace() { return {}; }
  virtual void destroy() = 0;
  virtual bool destroyed() const = 0;
};

inline void Engine::start_trace(std::size_t /*most*/) {
  throw Error(ErrorKind::unsupported,
              "start_trace: groups with backend host can, this one has backend cuda; its calls "
              "have NVTX ranges and record_function");
}
inline std::vector<std::vector<std::byte>> Engine::gather(std::span<const std::byte> /*mine*/) {
  throw Error(ErrorKind::unsupported, "bootstrap: groups can, collectives cannot");
}
inline GroupView Engine::group_view() const {
  GroupView all;
  for (int rank = 0; rank < size(); ++rank) all.ranks.push_back(rank);
  return all;
}
inline GroupView Engine::regroup() {
  throw Error(ErrorKind::unsupported, "regroup: groups can, collectives cannot");
}
inline std::shared_ptr<VaultEngine> Engine::make_vault(std::size_t /*version_bytes*/) {
  throw Error(ErrorKind::unsupported,
              "Vault: with backend cuda groups in one domain can have one, this one has several");
}
inline bool Engine::commit(std::uint64_t /*step*/) {
  throw Error(ErrorKind::unsupported, "commit: groups can, collectives cannot");
}

/// Counts of a collective with blocks of any size, [ranks] elements each.
struct BlockCounts {
  std::vector<std::int64_t> to{};
  std::vector<std::int64_t> from{};
  bool equal = false;  ///< none were given
};

/// Rows that go from rank to rank; `add_rows` adds them up.
struct RowTable {
  struct Move {
    int from;
    std::int64_t row;  ///< of x
    int to;
    std::int64_t to_row;  ///< of out
  };
  bool adds = false;
  std::int64_t rows = 0;   ///< of a rank, which others copy
  std::int64_t slots = 0;  ///< of a rank, for copies
  std::uint64_t hash = 0;
  std::vector<Move> moves{};  ///< of all ranks, in the order in which they are added
};

/// The same by a table in GPU memory, which the CPU does not read: i32 [ranks, slots].
struct GpuRowTable {
  bool adds = false;
  std::int64_t rows = 0;
  std::int64_t slots = 0;
  const std::int32_t* table = nullptr;
};

/// Of a Window: everything that it reads stays mapped as long as this lives.
struct WindowState {
  Tensor own{};
  std::vector<std::int64_t> first{};     ///< [ranks + 1]
  std::vector<const std::byte*> rows{};  ///< [ranks]: where each rank's begin
};

/// Arguments were checked as far as one rank can.
class CollectivesEngine {
 public:
  virtual ~CollectivesEngine() = default;
  virtual Event all_reduce(const TensorView& x, const ReduceOptions& options) = 0;
  virtual Event reduce_scatter(const ConstTensorView& x, const TensorView& out,
                               const ReduceOptions& options) = 0;
  virtual Event all_gather(const ConstTensorView& x, const TensorView& out,
                           const CollectiveOptions& options) = 0;
  virtual Event broadcast(const TensorView& x, int root, const CollectiveOptions& options) = 0;
  virtual Event all_to_all(const ConstTensorView& x, const TensorView& out, BlockCounts counts,
                           const CollectiveOptions& options) = 0;
  virtual Event move_rows(const ConstTensorView& /*x*/, const TensorView& /*out*/, RowTable table,
                          const CollectiveOptions& /*options*/) {
    throw Error(ErrorKind::unsupported,
                std::string(table.adds ? "add_rows" : "copy_rows") +
                    ": rows in GPU memory are moved by a table in GPU memory; got one in CPU "
                    "memory");
  }
  virtual Event move_rows(const ConstTensorView& /*x*/, const TensorView& /*out*/,
                          const GpuRowTable& table, const CollectiveOptions& /*options*/) {
    throw Error(ErrorKind::unsupported,
                std::string(table.adds ? "add_rows" : "copy_rows") +
                    ": table: got a tensor; expected the entries: only backend cuda moves rows by "
                    "a table in memory that the CPU does not read");
  }
  virtual Event send(const ConstTensorView& x, int peer, int tag,
                     const CollectiveOptions& options) = 0;
  virtual Event recv(const TensorView& x, int peer, int tag, const CollectiveOptions& options) = 0;
  virtual std::shared_ptr<const WindowState> window(std::int64_t /*rows*/, std::int64_t /*columns*/,
                                                    Dtype /*dtype*/) {
    throw Error(ErrorKind::unsupported,
                "window: rows in GPU memory are not read by other ranks alone yet; expected "
                "collectives with backend host");
  }
  /// Where the tensors lie.
  virtual Device device() const { return {}; }
  virtual Choice choice(std::size_t bytes, bool any_order) const = 0;
  virtual CompressionStats compression() const { return {}; }
  /// Of collectives that are a part of larger ones, which failed in `call`: these fail, too, and
  /// tell their ranks, unless they have. Returns what they failed with. `error.peer()`: of these.
  virtual Error fail(const char* /*call*/, const Error& error) { return error; }
  /// What it is built on: barrier, memory, ranks.
  virtual Engine& engine() = 0;
};

}  // namespace ferry
