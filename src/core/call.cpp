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
  }
  return "an unknown call";
}

CallKind call_named(std::string_view name) {
  for (std::uint32_t i = 1; i <= static_cast<std::uint32_t>(CallKind::all_to_all); ++i) {
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

std::string says(const char* what, const std::string& theirs, int their_rank,
                 const std::string& mine) {
  return std::string(what) + " is " + theirs + " on rank " + std::to_string(their_rank) + " but " +
         mine + " here";
}

const char* yes_no(std::uint32_t value) {
  return value != 0 ? "given" : "not given";
}

const char* order_name(std::uint32_t order) {
  return order == 0 ? "rank_major" : "expert_major";
}

std::string dtype_name(std::uint32_t dtype) {
  return std::string(name_of(static_cast<Dtype>(static_cast<std::uint8_t>(dtype))));
}

}  // namespace

std::string difference(const CallSignature& theirs, int their_rank, const CallSignature& mine) {
  using std::to_string;
  if (theirs.kind != mine.kind) {
    return says("the call", name_of(theirs.kind), their_rank, name_of(mine.kind));
  }
  const bool collective = mine.kind >= CallKind::all_reduce;
  if (theirs.topk != mine.topk) {
    return says(collective ? "root" : "topk", to_string(theirs.topk), their_rank,
                to_string(mine.topk));
  }
  if (theirs.dtype != mine.dtype) {
    return says("dtype", dtype_name(theirs.dtype), their_rank, dtype_name(mine.dtype));
  }
  if (theirs.columns != mine.columns) {
    return says(collective ? "the number of elements" : "hidden", to_string(theirs.columns),
                their_rank, to_string(mine.columns));
  }
  if (theirs.scale_columns != mine.scale_columns) {
    // A latency exchange's configuration crosses with its capacity here.
    const bool latency = mine.kind == CallKind::latency;
    return says(latency      ? "capacity"
                : collective ? "the number of SMs"
                             : "the number of scales a token",
                to_string(theirs.scale_columns), their_rank, to_string(mine.scale_columns));
  }
  if (theirs.order != mine.order && collective) {
    const auto op = [](std::uint16_t order) {
      return std::string(name_of(static_cast<ReduceOp>(static_cast<std::uint8_t>(order))));
    };
    return says("op", op(theirs.order), their_rank, op(mine.order));
  }
  if (theirs.order != mine.order) {
    return says("order", order_name(theirs.order), their_rank, order_name(mine.order));
  }
  if (theirs.weights != mine.weights) {
    const bool latency = mine.kind == CallKind::latency;  // whether it has masks
    return says(latency ? "masks" : (collective ? "counts" : "topk_weights"),
                yes_no(theirs.weights), their_rank, yes_no(mine.weights));
  }
  if (theirs.plan != mine.plan && collective) {
    return says("shares (as a hash)", to_string(theirs.plan), their_rank, to_string(mine.plan));
  }
  if (theirs.plan != mine.plan) {
    return says("the plan (by the order of making)", to_string(theirs.plan), their_rank,
                to_string(mine.plan));
  }
  const auto algorithm = [](std::uint32_t value) {
    return std::string(name_of(static_cast<Algorithm>(static_cast<std::uint8_t>(value))));
  };
  if (theirs.crossing != mine.crossing && collective) {
    return says("algorithm", algorithm(theirs.crossing), their_rank, algorithm(mine.crossing));
  }
  if (theirs.routes != mine.routes && collective) {
    return says("the algorithm chosen", algorithm(theirs.routes), their_rank,
                algorithm(mine.routes));
  }
  if (theirs.crossing != mine.crossing) {
    const auto name = [](std::uint16_t crossing) {
      return std::string(name_of(static_cast<Crossing>(static_cast<std::uint8_t>(crossing))));
    };
    return says("crossing", name(theirs.crossing), their_rank, name(mine.crossing));
  }
  if (theirs.routes != mine.routes) {
    return says("first dispatch of the plan", theirs.routes ? "true" : "false", their_rank,
                mine.routes ? "true" : "false");
  }
  return {};
}

}  // namespace ferry
