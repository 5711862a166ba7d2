// What a rank tells its peers about the call it is in, so that ranks that disagree find out before
// anything moves.
#pragma once
#include <array>
#include <cstddef>
#include <cstdint>
#include <string>
#include <string_view>

namespace ferry {

enum class CallKind : std::uint32_t {
  none,
  plan,
  dispatch,
  combine,
  barrier,
  grow,
  latency,           ///< the making of a latency exchange
  latency_dispatch,  ///< these two swap nothing; they are for `CallWord`
  latency_combine,
  links,  ///< measure_links
  all_reduce,
  reduce_scatter,
  all_gather,
  broadcast,
  all_to_all,
  copy_rows,
  add_rows,
  window,
  regroup,  ///< swaps nothing; for `CallWord`
  commit,
  recover,  ///< of a vault, as the next
  put,
  bootstrap,  ///< bytes of all ranks, for another group
};
inline constexpr std::size_t kCallKinds = static_cast<std::size_t>(CallKind::bootstrap) + 1;

const char* name_of(CallKind kind);
/// The call whose name_of this is; none for another name.
CallKind call_named(std::string_view name);

/// The call that a rank is in, as one word that its peers may read: for messages alone.
struct CallWord {
  CallKind kind = CallKind::none;
  std::uint32_t exchange = 0;  ///< which latency exchange of the group, by the order of making
  friend bool operator==(const CallWord&, const CallWord&) = default;
};
std::uint64_t pack(const CallWord& word);
CallWord unpack_call(std::uint64_t word);
/// "latency dispatch of exchange 2", "no call of this group".
std::string to_string(const CallWord& word);

/// Of a plan's number: a graph says it as often as it is replayed, also in later epochs, and beside
/// processes that have captured theirs later.
inline constexpr std::uint64_t kInGraph = std::uint64_t{1} << 63;

/// What a call says beside its kind, dtype and elements: of dispatch and combine. These are trivial
/// types, members of a union.
struct ExchangeTerms {
  std::int64_t scale_columns;
  std::uint32_t topk;
  std::uint16_t order;           ///< a RowOrder
  std::uint16_t crossing;        ///< a Crossing, never automatic; 0 in calls that do not cross
  std::uint32_t carries_routes;  ///< whether it is the first dispatch of its plan
  std::uint16_t has_weights;
  std::uint16_t chunk_kib;  ///< of what crosses between domains, where a tuner chose it; 0: not
  /// Which plan, by the order of making: in the epoch; behind kInGraph: in the graph that it was
  /// captured into.
  std::uint64_t plan_number;
};

/// Of a plan.
struct PlanTerms {
  std::uint64_t placement_digest;
  std::uint32_t topk;
  std::uint32_t reserved;
  std::uint64_t reserved_too[2];
};

/// Of the making of a latency exchange.
struct LatencyTerms {
  std::int64_t capacity;
  std::uint32_t topk;
  std::uint32_t order;  ///< a RowOrder
  std::uint32_t reserved;
  std::uint32_t has_masks;
  std::uint64_t reserved_too;
};

/// Of a collective; zeros where it has no such thing.
struct CollectiveTerms {
  std::int64_t blocks;        ///< that run it, on GPUs
  std::uint32_t root;         ///< of broadcast
  std::uint8_t op;            ///< a ReduceOp
  std::uint8_t format;        ///< a ReduceFormat
  std::uint16_t algorithm;    ///< the Algorithm asked for
  std::uint32_t chosen;       ///< the Algorithm chosen
  std::uint16_t any_order;    ///< of all_reduce
  std::uint16_t has_counts;   ///< of all_to_all on GPUs
  std::uint64_t shares_hash;  ///< of all_reduce
};

/// Of copy_rows and add_rows; `elements`: columns.
struct RowTableTerms {
  std::int64_t rows;   ///< of a rank, which others copy
  std::int64_t slots;  ///< of a rank, for copies
  std::uint64_t hash;  ///< of the table
  std::uint64_t reserved;
};

/// Of Group::commit.
struct CommitTerms {
  std::uint64_t step;
  std::uint64_t reserved[3];
};

/// Of Vault::recover and, across domains, Vault::put.
struct VaultTerms {
  std::uint64_t version_bytes;
  std::uint64_t step;  ///< of put
  std::uint64_t reserved[2];
};

/// Everything about a call that must be the same on all ranks. Trivially copyable, without padding:
/// it crosses, and kernels compare its words.
struct CallSignature {
  CallKind kind = CallKind::none;
  std::uint32_t dtype = 0;
  std::int64_t elements = 0;  ///< of a token, or of a collective's tensor
  union {                     ///< by `kind`; all of one size
    ExchangeTerms exchange{};
    PlanTerms plan;
    LatencyTerms latency;
    CollectiveTerms collective;
    RowTableTerms rows;
    CommitTerms commit;
    VaultTerms vault;
  };
};
static_assert(sizeof(ExchangeTerms) == 32 && sizeof(PlanTerms) == 32 &&
              sizeof(LatencyTerms) == 32 && sizeof(CollectiveTerms) == 32 &&
              sizeof(CommitTerms) == 32 && sizeof(RowTableTerms) == 32 &&
              sizeof(VaultTerms) == 32 && sizeof(CallSignature) == 48);

/// "hidden is 128 on rank 2 but 256 here", for the first field that differs; empty when none does.
std::string difference(const CallSignature& theirs, int their_rank, const CallSignature& mine);

enum class StepStatus : std::uint32_t {
  ok,
  guessed,    ///< ok, but `rows` is a guess: if more arrive, a second grant follows (CUDA)
  no_room,    ///< the arena has no free piece of `need_bytes`
  too_many,   ///< more rows arrive than max_recv_rows; `rows` and `need_bytes` say how many
  exhausted,  ///< memory could not be registered
  invalid,    ///< latency: the configuration cannot be; `handle_bytes` of words follow
};

/// What a rank saw of its last all_reduce, or of its last dispatch or combine where those are
/// tuned, so that all know in the next call.
struct CallReport {
  float seconds = 0;  ///< of the call, from when the ranks had met; 0: there was none
  /// Of a collective's last call in which ranks of one domain read each other's windows: without
  /// the wait until all had begun; 0: there was none.
  float windows_seconds = 0;
};

/// The fixed head of every message; the counts of a plan or a segment's handle follow it.
struct StepMessage {
  CallSignature call{};
  StepStatus status = StepStatus::ok;
  std::uint32_t segment = 0;  ///< of the region granted, or where rows are to be read
  std::uint64_t offset = 0;
  std::uint64_t side_offset = 0;  ///< of the side region: routes, weights
  std::uint32_t side_segment = 0;
  std::uint32_t staging_segment = 0;  ///< combine: granted to peers outside the domain
  std::uint64_t staging_offset = 0;
  std::uint64_t staging_side_offset = 0;  ///< the same for weights
  std::uint32_t staging_side_segment = 0;
  std::uint32_t handle_bytes = 0;  ///< of a segment's handle that follows
  std::int64_t rows = 0;           ///< capacity of the granted region, in rows
  std::uint64_t need_bytes = 0;
  CallReport report{};  ///< of collectives, and of calls that are tuned
};

}  // namespace ferry
