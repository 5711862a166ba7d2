// What a combine was asked, how it will be done, and the memory that it has for that.
#pragma once
#include <cstddef>
#include <cstdint>
#include <memory>
#include <optional>
#include <vector>

#include "host/throughput/engine.hpp"

namespace ferry::host {

struct CombineCall {
  HostEngine& engine;
  const std::shared_ptr<PlanState> plan;
  const ConstTensorView rows;
  const CombineOptions options;
  const std::vector<RowLayout> dispatched = plan->layouts.all();  ///< before this combine
  // Known when the call has its turn.
  Crossing crossing = Crossing::direct;
  bool outsiders = false;  ///< some peer is outside the domain
  std::size_t chunk_bytes = kChunkBytes;

  bool expert_major() const { return options.order == RowOrder::expert_major; }
  bool has_weights() const { return options.topk_weights.has_value(); }
  bool hierarchical() const { return crossing == Crossing::hierarchical; }
  Channel& channel() const { return engine.channel(); }
  const ExchangePlan& exchange() const { return plan->exchange; }
  bool in_domain(int peer) const { return channel().pointer(peer, {0, 0}) != nullptr; }
  std::size_t weight_bytes() const {
    return has_weights() ? static_cast<std::size_t>(plan->topk) * sizeof(float) : 0;
  }
  /// What is added to the sum of a token; null: nothing.
  const std::byte* bias_row(const std::optional<ConstTensorView>& bias, std::size_t token) const {
    if (!bias) return nullptr;
    return static_cast<const std::byte*>(bias->data) + token * rows.row_bytes();
  }
};

struct CombineMemory {
  std::byte* mine = nullptr;          ///< rank-major rows, in registered memory, for the peers
  const std::byte* rows = nullptr;    ///< the same for this rank; there rows for all are
  std::byte* mine_weights = nullptr;  ///< their weights, likewise
  std::byte* stage = nullptr;         ///< rows pushed from outside, then their weights
  std::byte* staging_weights = nullptr;
};

/// combine_direct.cpp: each row crosses to the owner of its token, who sums in ascending rank.
void combine_direct(const CombineCall& call, const CombineMemory& memory, const Combined& result);
/// domains/combine.cpp: the sums of whole domains cross.
void combine_domains(const CombineCall& call, const CombineMemory& memory, const Combined& result);

}  // namespace ferry::host
