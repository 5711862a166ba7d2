// What all ranks must give alike in a call, on either engine.
#pragma once
#include <cstdint>

#include "core/call.hpp"
#include "core/wire_row.hpp"
#include "ferry/group.hpp"
#include "ferry/tensor.hpp"

namespace ferry {

/// But for the crossing. `topk` and `plan`: of the plan, and its number.
inline CallSignature dispatch_signature(const WireRow& row, int topk,
                                        const DispatchOptions& options, bool carries_routes,
                                        std::uint64_t plan) {
  CallSignature call;
  call.kind = CallKind::dispatch;
  call.dtype = static_cast<std::uint32_t>(row.dtype);
  call.columns = row.columns;
  call.scale_columns = row.scale_columns;
  call.topk = static_cast<std::uint32_t>(topk);
  call.order = static_cast<std::uint16_t>(options.order);
  call.routes = carries_routes ? 1 : 0;
  call.weights = options.topk_weights ? 1 : 0;
  call.plan = plan;
  return call;
}

/// The same of a combine.
inline CallSignature combine_signature(const ConstTensorView& rows, int topk,
                                       const CombineOptions& options, std::uint64_t plan) {
  CallSignature call;
  call.kind = CallKind::combine;
  call.dtype = static_cast<std::uint32_t>(rows.dtype);
  call.columns = rows.columns();
  call.topk = static_cast<std::uint32_t>(topk);
  call.order = static_cast<std::uint16_t>(options.order);
  call.weights = options.topk_weights ? 1 : 0;
  call.plan = plan;
  return call;
}

}  // namespace ferry
