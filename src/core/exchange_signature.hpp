// What all ranks must give alike in a call, on either engine.
#pragma once
#include <cstdint>

#include "core/call.hpp"
#include "core/wire_row.hpp"
#include "ferry/group.hpp"
#include "ferry/latency.hpp"
#include "ferry/tensor.hpp"

namespace ferry {

inline CallSignature plan_signature(int topk, std::uint64_t placement_digest) {
  CallSignature call;
  call.kind = CallKind::plan;
  call.plan.topk = static_cast<std::uint32_t>(topk);
  call.plan.placement_digest = placement_digest;
  return call;
}

/// But for the crossing. `topk` and `plan`: of the plan, and its number.
inline CallSignature dispatch_signature(const WireRow& row, int topk,
                                        const DispatchOptions& options, bool carries_routes,
                                        std::uint64_t plan) {
  CallSignature call;
  call.kind = CallKind::dispatch;
  call.dtype = static_cast<std::uint32_t>(row.dtype);
  call.elements = row.columns;
  call.exchange.scale_columns = row.scale_columns;
  call.exchange.topk = static_cast<std::uint32_t>(topk);
  call.exchange.order = static_cast<std::uint16_t>(options.order);
  call.exchange.carries_routes = carries_routes ? 1 : 0;
  call.exchange.has_weights = options.topk_weights ? 1 : 0;
  call.exchange.plan_number = plan;
  return call;
}

/// The same of a combine.
inline CallSignature combine_signature(const ConstTensorView& rows, int topk,
                                       const CombineOptions& options, std::uint64_t plan) {
  CallSignature call;
  call.kind = CallKind::combine;
  call.dtype = static_cast<std::uint32_t>(rows.dtype);
  call.elements = rows.columns();
  call.exchange.topk = static_cast<std::uint32_t>(topk);
  call.exchange.order = static_cast<std::uint16_t>(options.order);
  call.exchange.has_weights = options.topk_weights ? 1 : 0;
  call.exchange.plan_number = plan;
  return call;
}

/// Of a latency exchange that is made. `valid`: this rank's can be; otherwise peers are told that
/// it cannot.
inline CallSignature latency_signature(const LatencyConfig& config, bool valid = true) {
  CallSignature call;
  call.kind = CallKind::latency;
  call.dtype = static_cast<std::uint32_t>(config.dtype);
  call.elements = valid ? config.hidden : -1;
  call.latency.capacity = config.capacity;
  call.latency.topk = static_cast<std::uint32_t>(config.topk);
  call.latency.has_masks = config.masks ? 1 : 0;
  call.latency.order = static_cast<std::uint32_t>(config.order);
  return call;
}

}  // namespace ferry
