#include "core/call.hpp"

#include "ferry/collectives.hpp"
#include "ferry/dtype.hpp"
#include "ferry/network.hpp"

namespace ferry {

const char* name_of(CallKind kind) {
  switch (kind) {
    case CallKind::none: return "none";
    case CallKind::plan: return "plan";
    case CallKind::dispatch: return "dispatch";
    case CallKind::combine: return "combine";
    case CallKind::barrier: return "barrier";
    case CallKind::grow: return "grow";
    case CallKind::latency: return "LatencyExchange";
    case CallKind::latency_dispatch: return "latency dispatch";
    case CallKind::latency_combine: return "latency combine";
    case CallKind::links: return "measure_links";
    case CallKind::all_reduce: return "all_reduce";
    case CallKind::reduce_scatter: return "reduce_scatter";
    case CallKind::all_gather: return "all_gather";
    case CallKind::broadcast: return "broadcast";
    case CallKind::all_to_all: return "all_to_all";
    case CallKind::copy_rows: return "copy_rows";
    case CallKind::add_rows: return "add_rows";
    case CallKind::window: return "window";
    case CallKind::regroup: return "regroup";
    case CallKind::commit: return "commit";
    case CallKind::recover: return "recover";
    case CallKind::put: return "put";
    case CallKind::bootstrap: return "bootstrap";
  }
  return "an unknown call";
}

CallKind call_named(std::string_view name) {
  for (std::size_t i = 1; i < kCallKinds; ++i) {
    if (name == name_of(static_cast<CallKind>(i))) return static_cast<CallKind>(i);
  }
  return CallKind::none;
}

std::uint64_t pack(const CallWord& word) {
  return (std::uint64_t{static_cast<std::uint32_t>(word.kind)} << 32) | word.exchange;
}

CallWord unpack_call(std::uint64_t word) {
  return {static_cast<CallKind>(word >> 32), static_cast<std::uint32_t>(word)};
}

std::string to_string(const CallWord& word) {
  if (word.kind == CallKind::none) return "no call of this group";
  const std::string name = name_of(word.kind);
  return word.exchange == 0 ? name : name + " of exchange " + std::to_string(word.exchange);
}

namespace {

/// Collects what differs first.
class FirstDifference {
 public:
  explicit FirstDifference(int their_rank) : rank_(std::to_string(their_rank)) {}

  template <class T, class Text>
  FirstDifference& of(const char* what, T theirs, T mine, Text text, const char* advice = "") {
    if (!words_.empty() || theirs == mine) return *this;
    words_ = std::string(what) + " is " + std::string(text(theirs)) + " on rank " + rank_ +
             " but " + std::string(text(mine)) + " here" + advice;
    return *this;
  }
  std::string words() const { return words_; }

 private:
  std::string rank_;
  std::string words_;
};

constexpr auto kNumber = [](auto value) { return std::to_string(value); };
constexpr auto kPlan = [](std::uint64_t number) {
  const std::string order = std::to_string(number & ~kInGraph);
  return (number & kInGraph) == 0 ? order : order + " of a graph";
};
constexpr auto kGiven = [](auto value) { return value != 0 ? "given" : "not given"; };
constexpr auto kTruth = [](auto value) { return value != 0 ? "true" : "false"; };
constexpr auto kOrder = [](auto value) { return value == 0 ? "rank_major" : "expert_major"; };
template <class Enum>
constexpr auto kName =
    [](auto value) { return name_of(static_cast<Enum>(static_cast<std::uint8_t>(value))); };

void compare(FirstDifference& first, const ExchangeTerms& theirs, const ExchangeTerms& mine) {
  first.of("topk", theirs.topk, mine.topk, kNumber)
      .of("the number of scales a token", theirs.scale_columns, mine.scale_columns, kNumber)
      .of("order", theirs.order, mine.order, kOrder)
      .of("topk_weights", theirs.has_weights, mine.has_weights, kGiven)
      .of("the plan (by the order of making)", theirs.plan_number, mine.plan_number, kPlan)
      .of("crossing", theirs.crossing, mine.crossing, kName<Crossing>)
      .of("first dispatch of the plan", theirs.carries_routes, mine.carries_routes, kTruth)
      .of("the KiB of a chunk", theirs.chunk_kib, mine.chunk_kib, kNumber);
}

void compare(FirstDifference& first, const PlanTerms& theirs, const PlanTerms& mine) {
  first
      .of("placement of experts, their parameters or balance "
          "(placement_digest: 0 without any, 1 with balance)",
          theirs.placement_digest, mine.placement_digest, kNumber,
          "; where experts have an ExpertPlacement, all ranks balance it alike, and a new one "
          "after a process has joined")
      .of("topk", theirs.topk, mine.topk, kNumber);
}

void compare(FirstDifference& first, const LatencyTerms& theirs, const LatencyTerms& mine) {
  first.of("topk", theirs.topk, mine.topk, kNumber)
      .of("capacity", theirs.capacity, mine.capacity, kNumber)
      .of("order", theirs.order, mine.order, kOrder)
      .of("masks", theirs.has_masks, mine.has_masks, kGiven);
}

void compare(FirstDifference& first, const RowTableTerms& theirs, const RowTableTerms& mine) {
  first.of("the number of rows", theirs.rows, mine.rows, kNumber)
      .of("the number of rows for copies", theirs.slots, mine.slots, kNumber)
      .of("the table (as a hash)", theirs.hash, mine.hash, kNumber);
}

void compare(FirstDifference& first, const CollectiveTerms& theirs, const CollectiveTerms& mine) {
  first.of("root", theirs.root, mine.root, kNumber)
      .of("format", theirs.format, mine.format, kName<ReduceFormat>)
      .of("op", theirs.op, mine.op, kName<ReduceOp>)
      .of("any_order", theirs.any_order, mine.any_order, kTruth)
      .of("counts", theirs.has_counts, mine.has_counts, kGiven)
      .of("shares (as a hash)", theirs.shares_hash, mine.shares_hash, kNumber)
      .of("algorithm", theirs.algorithm, mine.algorithm, kName<Algorithm>)
      .of("the algorithm chosen", theirs.chosen, mine.chosen, kName<Algorithm>)
      // Each algorithm has its own number.
      .of("the number of SMs", theirs.blocks, mine.blocks, kNumber);
}

}  // namespace

std::string difference(const CallSignature& theirs, int their_rank, const CallSignature& mine) {
  FirstDifference first(their_rank);
  first.of("the call", theirs.kind, mine.kind, [](CallKind kind) { return name_of(kind); });
  if (theirs.kind != mine.kind) return first.words();
  if (mine.kind == CallKind::commit) {
    return first.of("step", theirs.commit.step, mine.commit.step, kNumber).words();
  }
  if (mine.kind == CallKind::recover || mine.kind == CallKind::put) {
    return first.of("version_bytes", theirs.vault.version_bytes, mine.vault.version_bytes, kNumber)
        .of("step", theirs.vault.step, mine.vault.step, kNumber)
        .words();
  }
  const bool collective = mine.kind >= CallKind::all_reduce;
  const bool table = mine.kind == CallKind::copy_rows || mine.kind == CallKind::add_rows;
  const bool rows = table || mine.kind == CallKind::window;
  first.of("dtype", theirs.dtype, mine.dtype, kName<Dtype>)
      .of(rows         ? "columns"
          : collective ? "the number of elements"
                       : "hidden",
          theirs.elements, mine.elements, kNumber);
  if (table) {
    compare(first, theirs.rows, mine.rows);
  } else if (collective) {
    compare(first, theirs.collective, mine.collective);
  } else if (mine.kind == CallKind::latency) {
    compare(first, theirs.latency, mine.latency);
  } else if (mine.kind == CallKind::plan) {
    compare(first, theirs.plan, mine.plan);
  } else {
    compare(first, theirs.exchange, mine.exchange);
  }
  return first.words();
}

}  // namespace ferry
