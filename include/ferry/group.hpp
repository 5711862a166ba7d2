// A group of ranks that exchange tokens: throughput mode.
#pragma once
#include <chrono>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "ferry/bootstrap.hpp"
#include "ferry/error.hpp"
#include "ferry/network.hpp"
#include "ferry/observe.hpp"
#include "ferry/old_name.hpp"
#include "ferry/plan.hpp"
#include "ferry/stream.hpp"
#include "ferry/tensor.hpp"
#include "ferry/tuning.hpp"

namespace ferry {

class Engine;

/// By which wire ranks reach each other.
enum class FabricKind : std::uint8_t {
  automatic,  ///< threads of one process: local; processes of one host: shm; several hosts:
              ///< shm inside each, ofi between them
  local,      ///< threads of one process
  shm,        ///< processes of one host, POSIX shared memory
  sim,        ///< threads of one process over an adversarial, seeded network (tests)
  ofi,        ///< processes of any hosts, libfabric: TCP or RDMA (GroupConfig::ofi)
};

/// What runs the exchanges.
enum class Backend : std::uint8_t { automatic, host, cuda };

/// The name used in messages: "automatic", "local", ...
constexpr std::string_view name_of(FabricKind kind) {
  switch (kind) {
    case FabricKind::automatic: return "automatic";
    case FabricKind::local: return "local";
    case FabricKind::shm: return "shm";
    case FabricKind::sim: return "sim";
    case FabricKind::ofi: return "ofi";
  }
  return "unknown";
}

/// "automatic", "host", "cuda".
constexpr std::string_view name_of(Backend backend) {
  switch (backend) {
    case Backend::automatic: return "automatic";
    case Backend::host: return "host";
    case Backend::cuda: return "cuda";
  }
  return "unknown";
}

/// What all ranks of a group agree on. Every field but `on_wait`, `device` and parts of `ofi` must
/// be the same on all ranks; creation fails with Error(mismatch) naming the rank and the field that
/// differ.
struct GroupConfig {
  std::int64_t experts = 0;  ///< in the whole group; contiguous blocks, the first E mod R ranks
                             ///< hold one more
  std::chrono::nanoseconds deadline = std::chrono::seconds(60);  ///< of every wait
  std::size_t memory_bytes = std::size_t{64} << 20;  ///< registered at creation for receive
                                                     ///< tensors; grows by agreement
  FabricKind fabric = FabricKind::automatic;
  Backend backend = Backend::automatic;
  int device = -1;             ///< CUDA ordinal of this rank; −1: the current device
  std::uint64_t sim_seed = 1;  ///< of the sim fabric
  /// Ranks that share memory form a domain; the others are reached over `network`. 0: the ranks of
  /// one host are one domain. n: virtual domains, every n consecutive ranks are one, the last one
  /// shorter if need be; what `fabric` could reach by memory beyond them, it does not.
  int domain_size = 0;
  /// By which wire the ranks of different domains reach each other. automatic: between hosts ofi,
  /// in virtual domains copies through `fabric`, as a network makes them; sim: the simulated
  /// network (ranks as threads); ofi.
  FabricKind network = FabricKind::automatic;
  OfiOptions ofi{};  ///< of the ofi fabric; only `provider` and `endpoints` must be the same
  /// What `automatic` means in the options of this group's calls.
  Crossing crossing = Crossing::automatic;
  /// Not empty: under this name a process that starts later (TcpOptions::join) finds the group and
  /// takes the place of a rank that is lost. One name for each group of a job. Needs fabric shm,
  /// one domain, or with the host backend several that libfabric joins, at most 256 ranks.
  std::string elastic{};
  /// Not empty: a directory that all hosts share (NFS), where a file decides which half of the
  /// ranks goes on when they are cut off from each other (`Group::regroup`). Empty: both halves
  /// stop. With `elastic` it is also where processes find the group on whose host no rank is left.
  /// Needs several domains that libfabric joins.
  std::string arbiter{};
  /// Try other settings while calls run, and keep what is faster (`Group::tuning`). Bits do not
  /// change. Not given: FERRY_TUNING says, and without it no.
  std::optional<bool> tune{};
  std::vector<TunedCall> tuning{};  ///< where it starts (load_tuning); empty: the model
  int fewest_sms = 1;               ///< CUDA: that a tuner may choose
  int most_sms = 24;
  OnWait on_wait{};  ///< polled in every wait; may throw (Ctrl-C)
};

/// How the rows of an output (or of a combine's input) are ordered.
enum class RowOrder : std::uint8_t {
  rank_major,    ///< one row for each (token, this rank): ascending source rank, then token
  expert_major,  ///< one row for each slot: blocks of ascending local expert, inside a block in
                 ///< rank-major order; blocks padded with zero rows to `alignment`
};

/// How rows are written in flight.
enum class WireFormat : std::uint8_t {
  as_is,  ///< the dtype of the input
  e4m3,   ///< quantised: e4m3 with one scale for each 128 channels (core/number.hpp)
  /// quantised: e2m1, two a byte, with one e4m3 scale for each 16 channels and one global scale
  /// (core/number/nvfp4.hpp). Latency mode in CPU memory alone
  nvfp4,
};

enum class ScaleFormat : std::uint8_t {
  f32,           ///< scale = amax / 448
  f32_pow2,      ///< rounded up to a power of two
  ue8m0_packed,  ///< its exponent byte, four in an i32, the first in the lowest byte
};

struct PlanOptions {
  Stream* stream = nullptr;  ///< null: returns when the counts are known
  /// Of what gives the routes their meaning, as ExpertPlacement::digest: ranks that give different
  /// ones throw Error(mismatch), all of them, and the group goes on. It costs nothing.
  std::uint64_t placement_digest = 0;
};

struct DispatchOptions {
  /// f32 [T, K], carried along; arrives as `Received::topk_weights`, 0 where a slot is not local.
  std::optional<ConstTensorView> topk_weights{};
  /// f32 [T, C], any strides, any C ≥ 1: one scale for each token and 128 channels (fp8 input).
  std::optional<ConstTensorView> scales{};
  /// e4m3: f32, bf16 or f16 rows are quantised on the way, H a multiple of 16; instead of `scales`.
  /// Some ranks may do so while others bring e4m3 rows and scales.
  WireFormat format = WireFormat::as_is;
  /// Of format e4m3: f32 or f32_pow2. Every rank's own choice: the scales of a row, f32 in both,
  /// say what its source did.
  ScaleFormat scale_format = ScaleFormat::f32;
  RowOrder order = RowOrder::rank_major;
  std::int64_t alignment = 1;  ///< expert-major: rows of every expert padded to a multiple
  bool row_weights = false;    ///< expert-major: `topk_weights` as `Received::row_weights`, too
  /// > 0: the output has this many rows whatever arrives, so nothing waits for the count; rows
  /// past the last one that arrived are undefined (expert-major: zero), their topk_idx −1. More
  /// arrivals than this are Error(exhausted).
  std::int64_t max_recv_rows = 0;
  OldName<std::int64_t> worst_case_rows{};  ///< deprecated: max_recv_rows
  /// The caller's own output [rows, H] instead of registered memory: costs one extra local copy.
  /// Of the dtype that arrives.
  std::optional<TensorView> out{};
  Stream* stream = nullptr;  ///< null: returns finished results
  /// How tokens cross between domains; the same on all ranks. automatic: what `Plan::crossing`
  /// says.
  Crossing crossing = Crossing::automatic;
  /// CUDA: SMs that carry rows between GPUs, 1 … all; 0: a default. The rearrangement between
  /// rank-major and expert-major rows waits for nobody and uses every SM, briefly. Calls of two
  /// groups that may run at once must find their SMs beside each other. The host engine has none.
  int num_sms = 0;
  OldName<int> sms{};  ///< deprecated: num_sms
};

/// What a dispatch brings. All tensors are on the group's device; `x` and `scales` are registered
/// memory, which goes back to the group when the last copy of the tensor is dropped.
struct Received {
  Tensor x{};  ///< [N, H] in the requested order, dtype of the input or e4m3
  /// f32 [N, C] when scales were given, in the same order; of format e4m3: C = ceil(H / 128).
  Tensor scales{};
  Tensor topk_idx{};      ///< i64 [n, K], rank-major: local expert ids, −1 = not on this rank
  Tensor topk_weights{};  ///< f32 [n, K], rank-major, when weights were given
  Tensor source_token{};  ///< i32 [n], rank-major: index of the token at its owner
  /// i64 [n, K], expert-major only: row of `x` of each slot, −1 = none. May be the plan's own, as
  /// `expert_offsets`: shared with later results and used by later calls, so only to be read.
  Tensor slot_rows{};
  /// i64 [local experts + 1], expert-major only: first row of every expert's block and the end.
  Tensor expert_offsets{};
  Tensor row_weights{};  ///< f32 [N], when asked for: the weight of each row of `x`, 0 of padding
  Plan plan{};           ///< of a dispatch that was given routes: the plan that it made
  Event event{};         ///< complete when the tensors are valid
};

struct CombineOptions {
  RowOrder order = RowOrder::rank_major;
  std::int64_t alignment = 1;  ///< expert-major: as given to dispatch; rank-major: 1
  /// f32 [n, K], rank-major (as `Received::topk_weights`), or of expert-major rows [M], one for
  /// each (as `Received::row_weights`): carried back and summed over ranks into
  /// `Combined::topk_weights`.
  std::optional<ConstTensorView> topk_weights{};
  /// Expert-major only: multiply every slot's row by its weight from `topk_weights`.
  bool apply_weights = false;
  /// [T, H], dtype of the rows: added in fp32 after the ranks, in this order.
  std::optional<ConstTensorView> bias0{};
  std::optional<ConstTensorView> bias1{};
  std::optional<TensorView> out{};  ///< [T, H], the caller's own output; must not overlap the rows
  Stream* stream = nullptr;
  /// How sums come back between domains; the same on all ranks. automatic: as the plan's last
  /// dispatch crossed. hierarchical: only after a dispatch that did; each domain's sum, fp32 in
  /// ascending rank order, is rounded to the dtype of the rows, then the domains are added.
  Crossing crossing = Crossing::automatic;
  /// As in DispatchOptions. Sums of expert-major rows, and copies of rows that are not registered
  /// memory, run beside on other SMs.
  int num_sms = 0;
  OldName<int> sms{};  ///< deprecated: num_sms
};

struct Combined {
  Tensor x{};             ///< [T, H], dtype of the rows
  Tensor topk_weights{};  ///< f32 [T, K] when weights were given
  Event event{};
};

/// Bytes that a group holds, exact.
struct MemoryStats {
  std::size_t control_bytes = 0;     ///< flags and mailboxes
  std::size_t arena_bytes = 0;       ///< receive tensors, in use or free
  std::size_t arena_used_bytes = 0;  ///< of which handed out now
  std::size_t latency_bytes = 0;     ///< buffers of latency exchanges
  friend bool operator==(const MemoryStats&, const MemoryStats&) = default;
};
using MemoryUse [[deprecated("now MemoryStats")]] = MemoryStats;

/// Time that this rank has spent inside exchanges since creation, in nanoseconds. Of the CUDA
/// engine only what the CPU waited for finished results, in both: calls on streams run on the GPU
/// beside the caller and are not counted (CUDA events around them tell).
struct TimeStats {
  std::uint64_t exchange_ns = 0;  ///< in plan, dispatch and combine, waits included
  std::uint64_t wait_ns = 0;      ///< of which waiting for peers
};
using TimeUse [[deprecated("now TimeStats")]] = TimeStats;

/// Who is in a group. Ranks keep their numbers, also when others are lost.
struct GroupView {
  std::uint64_t epoch = 1;    ///< counts the memberships of the group
  std::vector<int> ranks{};   ///< in this epoch, ascending
  std::vector<int> lost{};    ///< the group's other ranks, ascending
  std::uint64_t step = 0;     ///< the newest that any rank has committed; 0: none
  std::vector<int> joined{};  ///< processes that joined since then, ascending: they have no state
  friend bool operator==(const GroupView&, const GroupView&) = default;
};

/// R ranks that exchange tokens. All ranks make the same calls in the same order; for concurrent
/// exchanges make two groups. After a failure every call throws until `regroup`.
///
/// Arithmetic: fp32 accumulation from +0 in ascending rank order, one rounding to nearest even at
/// the end (across domains: see CombineOptions::crossing). From expert-major rows, each rank first
/// sums its own slots in ascending k
/// (`acc = fma(w, x, acc)`), rounds once to the row's dtype, and that one row crosses the wire.
class Group {
 public:
  /// Collective. Throws Error(mismatch) when ranks were given different configurations, and on the
  /// others when one rank's is invalid (which throws Error(invalid_argument) there).
  ///
  /// With a bootstrap that joins, it waits until the ranks of the group, in `regroup`, have taken
  /// this process in; `view` then says at which epoch and step. Throws Error(refused) when a
  /// process that runs has its place.
  Group(std::shared_ptr<Bootstrap> bootstrap, GroupConfig config);
  ~Group();
  Group(Group&&) noexcept;
  Group& operator=(Group&&) noexcept;

  int rank() const;
  int size() const;
  std::int64_t experts() const;
  std::int64_t local_experts() const;
  const GroupConfig& config() const;
  /// "local", "shm", "sim", "ofi"; of several domains with their network: "shm+copies",
  /// "local+sim".
  std::string fabric_name() const;
  /// Domains of this group, numbered by their lowest ranks, and the one that a rank is in.
  int domains() const;
  int domain_of(int rank) const;

  /// Collective. Counts and swaps. topk_idx: i64 or i32 [T, K], values −1 (unused) or 0 … E−1;
  /// T may differ between ranks and be 0, K may not differ; 1 ≤ K ≤ 64.
  Plan plan(const ConstTensorView& topk_idx, const PlanOptions& options = {});

  /// Collective. x: [T, H] dense, any dtype, row bytes a multiple of 16, H and dtype the same on
  /// all ranks. One copy of a token for each destination rank.
  Received dispatch(const ConstTensorView& x, const Plan& plan,
                    const DispatchOptions& options = {});

  /// Collective. plan(topk_idx) and the first dispatch with it in one call: the plan is in the
  /// result. On GPUs faster than two calls: nothing comes between them, so the rows are brought
  /// while the counts still cross.
  Received dispatch(const ConstTensorView& x, const ConstTensorView& topk_idx,
                    const DispatchOptions& options = {});

  /// Collective. rows: f32, bf16 or f16, [n, H] rank-major or [M, H] expert-major, dense, with
  /// exactly the rows of that order and alignment (or of the dispatch's max_recv_rows). Rows in
  /// memory of `empty()` or of a received tensor are read in place by the peers; others are copied
  /// once. Returns, for each own token, the sum over the ranks that it went to; 0 for a token that
  /// went nowhere.
  Combined combine(const ConstTensorView& rows, const Plan& plan,
                   const CombineOptions& options = {});

  /// A dense tensor in registered memory. Not collective, so it never grows the arena: throws
  /// Error(exhausted) when the free registered memory does not hold it.
  Tensor empty(const Extents& shape, Dtype dtype);
  /// True when the pointer lies in this rank's registered memory.
  bool is_registered(const void* pointer) const;

  /// Memory of this group that holds `pointer` is used by work on this CUDA stream, too: once its
  /// tensor is dropped, the memory is not used again before that work has ended. Only for streams
  /// other than the one that the tensor was made on (every stream, when it was made without one).
  /// The stream must live until the tensor is dropped: it is asked for its work then.
  /// Throws Error(invalid_argument) for other memory. The host engine has nothing to do.
  void record_stream(const void* pointer, const Stream& stream);

  /// Collective. Returns when every rank has called it.
  void barrier();

  /// Collective among the ranks that are left, after a call threw because a rank died, left or
  /// missed the deadline: they agree who they are and go on in this group, with the memory that is
  /// registered. Plans made before are refused, and so are routes to experts of lost ranks; ranks
  /// keep their numbers, experts and tensors. When nothing has failed, calls of the others
  /// throw; on the host engine not the collective ones that this rank has ended, so ranks that make
  /// the same calls and then regroup do not disturb each other. Waits for each rank that may still
  /// come, at most one deadline. Throws Error(evicted) on a rank that the others went on without,
  /// and Error(deadline) when ranks are missing that may still run and the others are no majority;
  /// the group then stays failed. Throws Error(unsupported) unless the ranks, at most 256, share
  /// memory (fabric local or shm, one domain) or libfabric joins their domains; and on GPUs in
  /// several domains when the group has had a latency exchange. Elsewhere latency exchanges with
  /// masks go on, and others are made anew. Takes in processes that wait for places of lost ranks
  /// (GroupConfig::elastic).
  GroupView regroup();
  /// Collective. Returns when every rank has called it with this step, so that each has what it
  /// needs to apply it. Steps grow, from 1. A rank whose call threw learns from `regroup` whether
  /// another one's returned: then `step` of the view says so, and all apply it. True, on all ranks
  /// alike, while a process waits for the place of a lost rank: `regroup` takes it in.
  bool commit(std::uint64_t step);
  /// The newest epoch that this rank knows. Not collective.
  GroupView view() const;

  MemoryStats memory() const;
  /// What memory() says right after creation with this configuration and number of ranks. CUDA
  /// ranks of a last domain that is smaller than the others take less.
  static MemoryStats memory_hint(const GroupConfig& config, int ranks);
  TimeStats time() const;
  NetworkStats network() const;
  /// The settings of calls, and why: of each kind of dispatch and combine that was made. The same
  /// on all ranks. Empty without `GroupConfig::tune`. On the host engine there is something to
  /// choose in groups of several domains: the size of chunks, and direct or hierarchical for a
  /// dispatch; on GPUs the number of SMs, in groups of one domain. There, ranks learn what a call
  /// took while they make later ones, so one may tell of it a few calls before another.
  std::vector<TunedCall> tuning() const;
  /// The NICs that this rank uses, and why; none without the ofi fabric.
  std::vector<NicStats> nics() const;
  /// Counters of this rank's calls since creation. Not collective. Of the CUDA engine, whose calls
  /// run on the GPU, failures alone.
  Metrics metrics() const;
  /// Records every call and wait of this rank, until `take_trace`, or until there are `most`
  /// events. Not collective. Throws Error(unsupported) with the CUDA engine.
  void start_trace(std::size_t most = std::size_t{1} << 16);
  Trace take_trace();
  /// Whether this build has that backend; the machine may lack its devices all the same.
  static bool has_backend(Backend backend);
  /// Whether this build has that fabric; the machine may lack its library or network all the same.
  static bool has_fabric(FabricKind kind);

  /// Leaves the group: not collective, never blocks on peers; peers that still exchange get
  /// Error(peer_left). Later calls throw Error(destroyed). Tensors stay valid until dropped.
  void destroy();
  bool destroyed() const;

 private:
  friend struct Access;
  std::shared_ptr<Engine> engine_;
};

/// The ranks of the group's epoch, in their order, meet by a call of the group itself: no store and
/// no host is needed. For collectives or another group, again after each `regroup`. Gathers are
/// calls of the group, with its deadline and its on_wait; when a rank dies, it fails, and it can
/// regroup. Throws Error(invalid_argument) in another epoch than its own, and Error(unsupported)
/// for a rank without experts on GPUs of one domain.
std::shared_ptr<Bootstrap> group_bootstrap(const Group& group);

}  // namespace ferry
