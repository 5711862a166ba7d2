// What a dispatch was asked, and how it will be done.
#pragma once
#include <cstdint>
#include <memory>

#include "core/layout.hpp"
#include "core/wire_row.hpp"
#include "host/throughput/engine.hpp"

namespace ferry::host {

struct DispatchCall {
  HostEngine& engine;
  const std::shared_ptr<PlanState> plan;
  const ConstTensorView x;
  const DispatchOptions options;
  const WireRow row = wire_row(x, options);
  /// Until the call has its turn only a guess, for the sizes; as are the next two.
  bool carries_routes = !plan->routes_sent.load();
  Crossing crossing = Crossing::direct;
  bool carries_forwards = false;  ///< what a hierarchical dispatch needs to be spread

  bool expert_major() const { return options.order == RowOrder::expert_major; }
  bool has_weights() const { return options.topk_weights.has_value(); }
  bool hierarchical() const { return crossing == Crossing::hierarchical; }
  Channel& channel() const { return engine.channel(); }
  const ExchangePlan& exchange() const { return plan->exchange; }
  ReceiveLayout receive_layout(std::int64_t rows) const {
    return make_receive_layout(rows, row.bytes(), row.scale_columns);
  }
  SideLayout side_layout(std::int64_t rows) const {
    return make_side_layout(rows, plan->topk, carries_routes, has_weights());
  }
  /// Of what crosses to `rank`.
  StageShape stage_shape(int rank) const {
    return {plan->crossing.stage_rows(rank),
            row.bytes(),
            row.scale_columns,
            plan->topk,
            carries_routes,
            carries_forwards,
            has_weights()};
  }
};

}  // namespace ferry::host
