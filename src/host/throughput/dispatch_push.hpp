// The rows, scales, weights and routes of a dispatch on their way.
#pragma once
#include <cstddef>
#include <cstdint>
#include <vector>

#include "host/throughput/dispatch_call.hpp"

namespace ferry::host {

/// Straight to their final places, after the swap of grants.
class DispatchPush {
 public:
  explicit DispatchPush(const DispatchCall& call);

  /// All of them, to all ranks; each learns that they are there.
  void direct();

  // For a hierarchical dispatch, inside the domain.
  void rows();
  void side(int peer);
  /// A token's row as it crosses, in `codes` if it has to be made; its scales are made, too.
  const std::byte* encode(std::int64_t token, std::byte* codes);
  ConstTensorView scales() const;
  /// The exchange does not stay in the caches: stores go past them.
  bool stream() const { return stream_; }

 private:
  void write(int peer, fabric::Address to, const void* from, std::size_t bytes);

  const DispatchCall& call_;
  const ExchangePlan& plan_ = call_.exchange();
  Channel& channel_ = call_.channel();
  bool stream_;
  std::vector<float> made_scales_{};        // [T, C] of quantised rows
  std::vector<std::uint64_t> put_bytes_{};  // outside the domain, for each peer
};

/// domains/dispatch.cpp: one copy of a token for each domain; `stage`: this rank's, for what
/// crosses to it.
void push_hierarchical(const DispatchCall& call, DispatchPush& push, const std::byte* stage);

}  // namespace ferry::host
