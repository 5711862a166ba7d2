// Collectives of the host engine: how the ranks of a domain share a staging buffer, and
// what crosses between domains.
#pragma once
#include <chrono>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <functional>
#include <memory>
#include <mutex>
#include <optional>
#include <span>
#include <vector>

#include "core/choice/collective_choice.hpp"
#include "core/choice/store_choice.hpp"
#include "core/collective_shares.hpp"
#include "core/engine.hpp"
#include "host/collectives/coded_sums.hpp"
#include "host/collectives/reduce.hpp"
#include "host/kernels/kernels.hpp"
#include "host/throughput/engine.hpp"
#include "protocol/windows.hpp"

namespace ferry::host {

/// Bytes of a message that brings its data along, with all ranks' together.
std::size_t eager_bytes(int ranks);

/// Tensors without elements may have no data; a block may lie where it belongs, where peers read
/// it.
inline void copy_bytes(void* to, const void* from, std::size_t bytes) {
  if (bytes > 0 && to != from) std::memcpy(to, from, bytes);
}

/// The staging buffer of a rank, the same on all ranks: two windows, which the ranks of its domain
/// read, and an inbox, into which the ranks of other domains write.
struct CollectiveStaging {
  /// all_reduce has so many rounds in its inbox at once.
  static constexpr std::size_t kInboxes = 3;
  std::size_t window_bytes = 0;
  std::size_t inbox_bytes = 0;  ///< 0 where there is one domain

  static CollectiveStaging of(const Domains& domains);
  std::size_t bytes() const { return 2 * window_bytes + inbox_bytes; }
  std::size_t window(std::uint64_t which) const { return which * window_bytes; }
  std::size_t inbox() const { return 2 * window_bytes; }
  /// Behind them the word of lent.cpp.
  std::size_t readers() const { return bytes(); }
  std::size_t all_bytes() const { return bytes() + kLineBytes; }
};

class PointToPoint;

class HostCollectives final : public CollectivesEngine,
                              public std::enable_shared_from_this<HostCollectives> {
 public:
  /// `engine`: made with `eager_bytes` in a message and an arena of CollectiveStaging::all_bytes
  /// and PacketLayout::bytes more; of nobody else.
  /// `mean_ranks`: by which a mean divides; 0: its ranks.
  explicit HostCollectives(std::shared_ptr<HostEngine> engine, int mean_ranks = 0);
  ~HostCollectives() override;

  Event all_reduce(const TensorView& x, const ReduceOptions& options) override;
  Event reduce_scatter(const ConstTensorView& x, const TensorView& out,
                       const ReduceOptions& options) override;
  Event all_gather(const ConstTensorView& x, const TensorView& out,
                   const CollectiveOptions& options) override;
  Event broadcast(const TensorView& x, int root, const CollectiveOptions& options) override;
  Event all_to_all(const ConstTensorView& x, const TensorView& out, BlockCounts counts,
                   const CollectiveOptions& options) override;
  Event move_rows(const ConstTensorView& x, const TensorView& out, RowTable table,
                  const CollectiveOptions& options) override;
  Event send(const ConstTensorView& x, int peer, int tag,
             const CollectiveOptions& options) override;
  Event recv(const TensorView& x, int peer, int tag, const CollectiveOptions& options) override;
  std::shared_ptr<const WindowState> window(std::int64_t rows, std::int64_t columns,
                                            Dtype dtype) override;
  ferry::Choice choice(std::size_t bytes, bool any_order) const override;
  Engine& engine() override { return *engine_; }
  CompressionStats compression() const override { return compression_.stats(); }
  Error fail(const char* call, const Error& error) override;

  /// Collective: what the links between domains cost. `call`, `head`: in which it happens. Where
  /// there are several domains.
  void measure_links(const char* call, const StepMessage& head);
  /// As a call of its own.
  void measure_links();
  /// Whether the next all_reduce begins with that: on all ranks or none.
  bool links_due() const;

  // For the calls, inside work.

  Channel& channel() { return engine_->channel(); }
  const std::shared_ptr<engine::Memory>& memory() const { return engine_->shared_memory(); }
  const Domains& domains() const { return engine_->topology(); }
  int rank() const { return engine_->rank(); }
  int size() const { return engine_->size(); }
  int mean_ranks() const { return mean_ranks_; }
  int domain() const { return domains().of(rank()); }
  const std::vector<int>& members() const { return domains().members(domain()); }
  bool is_member(int rank) const { return domains().together(rank, engine_->rank()); }
  const CollectiveStaging& staging() const { return staging_; }
  Compression& compression_state() { return compression_; }

  /// Whether the ranks are threads of one process, and one domain.
  bool one_address_space() const {
    return domains().count() == 1 && engine_->shared_memory()->fabric->one_address_space();
  }
  /// Where a tensor lies, if in registered memory.
  std::optional<fabric::Address> find(const void* data, std::size_t bytes) const {
    return engine_->shared_memory()->arena.find(data, bytes);
  }

  /// The way of the next all_reduce across domains. Every rank decides alike, by what all ranks
  /// reported in earlier calls.
  ReduceWay next_way(const ReduceVolume& volume, bool any_order);
  /// A call of this rank ends; its report goes out with the next message. `counted`: the way was
  /// that of `next_way`.
  void end_reduce(const ReduceWay& way, const ReduceVolume& volume, bool counted);

  /// Every rank's message, and in it whether it makes the same call. Each later step may rely on
  /// what every rank did before.
  void meet(const char* call, StepMessage head, std::span<const std::byte> body = {});
  /// The same with a body for each rank.
  void meet(const char* call, StepMessage head, const Channel::WriteBody& write);
  /// Not before all ranks of the domain are here.
  void meet_members(const char* call);

  /// A call begins whose ranks may read each other's windows: how they are written.
  void choose_stores(CallKind kind, std::size_t bytes);
  /// Copies what other ranks of the domain read into this rank's window; they see it after the next
  /// meeting.
  void show(std::byte* window, const void* data, std::size_t bytes) {
    if (stores_.past) return kernels().copy_stream(window, data, bytes);
    copy_bytes(window, data, bytes);
  }
  bool stores_past_caches() const { return stores_.past; }

  /// The window of the next round, free to be written (protocol/windows.hpp).
  std::size_t next_window() const { return staging_.window(windows_.next()); }
  /// A round begins: the ranks of the domain have met since they wrote their windows. Called for
  /// each round by every rank of the group.
  void begin_round() {
    windows_.begin();
    stores_.used = true;
  }
  /// A place in the staging buffer of this rank or of another one of the domain.
  std::byte* staged(int member, std::size_t offset) {
    return channel().pointer(member, place(offset));
  }

  /// Writes into the staging buffer of a rank of another domain; `tell` must follow.
  void put(int peer, std::size_t offset, const void* data, std::size_t bytes) {
    channel().reach().write(peer, {staging_address_.segment, staging_address_.offset + offset},
                            data, bytes, channel().chunk_tag(peer));
  }
  /// `bytes` were put since the last time; 0: it may go on.
  void tell(int peer, std::size_t bytes = 0) { channel().send_chunk(peer, bytes); }
  void hear(const char* call, int peer) { channel().await_chunk(call, peer); }

 private:
  Event transfer(bool sends, void* data, std::size_t bytes, int peer, int tag, Stream* stream);
  bool doubtful(const std::vector<LinkProbe>& probes) const;
  double ping(const char* call, int to, int from);
  double probe(const char* call, int to, int from, int phase, double latency_s);
  /// Before a meeting and after it.
  void come(StepMessage& head);
  void end_meeting(const char* call, const StepMessage& head);
  /// What all ranks reported in the messages that they have just given each other.
  void take_reports();
  /// A call ends that the ranks have met in; its report goes out with the next message.
  void end_windows();
  /// What was stored past the caches comes before what is told from now on.
  void fence_stores() const {
    if (stores_.past) kernels().stream_fence();
  }
  /// Runs a call of this name in the order of calls.
  Event enter(const char* call, Stream* stream, std::function<void(HostCollectives&)> run);
  fabric::Address place(std::size_t offset) const {
    return {staging_address_.segment, staging_address_.offset + offset};
  }

  std::shared_ptr<HostEngine> engine_;
  int mean_ranks_;
  CollectiveStaging staging_;
  std::shared_ptr<void> staging_memory_;
  fabric::Address staging_address_{};
  protocol::Windows<> windows_{};
  Compression compression_;
  std::shared_ptr<PointToPoint> transfers_;

  // Of the last all_reduce, the same on all ranks but `report_`.
  struct Reduced {
    ReduceWay way;
    ReduceVolume volume;
  };
  std::optional<Reduced> last_{};
  /// Of the call that runs.
  struct Stores {
    StoreChoice::Calls calls{};
    bool past = false;  ///< the caches
    bool used = false;  ///< ranks have read windows
    std::chrono::steady_clock::time_point begin{};
    double before_s = 0;  ///< until this rank came to the meeting
  };
  Stores stores_{};
  std::optional<Stores> shown_{};  // of the last call in which windows were read, until reported
  CallReport report_{};
  std::chrono::steady_clock::time_point met_{};
  mutable std::mutex choice_mutex_;
  CollectiveChoice choice_;
  StoreChoice store_choice_{};
  int phases_ = 0;  // of all measurements before
};

/// Copies a part of a result of `whole` bytes, past the caches if it does not stay in them.
void copy_result(std::size_t whole, void* to, const void* from, std::size_t bytes);

/// What all ranks must call alike.
inline StepMessage head_of(CallKind kind, Dtype dtype, std::int64_t elements,
                           ReduceOp op = ReduceOp::sum, ReduceFormat format = ReduceFormat::exact) {
  StepMessage head;
  head.call.kind = kind;
  head.call.dtype = static_cast<std::uint32_t>(dtype);
  head.call.elements = elements;
  head.call.collective.op = static_cast<std::uint8_t>(op);
  head.call.collective.format = static_cast<std::uint8_t>(format);
  return head;
}

/// Of a call: `automatic` is for any, and only sums of f32 are encoded.
ReduceFormat usable_format(const ReduceOptions& options, Dtype dtype);

/// The calls, each in the file of its name, inside the work of the engine.
void run_all_reduce(HostCollectives& all, const TensorView& x, const ReduceOptions& options);
void run_reduce_scatter(HostCollectives& all, const ConstTensorView& x, const TensorView& out,
                        ReduceOp op, ReduceFormat format);
void run_all_gather(HostCollectives& all, const ConstTensorView& x, const TensorView& out);
void run_broadcast(HostCollectives& all, const TensorView& x, int root);
void run_all_to_all(HostCollectives& all, const ConstTensorView& x, const TensorView& out,
                    const BlockCounts& counts);
void run_rows(HostCollectives& all, const ConstTensorView& x, const TensorView& out,
              const RowTable& table);

/// Collective, as make_host_engine. `mean_ranks`: by which a mean divides, where each rank brings
/// what several have summed; 0: the number of ranks.
std::shared_ptr<CollectivesEngine> make_host_collectives(Bootstrap& bootstrap, GroupConfig config,
                                                         const Domains& domains,
                                                         std::unique_ptr<fabric::Fabric> fabric,
                                                         int mean_ranks = 0);

}  // namespace ferry::host
