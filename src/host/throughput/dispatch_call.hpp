// What a dispatch was asked, and how it will be done; its rows on their way.
#pragma once
#include <cstddef>
#include <cstdint>
#include <memory>
#include <optional>
#include <vector>

#include "core/layout.hpp"
#include "core/packed_routes.hpp"
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
  std::size_t chunk_bytes = kChunkBytes;

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
  /// Global ids, as they cross to be spread.
  PackedRoutes packed_routes() const { return {engine.placement().experts, plan->topk}; }
  /// Ids of the experts of `target`, as they come from `source`: packed where they cross.
  std::optional<PackedRoutes> packed_routes(int source, int target) const {
    if (hierarchical() || engine.topology().together(source, target)) return std::nullopt;
    return PackedRoutes(engine.placement().local_experts(target), plan->topk);
  }
  /// Of what crosses to `rank`.
  StagingShape staging_shape(int rank) const {
    return {plan->crossing.staging_rows[index(rank)],
            row.bytes(),
            row.scale_columns,
            plan->topk,
            packed_routes().row_bytes(),
            carries_routes,
            carries_forwards,
            has_weights()};
  }
};

/// Rows, scales, weights and routes, straight to their final places, after the swap of grants.
class DispatchPush {
 public:
  explicit DispatchPush(const DispatchCall& call);

  /// All of them, to all ranks; each learns that they are there.
  void direct();

  // For a hierarchical dispatch, inside the domain.
  void rows();
  void side(int peer);
  /// A token's row as it crosses, until the next; of a hierarchical dispatch, which needs it for
  /// each domain, until the end. Its scales are there, too.
  const std::byte* encode(std::int64_t token);
  ConstTensorView scales() const;
  /// The exchange does not stay in the caches: stores go past them.
  bool stream() const { return stream_; }

 private:
  void write(int peer, fabric::Address to, const void* from, std::size_t bytes);

  const DispatchCall& call_;
  const ExchangePlan& plan_ = call_.exchange();
  Channel& channel_ = call_.channel();
  bool stream_;
  std::unique_ptr<std::byte[]> codes_{};    // of quantised rows: [T, bytes] of those that stay
  std::vector<bool> stays_{};               // [T]: that row is made, and stays
  std::vector<float> made_scales_{};        // [T, C] of quantised rows
  std::vector<std::uint64_t> put_bytes_{};  // outside the domain, for each peer
};

/// domains/dispatch.cpp: one copy of a token for each domain; `stage`: this rank's, for what
/// crosses to it.
void push_hierarchical(const DispatchCall& call, DispatchPush& push, const std::byte* stage);

}  // namespace ferry::host
