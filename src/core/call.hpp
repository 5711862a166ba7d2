// What a rank tells its peers about the call it is in, so that ranks that disagree find out before
// anything moves.
#pragma once
#include <array>
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
};

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

/// Everything about a call that must be the same on all ranks. Trivially copyable: it crosses.
struct CallSignature {
  CallKind kind = CallKind::none;
  std::uint32_t dtype = 0;
  std::int64_t columns = 0;        ///< of a collective: elements
  std::int64_t scale_columns = 0;  ///< of a collective on GPUs: blocks that run it
  std::uint32_t topk = 0;          ///< of a collective: root
  /// Of a collective: ReduceOp, and 256 times the ReduceFormat.
  std::uint16_t order = 0;
  /// A Crossing, never automatic; 0 in calls that do not cross. Of all_reduce: the Algorithm asked
  /// for.
  std::uint16_t crossing = 0;
  std::uint32_t routes = 0;  ///< of all_reduce: the Algorithm chosen
  /// Of all_to_all on GPUs: whether counts were given; of all_reduce: any_order.
  std::uint32_t weights = 0;
  /// Which plan of the group, by the order of making; of all_reduce: a hash of the shares.
  std::uint64_t plan = 0;
  friend bool operator==(const CallSignature&, const CallSignature&) = default;
};

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

/// What a rank of a collective saw of the last all_reduce, so that all know in the next call.
struct CallReport {
  float seconds = 0;  ///< of the call, from when the ranks had met; 0: there was none
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
  CallReport report{};  ///< of collectives
};

}  // namespace ferry
