// The latency exchange of the host engine; exchange.hpp has what one generation of it
// holds.
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
#include "core/layout.hpp"
#include "core/number/quantize.hpp"
#include "engine/reach.hpp"
#include "host/latency/create.hpp"
#include "host/latency/exchange.hpp"
#include "host/latency/masks.hpp"
#include "host/throughput/engine.hpp"
#include "protocol/credit.hpp"
#include "protocol/delivery.hpp"

namespace ferry::host {

inline constexpr const char* kLatencyDispatch = "latency dispatch";
inline constexpr const char* kLatencyCombine = "latency combine";
inline constexpr const char* kLatencyRejoin = "latency rejoin";

/// Fixed buffers, twice; credits say when one may be written again (protocol/credit.hpp).
/// engine.cpp: buffers; dispatch.cpp, dispatch_receive.cpp: dispatch; dispatch_crossing.cpp: rows
/// of other domains; dispatch_rank_major.cpp: results without fan-out; combine.cpp: the call
/// and the sums of the owner; combine_rows.cpp, combine_sums.cpp: the rows on their way there;
/// rejoin.cpp: who takes part.
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
  void sum_rows(const Exchange& exchange, const LatencyCombineCall& call);
  Event enter(const char* call, Stream* stream, std::function<void()> work,
              HostEngine::Call* inside = nullptr) {
    auto run = [this, call, work = std::move(work)] {
      engine_->channel().enter_call({call_named(call), number_}, config_.masks);
      masks_.begin_call();
      work();
    };
    return engine_->enter(call, stream, std::move(run), inside, {}, asks());
  }
  Asks asks() const { return config_.masks ? Asks::existence : Asks::no_failure; }
  /// Throws Error(evicted) for a result from before a rejoin, and as `LatencyMasks` does.
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
  bool quantized(const Exchange& exchange) const {
    return exchange.options.format == WireFormat::e4m3;
  }
  /// Bytes of a row in flight, scales apart: rows of all sources lie close together, so that they
  /// are one tensor.
  std::size_t row_bytes(const Exchange& exchange) const {
    return quantized(exchange) ? static_cast<std::size_t>(config_.hidden) : plain_bytes();
  }
  std::size_t rows_offset(Generation generation) const {
    return layout_.rows + slot(generation, 0, 0) * layout_.row_slot;
  }
  /// With masks each source has the same place whatever the format: what a masked one writes late
  /// must not touch the rows of others.
  std::size_t source_offset(Generation generation, int source) const {
    return rows_offset(generation) + slot(0, source, 0) * layout_.row_slot;
  }
  std::size_t row_offset(const Exchange& exchange, int source, std::int64_t row) const {
    if (config_.masks) {
      return source_offset(exchange.generation, source) +
             static_cast<std::size_t>(row) * row_bytes(exchange);
    }
    return rows_offset(exchange.generation) + slot(0, source, row) * row_bytes(exchange);
  }
  /// Right behind the codes: then codes and scales take no more room than rows as they are.
  std::size_t scales_offset(const Exchange& exchange, int source, std::int64_t row) const {
    if (config_.masks) {
      const std::size_t own = slot(0, 0, config_.capacity) * row_bytes(exchange);
      return source_offset(exchange.generation, source) + own +
             slot(0, 0, row) * scales() * sizeof(float);
    }
    const std::size_t codes = slot(0, ranks(), 0) * row_bytes(exchange);
    return rows_offset(exchange.generation) + codes +
           slot(0, source, row) * scales() * sizeof(float);
  }
  std::size_t scales() const { return scale_count(static_cast<std::size_t>(config_.hidden)); }
  std::size_t meta_offset(Generation generation, int source, std::int64_t row) const {
    return layout_.metas + slot(generation, source, row) * layout_.meta_slot;
  }
  std::size_t weights_offset(Generation generation, int source, std::int64_t token) const {
    return layout_.weights +
           slot(generation, source, token) * static_cast<std::size_t>(config_.topk) * sizeof(float);
  }
  std::size_t slot(Generation generation, int source, std::int64_t row) const {
    return (buffer(generation) * static_cast<std::size_t>(ranks()) +
            static_cast<std::size_t>(source)) *
               static_cast<std::size_t>(config_.capacity) +
           static_cast<std::size_t>(row);
  }
  /// Of [2, R] lines.
  std::size_t line_offset(std::size_t lines, Generation generation, int source) const {
    return lines + (buffer(generation) * static_cast<std::size_t>(ranks()) +
                    static_cast<std::size_t>(source)) *
                       kLineBytes;
  }
  std::size_t header_offset(Generation generation, int source) const {
    return line_offset(layout_.counts, generation, source);
  }
  /// Where, in the memory of the tokens' owner, the rows to be summed begin that lie from place
  /// `first` on: those of a rank one behind the other, in the order in which it sends them, so that
  /// they cross in few writes.
  std::size_t sums_offset(Generation generation, std::uint64_t first) const {
    return layout_.sums + (buffer(generation) * sum_places() + first) * layout_.sum_slot;
  }
  std::size_t sum_places() const {
    return static_cast<std::size_t>(config_.capacity) * layout_.sum_rows;
  }
  /// Of one of them.
  std::size_t sum_bytes(CombineFormat format) const;

  void check_expert_capacity(const std::vector<std::int32_t>& routes) const;
  std::shared_ptr<Exchange> begin(const ConstTensorView& x, const ConstTensorView& topk_idx,
                                  const LatencyDispatchOptions& options);
  void settle_unreceived();
  /// Nothing reads `generation` any more: gives credit once all before it are released too. With
  /// mutex_ held.
  void release(Generation generation);
  void await_credits(Generation generation);
  void send_rows(const Exchange& exchange, const ConstTensorView& x, const RankBytes& to);

  // rejoin.cpp
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
  /// Waits for what the ranks in `pending` send; returns those of whom it came. `waits`: the
  /// caller's tensor; the time until a rank came, or was masked, is added there.
  RankBytes await_sources(const SourceWait& wait, const RankBytes& pending,
                          const std::optional<TensorView>& waits = {});
  [[noreturn]] void throw_not_rejoined(const protocol::Status& status) const;
  void start_from(Generation agreed, const RankBytes& gone);
  void require_masks() const;
  protocol::FlagRow flag_row(std::size_t offset) const {
    return {segment_.data + offset, kLineBytes, ranks()};
  }

  void encode(const Exchange& exchange, const std::byte* row, WireToken& wire) const;
  /// Whether the token goes to `peer`, and what stands beside it there.
  bool route_to(const Exchange& exchange, std::int64_t token, int peer, std::int32_t* meta) const;
  std::size_t send_row(const Exchange& exchange, const WireToken& wire, int peer, std::int32_t row);
  /// How many tokens go to each rank, [R].
  std::vector<std::int32_t> rows_to_ranks(const Exchange& exchange) const;
  SourceHeader header_of(const Exchange& exchange, int peer, std::int32_t rows) const;

  // dispatch_crossing.cpp
  /// Whether what goes to or comes from `peer` crosses to another domain: as records then.
  bool crosses(int peer) const { return !engine_->topology().together(engine_->rank(), peer); }
  RecordLayout record_layout(const Exchange& exchange) const {
    const std::size_t scale_bytes = quantized(exchange) ? scales() * sizeof(float) : 0;
    return make_record_layout(config_.topk, row_bytes(exchange), scale_bytes);
  }
  std::size_t record_offset(const Exchange& exchange, int source, std::int64_t row) const {
    return layout_.records + slot(exchange.generation, source, 0) * layout_.record_slot +
           static_cast<std::size_t>(row) * record_layout(exchange).bytes;
  }
  /// The same write for row, scales, route and count; returns its bytes.
  std::size_t send_record(const Exchange& exchange, const WireToken& wire, int peer,
                          std::int32_t row, std::int32_t rows);
  /// In place of rows, where there are none.
  std::size_t send_no_record(const Exchange& exchange, int peer);
  /// Where what came from a source lies, by whichever way it came.
  const SourceHeader& header_from(const Exchange& exchange, int source) const;
  const std::int32_t* meta_from(const Exchange& exchange, int source, std::int64_t row) const;
  const std::byte* row_from(const Exchange& exchange, int source, std::int64_t row) const;
  const float* scales_from(const Exchange& exchange, int source, std::int64_t row) const;

  // dispatch_receive.cpp, dispatch_rank_major.cpp
  SourceHeader checked_header(Exchange& exchange, int source);
  const Arrival& note_arrival(Exchange& exchange, int source, std::int32_t row);
  void fan_out(Exchange& exchange, const Arrival& arrival, std::int32_t* counts);
  void place_scales(const Exchange& exchange, int source, std::int64_t row, std::int64_t block,
                    std::int64_t place);
  void make_expert_major(Exchange& exchange);
  void receive_expert_major(Exchange& exchange);
  void make_rank_major(Exchange& exchange);
  void receive_rank_major(Exchange& exchange);
  Tensor scales_tensor(const Exchange& exchange, std::int64_t blocks, std::int64_t rows) const;

  LatencyDispatched dispatched(const Exchange& exchange) const;
  LatencyCombineCall combine_call(const Exchange& exchange,
                                  const std::optional<ConstTensorView>& topk_weights,
                                  const LatencyCombineOptions& options) const;
  void announce_combine(const Exchange& exchange, const LatencyCombineCall& call);
  /// What the ranks in `pending` announced must be what this rank did. Returns those that came.
  RankBytes await_announcements(const Exchange& exchange, const LatencyCombineCall& call,
                                const RankBytes& pending,
                                const std::optional<TensorView>& waits = {});
  void check_announcement(const Exchange& exchange, const LatencyCombineCall& call,
                          int source) const;
  void send_sums(const Exchange& exchange, const LatencyCombineCall& call,
                 const ConstTensorView& rows, const RankBytes& to);
  /// To one owner; returns the bytes.
  std::size_t send_sums_to(const Exchange& exchange, const LatencyCombineCall& call,
                           const ConstTensorView& rows, int owner);
  /// Where the owner wants them. Throws Error(mismatch) unless so many rows have room there.
  std::size_t sums_there(const Exchange& exchange, int owner, std::size_t rows);
  void send_results(const Exchange& exchange, const LatencyCombineCall& call,
                    const ConstTensorView& rows);
  void send_sums_as_weights_come(const Exchange& exchange, const LatencyCombineCall& call,
                                 const ConstTensorView& rows, const RankBytes& to);
  /// The rows of a token in the order in which they are summed; return how many. `next`: [R], of
  /// each rank the row that comes next; tokens are asked for in ascending order.
  using NextSums = std::vector<const std::byte*>;
  std::int64_t rows_of_slots(const Exchange& exchange, const LatencyCombineCall& call,
                             std::int64_t token, NextSums& next, const void** rows,
                             float* factors) const;
  std::int64_t rows_of_ranks(const Exchange& exchange, const LatencyCombineCall& call,
                             std::int64_t token, const RankBytes& came, NextSums& next,
                             const void** rows) const;
  /// The weights of an arrival's slots, [K].
  const float* weights_of(const Exchange& exchange, const LatencyCombineCall& call,
                          std::size_t n) const;
  /// The row as it crosses, in the call's format; if it has to be made, in `room`.
  const std::byte* encode_sum(const LatencyCombineCall& call, const std::byte* row,
                              std::byte* room) const;

  std::shared_ptr<HostEngine> engine_;
  LatencyConfig config_;
  std::uint32_t number_;  ///< among the group's exchanges, the same on all ranks
  fabric::Segment segment_;
  LatencyLayout layout_;
  FabricReach reach_;
  protocol::Credit<> credit_;
  std::array<protocol::Delivery<>, 2> combined_;
  std::array<protocol::Delivery<protocol::AnnounceTraits>, 2> announced_;
  LatencyMasks masks_;
  protocol::Rejoin<> rejoin_;
  CombineRowLayout combine_row_;
  // Calls of a group run one after another.
  std::vector<std::byte> made_sums_;  ///< as many rows as are written at once
  std::vector<std::byte> summed_;     ///< one row, before it is encoded
  std::array<RankBytes, 2> sent_{};   ///< `Exchange::sent` of the last dispatch in each buffer

  std::mutex mutex_;  // of what follows: results are dropped on any thread
  Generation generation_ = 0;
  std::array<bool, 2> alive_{};
  protocol::DropOrder<> drops_{};
  Generation released_ = 0;
  std::vector<Generation> unreceived_{};  // dropped before their rows were received
};

/// The ranks disagree about a call: fails the group and throws Error(mismatch).
[[noreturn]] void disagree(HostEngine& engine, const char* call, int peer, const char* what,
                           Generation generation);

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
