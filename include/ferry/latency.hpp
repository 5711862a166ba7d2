// Latency mode: small batches, fixed-capacity expert-major output, hooks.
#pragma once
#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <vector>

#include "ferry/group.hpp"

namespace ferry {

class LatencyEngine;
struct LatencyState;

/// What all ranks agree on when they make a latency exchange.
struct LatencyConfig {
  std::int64_t capacity = 0;  ///< most tokens a rank sends in one dispatch
  std::int64_t hidden = 0;    ///< channels of a token; row bytes a multiple of 16
  int topk = 0;               ///< most slots of a route
  Dtype dtype = Dtype::bf16;  ///< of tokens and of combined rows: bf16, f16 or f32
  /// What a rank that misses the deadline of a call (on the host: of all its waits together; on
  /// GPUs: of each) costs. false: the group fails, as in throughput mode. true: the rank is masked
  /// and the others go on without it (`LatencyExchange::masked`); combines take
  /// `CombinePath::per_rank`.
  bool masks = false;
  /// Of results. expert_major: rank_major ones, too. rank_major: there is no room to fan out, which
  /// on the host is 2 · local experts · ranks · capacity rows less.
  RowOrder order = RowOrder::expert_major;
};

/// Who sums the rows of a token.
enum class CombinePath : std::uint8_t {
  per_slot,  ///< one row for each slot crosses; the owner sums them in ascending k: bit-exact with
             ///< the definition of `LatencyCombined::x`
  per_rank,  ///< the rank of the experts sums its slots in ascending k from +0 by fp32 fma and
             ///< rounds to the dtype; one row for each rank crosses; the owner adds them in
             ///< ascending rank from +0, one rounding
};

/// How the rows of a combine are written in flight. Whoever sends a row quantises it, once; its
/// owner takes the exact values of the codes (e4m3: times the scale, rounded to fp32) and sums them
/// as the path says. Of `per_rank` it is the row in the dtype that is quantised.
enum class CombineFormat : std::uint8_t {
  as_is,     ///< the configuration's dtype
  e4m3,      ///< e4m3 with one f32 scale for each 128 channels, as dispatch quantises
  logfmt10,  ///< 10 bits a channel: sign and 9 bits of logarithm between the least and the largest
             ///< magnitude of 128 channels
};

struct LatencyDispatchOptions {
  WireFormat format = WireFormat::as_is;
  ScaleFormat scale_format = ScaleFormat::f32;  ///< of e4m3
  /// Of nvfp4, the same on all ranks: scales are e4m3 of global_scale · amax / 6, and a value is
  /// code · scale / global_scale. 448 · 6 / (largest magnitude of all ranks) uses their whole
  /// range. 2^-100 to 2^100; of other formats 1.
  float global_scale = 1;
  RowOrder order = RowOrder::expert_major;
  /// f32 [T, K]: carried to the ranks of the experts. Rank-major results show them; a combine with
  /// `CombinePath::per_rank` then needs no weights of its own. All ranks or none.
  std::optional<ConstTensorView> topk_weights{};
  /// i64 [ranks]: how many nanoseconds this call's receive waited for each source is added here:
  /// until what the source sends was here, or the source was masked. Of a combine: for its
  /// announcement, and for its rows once all that are awaited had announced; on the host also what
  /// its sending half waited for weights that come with the call.
  std::optional<TensorView> wait_ns{};
  OldName<std::optional<TensorView>> waits{};  ///< deprecated: wait_ns
  bool hook = false;         ///< true: only send; `receive()` of the result does the rest
  Stream* stream = nullptr;  ///< null: returns finished (or sent) results
};

/// What a latency dispatch brings. Two buffers are used in turn, so at most two results are alive
/// at a time: a dispatch while the result of the one before the last is alive throws
/// Error(exhausted) before anything moves. Dropping the last copy gives its buffer back.
/// On GPUs a graph writes to its results at every replay, alive or not. If no captured result was
/// alive together with another, the graphs of an exchange share one buffer and eager results stay
/// in the other; else an eager result is good until the next replay. An eager result that is kept
/// over two dispatches or more, those of replays included, may be read, but to receive or combine
/// it is Error(invalid_argument).
///
/// With a hook the result may be dropped before `receive()`: its rows are thrown away unread, no
/// tensor is written, and it cannot be combined on this rank. The next dispatch of this rank then
/// waits until those rows have arrived, and only then gives the buffer back to the senders.
class LatencyReceived {
 public:
  Tensor x{};  ///< [local experts, ranks · capacity, H], e4m3 or the input's dtype; the first
               ///< counts[e] rows of expert e are valid: ascending source rank, token, slot.
               ///< nvfp4: u8 [.., H/2], the first value of a byte in its low bits
  /// e4m3: f32 [local experts, ranks · capacity, ceil(H/128)], or i32 [.., ceil(H/512)] packed;
  /// column-major: stride 1 along the rows. nvfp4: e4m3 in the tiles that tensor cores read, dense
  /// [local experts, ceil(ranks · capacity / 128), ceil(H/64) · 512]: that of row t and channels
  /// 16j … 16j + 15 is at [t / 128, (j / 4) · 512 + (t % 32) · 16 + (t % 128) / 32 · 4 + j % 4];
  /// of valid rows those behind the last channel are 0.
  Tensor scales{};
  Tensor counts{};        ///< i32 [local experts]
  Tensor source_token{};  ///< i32 [local experts, ranks · capacity]: token index at its owner
  Tensor ranges{};        ///< i64 [local experts, ranks]: (first row << 32) | rows
  /// `RowOrder::rank_major`: nothing is fanned out. x is [ranks, capacity, H], scales
  /// [ranks, capacity, ..] with stride 1 along the rows (nvfp4: tiles of each source), counts i32
  /// [ranks], source_token i32 [ranks, capacity], ranges empty; the first counts[s] rows of source
  /// s are valid, in ascending token. Rows may lie where they were written: then with a hook they
  /// come before `receive()`. With them come the local expert ids of the slots, i32 [ranks,
  /// capacity, K], K of the configuration; −1 where a slot is not on this rank and in rows that are
  /// not valid.
  Tensor topk_idx{};
  Tensor topk_weights{};  ///< rank-major, when weights were given: f32 [ranks, capacity, K], 0
                          ///< where topk_idx is −1
  Event event{};

  /// With `hook`: receives. Blocks (without a stream) until all rows arrived. Nothing is written
  /// to the tensors before it is called, but for rank-major rows; calling it again is
  /// Error(invalid_argument), unless it threw.
  void receive();

 private:
  friend struct Access;
  std::shared_ptr<LatencyState> state_{};
};

/// Expert-major rows that others make while a combine runs, as a grouped GEMM does: in blocks of
/// each expert's rows.
struct BlockSignals {
  /// i32 [local experts, ceil(ranks · capacity / block_rows)], dense: block b of expert e is read
  /// once made[e][b] is `threshold` or more, which its maker stores last, with release order.
  /// Blocks without valid rows need none.
  ConstTensorView made;
  std::int64_t block_rows = 64;
  std::int64_t threshold = 1;  ///< fits a signal
  bool is_unsigned = false;    ///< signals are u32: `made` holds their bits
};

struct LatencyCombineOptions {
  /// Of expert-major rows. Rank-major rows [ranks, capacity, H] hold one row for each token, the
  /// caller's own weighted sum: they are added in ascending rank, whatever the path.
  CombinePath path = CombinePath::per_slot;
  CombineFormat format = CombineFormat::as_is;
  std::optional<TensorView> wait_ns{};         ///< as in dispatch
  OldName<std::optional<TensorView>> waits{};  ///< deprecated: wait_ns
  /// Only send. With `CombinePath::per_rank` and weights that come with the combine the sending
  /// waits for those of the other ranks.
  bool hook = false;
  std::optional<TensorView> out{};  ///< [T, H], the caller's own output; overlaps no row of `rows`
  /// Not given: all rows are made. Rows are sent owner by owner, those of each in ascending token,
  /// as soon as their blocks are made; the call, with a hook, too, returns when all are. A block
  /// that is not made within the deadline is Error(deadline). In CPU memory alone.
  std::optional<BlockSignals> signals{};
  Stream* stream = nullptr;
};

class LatencyCombined {
 public:
  /// [T, H]. per_slot: Σ_k w_k · row_k, fp32 fma in ascending k from +0, one rounding. per_rank, or
  /// rank-major: Σ_rank row_rank, fp32 in ascending rank from +0, one rounding.
  Tensor x{};
  Event event{};
  void receive();  ///< with `hook`, as above

 private:
  friend struct Access;
  std::shared_ptr<LatencyState> state_{};
};

/// Fixed buffers of latency mode inside a group. Making one is collective: ranks with different
/// configurations get Error(mismatch), and if one rank's is invalid the others are told which.
/// The buffers stay with the group when the exchange goes, for a rank that was masked may still
/// write there: make one for each configuration and keep it.
class LatencyExchange {
 public:
  LatencyExchange(Group& group, const LatencyConfig& config);

  /// Collective. x: [T, H] dense, T ≤ capacity, the configuration's dtype. topk_idx: i64 or i32
  /// [T, K], K ≤ topk, −1 = unused. A token crosses once for each destination rank and fans out
  /// there. At most `capacity` slots of a rank may name one expert, which only ids that repeat
  /// inside a route can exceed; more are Error(invalid_argument) before anything moves.
  LatencyReceived dispatch(const ConstTensorView& x, const ConstTensorView& topk_idx,
                           const LatencyDispatchOptions& options = {});

  /// Collective. rows: [local experts, ranks · capacity, H] in the configuration's dtype, same row
  /// order as `received.x`. topk_weights: f32 [T, K] of this rank's own tokens.
  LatencyCombined combine(const ConstTensorView& rows, const LatencyReceived& received,
                          const ConstTensorView& topk_weights,
                          const LatencyCombineOptions& options = {});

  /// Collective. With weights that came with the dispatch, or with rank-major rows [ranks,
  /// capacity, H] in the order of `received.x`. Weights are given once: with the dispatch or with
  /// the combine, and with the combine of rank-major rows never; twice is Error(invalid_argument).
  LatencyCombined combine(const ConstTensorView& rows, const LatencyReceived& received,
                          const LatencyCombineOptions& options = {});

  /// Masks, of an exchange whose configuration has `masks`; else Error(invalid_argument). A masked
  /// rank is neither sent to nor waited for; what it holds of a token is zero. Each rank decides
  /// for itself: a peer is masked by missing the deadline of a call, by the end of its process or
  /// by destroying its group, all of which raise `mask_count`, and by `set_mask`. Late writes of a
  /// masked rank are ignored. A rank that was masked by a peer that it has not masked itself gets
  /// Error(evicted) from its calls, and the others are not disturbed by it.
  std::vector<bool> masked() const;  ///< [ranks]; own rank: never
  /// `rank`: a peer. Counts for calls that begin later. Set it on all ranks that go on, before the
  /// same call: those on which it is not set wait a deadline for that rank, and ranks that cannot
  /// read one another's memory may then mask each other. A mask may be taken back without `rejoin`
  /// only from a rank that made as many dispatches as this one. If that rank got Error(evicted)
  /// meanwhile, it then takes back its own masks of those that went on.
  void set_mask(int rank, bool masked);
  void clear_masks();
  /// Times that this rank masked another by itself. The word lies in (pinned) host memory and lives
  /// as long as the exchange; reading it touches no GPU.
  const std::uint64_t* mask_count() const;
  /// Collective of all ranks, those that go on and those that come back, at the same place in every
  /// rank's calls: agrees on a generation after all that were used and clears all masks, but of
  /// ranks whose process has ended or that destroyed their group: those stay masked. A rank that
  /// does not come within the deadline, or a second one where it was held up in its last call, is
  /// Error(deadline) that names it; until a rejoin succeeds every other call of this rank is
  /// Error(evicted) then. Results that are alive may still be read, but neither received nor
  /// combined. Group::regroup does the same for all exchanges of its group, with the ranks of the
  /// view; ranks that were lost stay masked for good, also where another process has their place.
  void rejoin();

  const LatencyConfig& config() const;
  /// Registered bytes of one rank's latency buffers: what creation adds to memory().latency_bytes.
  /// `domains`: those of the group; with several there is room for what comes from the others.
  static std::size_t memory_hint(const LatencyConfig& config, std::int64_t experts, int ranks,
                                 DeviceKind device = DeviceKind::cpu, int domains = 1);

 private:
  std::shared_ptr<LatencyEngine> engine_;
};

}  // namespace ferry
