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

std::string op_name(std::uint32_t op) {
  return std::string(name_of(static_cast<ReduceOp>(static_cast<std::uint8_t>(op))));
}

std::string algorithm_name(std::uint32_t algorithm) {
  return std::string(name_of(static_cast<Algorithm>(static_cast<std::uint8_t>(algorithm))));
}

std::string format_name(std::uint32_t format) {
  return std::string(name_of(static_cast<ReduceFormat>(static_cast<std::uint8_t>(format))));
}

/// Of calls of one kind, root, dtype and number of elements.
std::string collective_difference(const CallSignature& theirs, int their_rank,
                                  const CallSignature& mine) {
  if (theirs.order >> 8 != mine.order >> 8) {
    return says("format", format_name(theirs.order >> 8), their_rank, format_name(mine.order >> 8));
  }
  if (theirs.order != mine.order) {
    return says("op", op_name(theirs.order), their_rank, op_name(mine.order));
  }
  if (theirs.weights != mine.weights && mine.kind == CallKind::all_reduce) {
    return says("any_order", theirs.weights ? "true" : "false", their_rank,
                mine.weights ? "true" : "false");
  }
  if (theirs.weights != mine.weights) {
    return says("counts", yes_no(theirs.weights), their_rank, yes_no(mine.weights));
  }
  if (theirs.plan != mine.plan) {
    return says("shares (as a hash)", std::to_string(theirs.plan), their_rank,
                std::to_string(mine.plan));
  }
  if (theirs.crossing != mine.crossing) {
    return says("algorithm", algorithm_name(theirs.crossing), their_rank,
                algorithm_name(mine.crossing));
  }
  if (theirs.routes != mine.routes) {
    return says("the algorithm chosen", algorithm_name(theirs.routes), their_rank,
                algorithm_name(mine.routes));
  }
  if (theirs.scale_columns != mine.scale_columns) {  // each algorithm has its own number
    return says("the number of SMs", std::to_string(theirs.scale_columns), their_rank,
                std::to_string(mine.scale_columns));
  }
  return {};
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
  if (collective) return collective_difference(theirs, their_rank, mine);
  if (theirs.scale_columns != mine.scale_columns) {
    // A latency exchange's configuration crosses with its capacity here.
    const bool latency = mine.kind == CallKind::latency;
    return says(latency ? "capacity" : "the number of scales a token",
                to_string(theirs.scale_columns), their_rank, to_string(mine.scale_columns));
  }
  if (theirs.order != mine.order) {
    return says("order", order_name(theirs.order), their_rank, order_name(mine.order));
  }
  if (theirs.weights != mine.weights) {
    const bool latency = mine.kind == CallKind::latency;  // whether it has masks
    return says(latency ? "masks" : "topk_weights", yes_no(theirs.weights), their_rank,
                yes_no(mine.weights));
  }
  if (theirs.plan != mine.plan) {
    return says("the plan (by the order of making)", to_string(theirs.plan), their_rank,
                to_string(mine.plan));
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
