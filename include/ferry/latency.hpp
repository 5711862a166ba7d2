// Latency mode: small batches, fixed-capacity expert-major output, hooks.
#pragma once
#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>
#include <optional>

#include "ferry/group.hpp"

namespace ferry {

class LatencyEngine;
struct LatencyState;

/// What all ranks agree on when they make a latency exchange.
struct LatencyConfig {
  std::int64_t capacity = 0;  ///< most tokens a rank sends in one dispatch
  std::int64_t hidden = 0;    ///< channels of a token; row bytes a multiple of 16
  int topk = 0;               ///< most slots of a route
  Dtype dtype = Dtype::bf16;  ///< of tokens and of combined rows: bf16, f16 or f32
};

struct LatencyDispatchOptions {
  WireFormat format = WireFormat::as_is;
  ScaleFormat scale_format = ScaleFormat::f32;
  bool hook = false;         ///< true: only send; `receive()` of the result does the rest
  Stream* stream = nullptr;  ///< null: returns finished (or sent) results
};

/// What a latency dispatch brings. Two buffers are used in turn, so at most two results are alive
/// at a time: a dispatch while the result of the one before the last is alive throws
/// Error(exhausted) before anything moves. Dropping the last copy gives its buffer back.
///
/// With a hook the result may be dropped before `receive()`: its rows are thrown away unread, no
/// tensor is written, and it cannot be combined on this rank. The next dispatch of this rank then
/// waits until those rows have arrived, and only then gives the buffer back to the senders.
class LatencyReceived {
 public:
  Tensor x{};       ///< [local experts, ranks · capacity, H], e4m3 or the input's dtype; the first
                    ///< counts[e] rows of expert e are valid: ascending source rank, token, slot
  Tensor scales{};  ///< e4m3 only. f32 [local experts, ranks · capacity, ceil(H/128)], or i32
                    ///< [.., ceil(H/512)] packed; column-major: stride 1 along the rows
  Tensor counts{};  ///< i32 [local experts]
  Tensor source_token{};  ///< i32 [local experts, ranks · capacity]: token index at its owner
  Tensor ranges{};        ///< i64 [local experts, ranks]: (first row << 32) | rows
  Event event{};

  /// With `hook`: receives. Blocks (without a stream) until all rows arrived. Nothing is written
  /// to the tensors before it is called; calling it twice is Error(invalid_argument).
  void receive();

  std::shared_ptr<LatencyState> state{};
};

struct LatencyCombineOptions {
  bool hook = false;
  std::optional<TensorView> out{};  ///< [T, H], the caller's own output
  Stream* stream = nullptr;
};

class LatencyCombined {
 public:
  Tensor x{};  ///< [T, H]: Σ_k w_k · row_k, fp32 fma in ascending k from +0, one rounding
  Event event{};
  void receive();  ///< with `hook`, as above

  std::shared_ptr<LatencyState> state{};
};

/// Fixed buffers of latency mode inside a group. Making one is collective: ranks with different
/// configurations get Error(mismatch), and if one rank's is invalid the others are told which.
class LatencyExchange {
 public:
  LatencyExchange(Group& group, const LatencyConfig& config);

  /// Collective. x: [T, H] dense, T ≤ capacity, the configuration's dtype. topk_idx: i64 or i32
  /// [T, K], K ≤ topk, −1 = unused. A token crosses once for each destination rank and fans out
  /// there. At most `capacity` slots of a rank may name one expert, which only ids that repeat
  /// inside a route can exceed; more are Error(invalid_argument) before anything moves.
  LatencyReceived dispatch(const ConstTensorView& x, const ConstTensorView& topk_idx,
                           const LatencyDispatchOptions& options = {});

  /// Collective. rows: [local experts, ranks · capacity, H] in the configuration's dtype, same row
  /// order as `received.x`. topk_weights: f32 [T, K] of this rank's own tokens.
  LatencyCombined combine(const ConstTensorView& rows, const LatencyReceived& received,
                          const ConstTensorView& topk_weights,
                          const LatencyCombineOptions& options = {});

  const LatencyConfig& config() const;
  /// Registered bytes of one rank's latency buffers: what creation adds to memory().latency_bytes.
  static std::size_t memory_hint(const LatencyConfig& config, std::int64_t experts, int ranks,
                                 DeviceKind device = DeviceKind::cpu);

 private:
  std::shared_ptr<LatencyEngine> engine_;
};

}  // namespace ferry
