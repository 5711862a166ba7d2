// The latency exchange of the host engine, and what one generation of it holds.
#pragma once
#include <array>
#include <atomic>
#include <functional>
#include <memory>
#include <mutex>
#include <optional>
#include <utility>
#include <vector>

#include "core/engine.hpp"
#include "core/layout.hpp"
#include "engine/reach.hpp"
#include "host/engine.hpp"
#include "host/latency.hpp"
#include "host/latency_masks.hpp"
#include "protocol/credit.hpp"
#include "protocol/delivery.hpp"

namespace ferry::host {

inline constexpr const char* kLatencyDispatch = "latency dispatch";
inline constexpr const char* kLatencyCombine = "latency combine";
inline constexpr const char* kLatencyRejoin = "latency rejoin";

/// What a source says about the rows that it sent.
struct SourceHeader {
  std::uint64_t generation = 0;
  std::int32_t rows = 0;
  std::uint32_t format = 0;
  std::uint32_t scale_format = 0;
  std::uint32_t unused = 0;
};
static_assert(sizeof(SourceHeader) <= kLineBytes);

/// Where an expert-major row came from.
struct Origin {
  std::int32_t source = 0;
  std::int32_t token = 0;
  std::int32_t slot = 0;
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

/// One generation, from its dispatch to its combine.
struct Exchange {
  Generation generation = 0;
  std::shared_ptr<BufferLease> lease{};
  LatencyDispatchOptions options{};
  std::int64_t tokens = 0;
  int topk = 0;
  std::vector<std::int32_t> routes{};  // own, [T, K]
  RankBytes sent{};                    // to whom; all but ranks that were masked
  RankBytes came{};                    // whose rows; the same
  // Filled by the receive, [local experts, ranks · capacity]; valid are the first counts[e].
  std::vector<Origin> origins{};
  std::vector<std::int32_t> counts{};  // [local experts]; the caller may write into its tensor
  std::atomic<bool> received{false};
  std::atomic<bool> combined{false};
  LatencyReceived result{};  // the tensors alone, without owner of this state
};

/// Fixed buffers, twice; credits say when one may be written again (protocol/credit.hpp).
/// latency.cpp: buffers; latency_send.cpp, latency_receive.cpp: dispatch; latency_combine.cpp.
class HostLatency final : public LatencyEngine, public std::enable_shared_from_this<HostLatency> {
 public:
  HostLatency(std::shared_ptr<HostEngine> engine, const LatencyConfig& config,
              const AddedSegments& segments, const LatencyLayout& layout);

  const LatencyConfig& config() const override { return config_; }
  std::vector<bool> masked() const override;
  void set_mask(int rank, bool masked) override;
  void clear_masks() override;
  const std::uint64_t* mask_count() const override;
  void rejoin() override;
  LatencyReceived dispatch(const ConstTensorView& x, const ConstTensorView& topk_idx,
                           const LatencyDispatchOptions& options) override;
  LatencyCombined combine(const ConstTensorView& rows, const LatencyReceived& received,
                          const std::optional<ConstTensorView>& topk_weights,
                          const LatencyCombineOptions& options) override;

  /// A result is gone. If it was never received, its rows may still be on their way: then the
  /// buffer goes back to the senders only when the next dispatch has seen them arrive.
  void drop(Generation generation, bool received);
  void receive_rows(Exchange& exchange);
  void sum_rows(const Exchange& exchange, const std::vector<float>& weights, const Tensor& out,
                const std::optional<TensorView>& waits);
  Event enter(const char* call, Stream* stream, std::function<void()> work,
              HostEngine::Call* inside = nullptr) {
    auto run = [this, call, work = std::move(work)] {
      engine_->channel().enter_call({call_named(call), number_});
      masks_.begin_call();
      work();
    };
    return engine_->enter(call, stream, std::move(run), inside, {}, asks());
  }
  Asks asks() const { return config_.masks ? Asks::existence : Asks::no_failure; }
  /// Throws Error(left_behind) for a result from before a rejoin, and as `LatencyMasks` does.
  void check_still_joined(const char* call, Generation generation) const;

 private:
  int ranks() const { return engine_->size(); }
  std::int64_t local_experts() const { return engine_->placement().local_experts(engine_->rank()); }
  std::int64_t output_rows() const { return ranks() * config_.capacity; }
  std::size_t plain_bytes() const {
    return static_cast<std::size_t>(config_.hidden) * size_of(config_.dtype);
  }
  protocol::Place at(std::size_t offset) const { return {segment_.id, offset}; }
  std::size_t buffer(Generation generation) const { return generation % 2; }
  std::size_t row_offset(Generation generation, int source, std::int64_t row) const {
    return layout_.rows + slot(generation, source, row) * layout_.row_slot;
  }
  std::size_t meta_offset(Generation generation, int source, std::int64_t row) const {
    return layout_.metas + slot(generation, source, row) * layout_.meta_slot;
  }
  std::size_t slot(Generation generation, int source, std::int64_t row) const {
    return (buffer(generation) * static_cast<std::size_t>(ranks()) +
            static_cast<std::size_t>(source)) *
               static_cast<std::size_t>(config_.capacity) +
           static_cast<std::size_t>(row);
  }
  std::size_t header_offset(Generation generation, int source) const {
    return layout_.counts + (buffer(generation) * static_cast<std::size_t>(ranks()) +
                             static_cast<std::size_t>(source)) *
                                kLineBytes;
  }
  std::size_t partial_offset(Generation generation, int writer, std::int64_t token, int k) const {
    const auto capacity = static_cast<std::size_t>(config_.capacity);
    const std::size_t place = buffer(generation) * layout_.partial_writers +
                              (layout_.partial_writers > 1 ? static_cast<std::size_t>(writer) : 0);
    return layout_.partials + ((place * capacity + static_cast<std::size_t>(token)) *
                                   static_cast<std::size_t>(config_.topk) +
                               static_cast<std::size_t>(k)) *
                                  plain_bytes();
  }

  void check_expert_capacity(const std::vector<std::int32_t>& routes) const;
  std::shared_ptr<Exchange> begin(const ConstTensorView& x, const ConstTensorView& topk_idx,
                                  const LatencyDispatchOptions& options);
  void make_tensors(Exchange& exchange);
  void settle_unreceived();
  void await_credits(Generation generation);
  void send_rows(const Exchange& exchange, const ConstTensorView& x, const RankBytes& to);

  // latency_rejoin.cpp
  /// Every rank, but for those that are masked here.
  RankBytes unmasked() const;
  /// Sends to whom gives credit, in the order in which they do.
  void send_as_credits_come(Exchange& exchange, const ConstTensorView& x);
  /// Waits for what the ranks in `pending` send; returns those of whom it came. `waits` is the
  /// caller's tensor.
  RankBytes await_sources(const SourceWait& wait, const RankBytes& pending,
                          const std::optional<TensorView>& waits);
  /// To whom this rank may say that its part of a combine is there.
  RankBytes answered(const Exchange& exchange) const;
  [[noreturn]] void throw_not_rejoined(const protocol::Status& status) const;
  void start_from(Generation agreed, const RankBytes& gone);
  void require_masks() const;
  protocol::FlagRow flag_row(std::size_t offset) const {
    return {segment_.data + offset, kLineBytes, ranks()};
  }

  std::size_t encode(const Exchange& exchange, const std::byte* row, std::byte* wire) const;
  const SourceHeader& checked_header(const Exchange& exchange, int source);
  void place_row(const Exchange& exchange, const std::byte* wire, std::int64_t expert,
                 std::int64_t row);
  void send_results(const Exchange& exchange, const ConstTensorView& rows);

  std::shared_ptr<HostEngine> engine_;
  LatencyConfig config_;
  std::uint32_t number_;  ///< among the group's exchanges, the same on all ranks
  fabric::Segment segment_;
  LatencyLayout layout_;
  FabricReach reach_;
  protocol::Credit<> credit_;
  std::array<protocol::Delivery<>, 2> combined_;
  LatencyMasks masks_;
  protocol::Rejoin<> rejoin_;

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
  std::vector<float> weights{};
  Tensor out{};
  std::optional<TensorView> waits{};
  std::atomic<bool> called{false};
  void receive() override;
};

}  // namespace ferry::host
