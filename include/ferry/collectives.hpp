// Collectives over dense tensors: gradients, parameters, and what else a training exchanges besides
// tokens.
#pragma once
#include <cstdint>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "ferry/group.hpp"
#include "ferry/stream.hpp"
#include "ferry/tensor.hpp"

namespace ferry {

class CollectivesEngine;

/// What is done with the elements of all ranks at one place.
enum class ReduceOp : std::uint8_t { sum, mean, product, min, max };

/// "sum", "mean", "product", "min", "max".
constexpr std::string_view name_of(ReduceOp op) {
  switch (op) {
    case ReduceOp::sum: return "sum";
    case ReduceOp::mean: return "mean";
    case ReduceOp::product: return "product";
    case ReduceOp::min: return "min";
    case ReduceOp::max: return "max";
  }
  return "unknown";
}

/// How the data of an all_reduce travel.
enum class Algorithm : std::uint8_t {
  automatic,     ///< of those with the same order, whichever is expected to take the least time
  one_shot,      ///< with the messages that all ranks give each other: up to 16 KiB
  direct,        ///< hierarchical where there is one domain, or every rank is a domain
  hierarchical,  ///< every domain sums its own, and gives that to the rank that reduces it
  ring,
  tree,
};

/// "automatic", "one_shot", "direct", "hierarchical", "ring", "tree".
constexpr std::string_view name_of(Algorithm algorithm) {
  switch (algorithm) {
    case Algorithm::automatic: return "automatic";
    case Algorithm::one_shot: return "one_shot";
    case Algorithm::direct: return "direct";
    case Algorithm::hierarchical: return "hierarchical";
    case Algorithm::ring: return "ring";
    case Algorithm::tree: return "tree";
  }
  return "unknown";
}

/// As what the f32 sums of a domain and their results cross to other domains; inside a domain
/// nothing is encoded. With another one than `exact` a result differs from the exact one by the
/// rounding of the codes, still the same bits on all ranks. Messages of up to 16 KiB are always
/// exact.
///
///   bf16, f16   2 bytes an element
///   e4m3        1 byte, and an f32 scale, amax / 448, for each 128 elements
///   e5m2        the same with amax / 57344: twice the error, but 2^17 times the range in a block
///   automatic   exact where the codes save less than a tenth of the time, bf16 in the first calls
///               and for some calls after one that fell back, else e4m3; decided alike on all ranks
///
/// A chunk (at most 32768 elements) that holds NaN or infinity crosses as f32, and one that f16
/// cannot hold or whose error is over three times the mean as bf16: see CompressionStats.
enum class ReduceFormat : std::uint8_t { exact, bf16, f16, e4m3, e5m2, automatic };

/// "exact", "bf16", "f16", "e4m3", "e5m2", "automatic".
constexpr std::string_view name_of(ReduceFormat format) {
  switch (format) {
    case ReduceFormat::exact: return "exact";
    case ReduceFormat::bf16: return "bf16";
    case ReduceFormat::f16: return "f16";
    case ReduceFormat::e4m3: return "e4m3";
    case ReduceFormat::e5m2: return "e5m2";
    case ReduceFormat::automatic: return "automatic";
  }
  return "unknown";
}

struct ReduceOptions {
  ReduceOp op = ReduceOp::sum;
  Stream* stream = nullptr;  ///< null: returns finished results
  /// Of all_reduce, the same on all ranks. Another than automatic is used whatever it costs. CUDA,
  /// in one domain: one_shot up to 256 KiB (less beyond 4 ranks), or direct; in several: any but
  /// one_shot, of what the domains have reduced.
  Algorithm algorithm = Algorithm::automatic;
  /// [domains], 0 … 65535, not all 0, of direct and hierarchical, the same on all ranks: the ranks
  /// of each domain reduce elements in proportion. Empty: as the links allow. Results do not depend
  /// on it. CUDA in one domain, one_shot, ring and tree: empty.
  std::vector<int> shares{};
  /// Of all_reduce, the same on all ranks: the order of the sum, and with it the last bits, may
  /// depend on how fast links are: automatic may be ring or tree, too. Of integers it may in any
  /// case.
  bool any_order = false;
  /// CUDA: SMs that run the call, the same on all ranks, 1 … all; 0: a default, of which small
  /// tensors use fewer.
  int num_sms = 0;
  /// Of sums and means of f32, not by ring or tree; others: exact or automatic, which is exact
  /// then. In one domain: exact, whatever it says.
  ReduceFormat format = ReduceFormat::exact;
};

/// What this rank has encoded since creation.
struct CompressionStats {
  std::uint64_t calls = 0;  ///< whose sums crossed in codes
  /// Of them, with a chunk of this rank in a wider format than theirs.
  std::uint64_t fallen_back = 0;
  std::uint64_t chunks = 0;       ///< encoded
  std::uint64_t nonfinite = 0;    ///< chunks with NaN or infinity: sent as f32
  std::uint64_t overflows = 0;    ///< chunks with a value beyond the format: sent as bf16 or f32
  std::uint64_t spikes = 0;       ///< chunks with an error over three times the mean: sent as bf16
  std::uint64_t exact_bytes = 0;  ///< of the chunks as f32
  std::uint64_t wire_bytes = 0;   ///< of the chunks as they crossed
  /// Root of (sum of squared errors / sum of squares), of the elements that are not the largest of
  /// their 128, in the format that was measured (in the first calls of `automatic`: e4m3).
  double relative_error = 0;
  friend bool operator==(const CompressionStats&, const CompressionStats&) = default;
};

/// Two domains between which less goes than the network interfaces of both allow.
struct SlowPair {
  int a = 0;  ///< < b
  int b = 0;
  double bytes_per_second = 0;  ///< β
};

/// How an all_reduce of f32 would travel now if it were automatic, the same on all ranks.
struct Choice {
  Algorithm algorithm = Algorithm::automatic;
  /// [domains]: the part of the tensor that the ranks of each domain reduce, equally among them;
  /// of ring and tree it says nothing.
  std::vector<double> shares{};
  double predicted_seconds = 0;  ///< 0 in one domain and of one_shot, where nothing is chosen
  double observed_seconds = 0;   ///< of late, by this way and of about this size; 0: none yet
  /// [domains]: α and β of the links of each, as known now; a link has the mean of both α and the
  /// smaller β, but for `slow_pairs`. 0 in one domain.
  std::vector<double> latency_seconds{};
  std::vector<double> bytes_per_second{};
  std::vector<SlowPair> slow_pairs{};  ///< in ascending order
  /// Ranks of one domain store what they show of ordinary tensors past the caches: where the cores
  /// share none, reading what another core wrote takes longer than memory.
  bool past_caches = false;
};

struct CollectiveOptions {
  Stream* stream = nullptr;  ///< null: returns finished results
  int num_sms = 0;           ///< as of ReduceOptions
};

struct WindowState;

/// Rows in registered memory of every rank, which each rank reads without the others.
///
/// The rows of all ranks are numbered one behind the other, in ascending rank. A rank writes to its
/// own (`rows`); what it wrote before a call of all ranks, a barrier say, the others read after
/// theirs. A rank's rows are there until it drops its Window and the tensors of `rows`: before
/// that, all ranks meet. Copies are the same Window.
class Window {
 public:
  Tensor rows() const;  ///< this rank's own, at first 0
  /// The number of a rank's first row; of `size()`: how many rows there are.
  std::int64_t first(int rank) const;
  /// Not collective: copies those rows. numbers: i64 or i32 [n]; out: [n, columns], the Window's
  /// dtype, dense.
  void get(const ConstTensorView& numbers, const TensorView& out) const;

 private:
  friend class Collectives;
  explicit Window(std::shared_ptr<const WindowState> state) : state_(std::move(state)) {}
  std::shared_ptr<const WindowState> state_;
};

/// R ranks that reduce and gather dense tensors in CPU memory, or with backend cuda in the memory
/// of their GPUs. Made from the same bootstrap as a Group, or without one; it has flags and
/// registered memory of its own, so its calls on one stream overlap those of a group on another.
/// All ranks make the same calls in the same order, but for send and recv.
///
/// Tensors are dense, in CPU memory or in that of this rank's GPU. Those in memory of `empty()` are
/// read and written in place by the peers of the domain; others are copied through registered
/// memory once. On a stream, a tensor must be held until the event of its call is complete.
///
/// Arithmetic: f32, bf16 and f16 are reduced in fp32 from +0 (product from 1; min and max from the
/// first): over the ranks of each domain in ascending order, then over the domains in ascending
/// order; mean divides by R; one rounding to nearest even. So every rank has the same bits,
/// whatever the fabric. min and max are NaN where an element is. i32, i64 and u8 wrap around; their
/// mean is refused.
///
/// So do all algorithms but two, which sum in fp32 in an order of their own and round once, too.
/// Ranks in order, domain after domain, R of them: `ring` cuts the tensor into R equal parts of
/// whole 128 elements (part c begins at element 128 ⌊c units / R⌋) and sums part c over ranks c +
/// 1, c + 2, …, R − 1, 0, …, c. `tree` adds to the element of a rank what comes from below it: from
/// ranks 2i + 1 and 2i + 2 of its domain, i its index there, then, the first rank of domain d, from
/// the first ranks of domains 2d + 1 and 2d + 2. On GPUs of several domains each domain sums first,
/// and is a rank of both.
class Collectives {
 public:
  /// Collective. Of `config`, `experts` and `crossing` do not count; backend: automatic is host.
  /// `memory_bytes`: for `empty()`; 4 to 25 MiB more are registered for copies, 132 MiB on a GPU;
  /// on GPUs of several domains twice 8 MiB for each rank of the smallest, for two at least, too.
  Collectives(std::shared_ptr<Bootstrap> bootstrap, GroupConfig config);
  ~Collectives();
  Collectives(Collectives&&) noexcept;
  Collectives& operator=(Collectives&&) noexcept;

  int rank() const;
  int size() const;
  int domains() const;
  std::string fabric_name() const;

  /// Collective. x: f32, bf16, f16, i32, i64 or u8, any shape, the same number of elements on all
  /// ranks. Overwrites it with the reduction over all ranks.
  Event all_reduce(const TensorView& x, const ReduceOptions& options = {});
  /// Not collective. What an automatic all_reduce of so many bytes would do.
  Choice choice(std::size_t bytes, bool any_order = false) const;
  /// Collective. x: R equal blocks; `out` (a block, dtype of x; it may be block `rank()` of x)
  /// takes the reduction of block `rank()`.
  Event reduce_scatter(const ConstTensorView& x, const TensorView& out,
                       const ReduceOptions& options = {});
  /// Collective. `out`: R times the elements of x, its dtype (any): the tensors of all ranks in
  /// ascending order. x may be block `rank()` of it.
  Event all_gather(const ConstTensorView& x, const TensorView& out,
                   const CollectiveOptions& options = {});
  /// Collective. x of `root` on all ranks; any dtype.
  Event broadcast(const TensorView& x, int root, const CollectiveOptions& options = {});
  /// Collective. x: R equal blocks of any dtype; block p goes to rank p. `out` takes what came, in
  /// ascending order of the sources.
  Event all_to_all(const ConstTensorView& x, const TensorView& out,
                   const CollectiveOptions& options = {});
  /// The same with blocks of any size: [R] elements for each rank, and [R] from each. Throws
  /// Error(mismatch) where a rank expects another number than its peer sends.
  Event all_to_all(const ConstTensorView& x, std::span<const std::int64_t> send_counts,
                   const TensorView& out, std::span<const std::int64_t> recv_counts,
                   const CollectiveOptions& options = {});
  /// Collective, in one domain of CPUs. Copies of rows, as those of experts: x is [L, n], `out`
  /// [C, n] of the same dtype, L and C the same on all ranks and at most 4096, and `table` too:
  /// [R, C], row t % L of rank t / L goes to row c of `out` on rank r, where t = table[r, c]; -1:
  /// the row stays as it is. Ranks read tensors in memory of `empty()`, and those of threads of one
  /// process, where they lie.
  Event copy_rows(const ConstTensorView& x, const TensorView& out,
                  std::span<const std::int32_t> table, const CollectiveOptions& options = {});
  /// Collective. The other way, for gradients of copies: x is f32 [C, n], `out` [L, n]. Rows of x
  /// are added to those that the table names, in fp32, in ascending rank, then row.
  Event add_rows(const ConstTensorView& x, const TensorView& out,
                 std::span<const std::int32_t> table, const CollectiveOptions& options = {});
  /// The same on GPUs, by a table in memory of this GPU, i32 [R, C], R · C at most 4096, which no
  /// CPU reads: it may be the work of a kernel before (GpuBalancer::table). What peers touch must
  /// be in memory of `empty()`: `out` of copy_rows, x of add_rows. Entries that name no row are
  /// left out, and tables are not compared.
  Event copy_rows(const ConstTensorView& x, const TensorView& out, const ConstTensorView& table,
                  const CollectiveOptions& options = {});
  Event add_rows(const ConstTensorView& x, const TensorView& out, const ConstTensorView& table,
                 const CollectiveOptions& options = {});
  /// Collective. `rows` rows of this rank, of as many columns of one dtype as on all ranks, in
  /// registered memory. Throws Error(exhausted) on all ranks where `memory_bytes` of one do not
  /// hold its rows, and Error(unsupported) with several domains or backend cuda.
  Window window(std::int64_t rows, std::int64_t columns, Dtype dtype);
  /// Collective. Returns when every rank has called it.
  void barrier();

  /// Between two ranks: x goes to `peer`, which receives it into a tensor of as many bytes. Ends
  /// when the peer has asked for it; then x may be changed. Transfers of two ranks match by tag, in
  /// the order in which they begin: those of one stream, and those without, in the order of the
  /// calls; on several streams give them tags of their own. Where the sizes differ, both throw
  /// Error(mismatch), and all goes on.
  ///
  /// On a stream, transfers that follow each other are under way together, so that two ranks may
  /// each send before they receive; other work of the stream waits for them. They do not wait for
  /// calls of all ranks on other streams, nor those for them.
  Event send(const ConstTensorView& x, int peer, int tag = 0,
             const CollectiveOptions& options = {});
  Event recv(const TensorView& x, int peer, int tag = 0, const CollectiveOptions& options = {});

  /// A dense tensor in registered memory. Not collective, so it never grows that memory: throws
  /// Error(exhausted) when `memory_bytes` do not hold it.
  Tensor empty(const Extents& shape, Dtype dtype);
  bool is_registered(const void* pointer) const;

  MemoryStats memory() const;
  TimeStats time() const;
  NetworkStats network() const;
  CompressionStats compression() const;

  /// Leaves: never blocks on peers; those that still exchange get Error(peer_left).
  void destroy();
  bool destroyed() const;

 private:
  std::shared_ptr<CollectivesEngine> engine_;
};

}  // namespace ferry
