// One generation of the host engine's latency exchange: what ranks say ahead of their rows, what
// came, and what its calls keep until it is combined.
#pragma once
#include <atomic>
#include <chrono>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <optional>
#include <utility>
#include <vector>

#include "core/engine.hpp"
#include "core/layout.hpp"
#include "host/latency/masks.hpp"

namespace ferry::host {

inline constexpr const char* kLatencyDispatch = "latency dispatch";
inline constexpr const char* kLatencyCombine = "latency combine";
inline constexpr const char* kLatencyRejoin = "latency rejoin";

/// What a source says about the rows that it sent, and of the rows that it wants back.
struct SourceHeader {
  std::uint64_t generation = 0;
  std::uint64_t first_sum = 0;  ///< the place of the first (core/sum_places.hpp)
  std::int32_t rows = 0;
  std::uint8_t format = 0;
  std::uint8_t scale_format = 0;
  std::uint16_t weights = 0;  ///< 1: they are beside the rows
  float global_scale = 0;
  std::uint32_t unused = 0;
};
static_assert(sizeof(SourceHeader) == kSourceHeaderBytes);

/// What a rank says of its combine, ahead of the rows. The same on all ranks.
struct CombineHead {
  std::uint64_t generation = 0;
  std::uint32_t by_rank = 0;  ///< one row for each rank, not for each slot
  std::uint32_t format = 0;
  std::uint32_t weights = 0;  ///< 1: this rank's weights are beside the head
  std::uint32_t unused = 0;
  bool operator==(const CombineHead&) const = default;
};

/// A row that came.
struct Arrival {
  std::int32_t source = 0;
  std::int32_t row = 0;  ///< among those of the source
  std::int32_t token = 0;
};

class HostLatency;

/// Keeps one of the two buffers in use; gives it back to the senders when dropped.
class BufferLease {
 public:
  BufferLease(std::shared_ptr<HostLatency> engine, Generation generation)
      : engine_(std::move(engine)), generation_(generation) {}
  ~BufferLease();
  void take() { taken_ = true; }
  void mark_received() { received_.store(true, std::memory_order_release); }
  BufferLease(const BufferLease&) = delete;
  BufferLease& operator=(const BufferLease&) = delete;

 private:
  std::shared_ptr<HostLatency> engine_;
  Generation generation_;
  bool taken_ = false;
  std::atomic<bool> received_{false};
};

/// How long one wait takes for each source, added to the caller's tensor if there is one.
class SourceClock {
 public:
  explicit SourceClock(const std::optional<TensorView>& wait_ns) : wait_ns_(wait_ns) {}
  /// `source` is waited for no longer.
  void charge(std::size_t source) const {
    if (wait_ns_) {
      static_cast<std::int64_t*>(wait_ns_->data)[source] += (Clock::now() - start_).count();
    }
  }
  /// What this rank does for those that came is no wait for the others.
  template <class Work>
  void apart_from(const Work& work) {
    const auto begin = Clock::now();
    work();
    start_ += Clock::now() - begin;
  }

 private:
  std::optional<TensorView> wait_ns_;
  Clock::time_point start_ = Clock::now();
};

/// One generation, from its dispatch to its combine.
struct Exchange {
  Generation generation = 0;
  std::shared_ptr<BufferLease> lease{};
  LatencyDispatchOptions options{};
  std::int64_t tokens = 0;
  int topk = 0;
  std::vector<std::int32_t> routes{};  // own, [T, K]
  std::vector<float> weights{};        // own, [T, K], if they came with the dispatch
  RankBytes sent{};                    // to whom: all but ranks that were masked
  RankBytes came{};                    // whose rows; the same
  // [R]: where the rows to be summed begin that the rank sends to this one, and this one to it.
  std::vector<std::uint64_t> sums_here{};
  std::vector<std::uint64_t> sums_there{};
  // Filled by the receive: what came, in ascending source and token; K of the configuration.
  std::vector<Arrival> arrivals{};
  std::vector<std::int32_t> slot_rows{};  // [arrivals, K]: expert-major row or -1; rank-major: none
  std::vector<float> slot_weights{};      // [arrivals, K], if they came with the dispatch
  std::atomic<bool> received{false};
  std::atomic<bool> combined{false};
  LatencyReceived result{};  // the tensors alone, without owner of this state
};

/// A token on its way: as it crosses, and beside it its index, K local ids, K weights.
struct WireToken {
  const void* row = nullptr;
  std::vector<std::byte> codes{};
  std::vector<std::byte> scales{};
  std::vector<std::int32_t> meta{};
};

/// One combine.
struct LatencyCombineCall {
  CombineFormat format = CombineFormat::as_is;
  bool by_rank = false;          ///< one row for each rank crosses, not for each slot
  bool weights_follow = false;   ///< they are pushed ahead of the rows
  std::vector<float> weights{};  ///< own, [T, K]; empty: rank-major
  std::optional<TensorView> wait_ns{};
  std::optional<BlockSignals> signals{};
  std::chrono::steady_clock::time_point began = std::chrono::steady_clock::now();
  Tensor out{};
};

}  // namespace ferry::host
