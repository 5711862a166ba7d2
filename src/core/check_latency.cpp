// The arguments of latency mode, and which ranks its exchanges cannot do without.
#include <cstdio>
#include <limits>
#include <string>

#include "base/text.hpp"
#include "core/check.hpp"
#include "core/number/nvfp4.hpp"

namespace ferry {

using std::to_string;

namespace {

std::string number_text(float value) {
  char text[32];
  std::snprintf(text, sizeof text, "%g", static_cast<double>(value));
  return text;
}

void check_nvfp4(const LatencyConfig& config, const LatencyDispatchOptions& options,
                 const Device& where) {
  constexpr std::string_view kCall = "latency dispatch";
  const float g = options.global_scale;
  if (options.format != WireFormat::nvfp4) {
    if (g != 1.0f) refuse(kCall, "global_scale", number_text(g), "1 without format nvfp4");
    return;
  }
  if (where.kind != DeviceKind::cpu) {
    throw Error(ErrorKind::unsupported,
                std::string(kCall) +
                    ": format: got nvfp4 in GPU memory; expected as_is or e4m3: no kernel writes "
                    "nvfp4 yet");
  }
  if (!(g >= kLeastGlobalScale && g <= kMostGlobalScale)) {
    refuse(kCall, "global_scale", number_text(g), "2^-100 to 2^100");
  }
  if (config.hidden % static_cast<std::int64_t>(kNvfp4Block) != 0) {
    refuse(kCall, "format", "nvfp4 with hidden " + to_string(config.hidden),
           "hidden a multiple of 16, which share a scale");
  }
}

}  // namespace

void check_nobody_lost(const LatencyConfig& config, const std::vector<int>& lost) {
  if (config.masks || lost.empty()) return;
  refuse("LatencyExchange", "masks", "false, in a group without " + spell_ranks(lost),
         "true: the places of lost ranks are masked");
}

void check_nobody_lost_since(std::string_view call, std::uint64_t epoch,
                             const std::vector<int>& lost) {
  if (lost.empty()) return;
  refuse(call, "exchange",
         "one without masks that was made in epoch " + to_string(epoch) +
             " of the group and has lost " + spell_ranks(lost),
         "one that is made anew, with masks = true");
}

void check_latency_dispatch(const ConstTensorView& x, const ConstTensorView& topk_idx,
                            const LatencyConfig& config, const LatencyDispatchOptions& options,
                            const Device& where) {
  constexpr std::string_view kCall = "latency dispatch";
  if (x.dtype != config.dtype) {
    refuse(kCall, "x", "dtype " + dtype_text(x.dtype),
           dtype_text(config.dtype) + ", as configured");
  }
  check_tensor(kCall, "x", x, 2, where);
  if (x.columns() != config.hidden) {
    refuse(kCall, "x", "hidden " + to_string(x.columns()),
           to_string(config.hidden) + ", as configured");
  }
  if (x.rows() > config.capacity) {
    refuse(kCall, "x", to_string(x.rows()) + " tokens",
           "at most the capacity, " + to_string(config.capacity));
  }
  if (topk_idx.dims() == 2 && topk_idx.shape[0] != x.rows()) {
    refuse(kCall, "topk_idx", to_string(topk_idx.shape[0]) + " tokens",
           to_string(x.rows()) + ", as x");
  }
  if (topk_idx.dims() == 2 && topk_idx.shape[1] > config.topk) {
    refuse(kCall, "topk_idx", "topk " + to_string(topk_idx.shape[1]),
           "at most " + to_string(config.topk) + ", as configured");
  }
  check_formats(kCall, options.format, options.scale_format);
  check_nvfp4(config, options, where);
  if (options.order > RowOrder::expert_major) {
    refuse(kCall, "order", "number " + to_string(static_cast<int>(options.order)),
           "rank_major or expert_major");
  }
  if (options.order == RowOrder::expert_major && config.order == RowOrder::rank_major) {
    refuse(kCall, "order", "expert_major",
           "rank_major, as configured: there is no room to fan out");
  }
  if (options.topk_weights && topk_idx.dims() == 2) {
    check_exact(kCall, "topk_weights", *options.topk_weights, Dtype::f32,
                {topk_idx.shape[0], topk_idx.shape[1]}, where);
  }
}

void check_waits(std::string_view call, const std::optional<TensorView>& wait_ns, int ranks,
                 const Device& where) {
  if (wait_ns) check_exact(call, "wait_ns", *wait_ns, Dtype::i64, {ranks}, where);
}

namespace {

constexpr std::string_view kCombine = "latency combine";

void check_weights(const std::optional<ConstTensorView>& weights,
                   const LatencyDispatched& dispatched, const Device& where) {
  const bool by_rank = dispatched.order == RowOrder::rank_major;
  if (!weights) {
    if (by_rank || dispatched.weights) return;
    refuse(kCombine, "topk_weights", "none", "weights: the dispatch brought none");
  }
  if (by_rank) {
    refuse(kCombine, "topk_weights", "a tensor with rank-major rows",
           "none: such a row is the caller's own weighted sum");
  }
  if (dispatched.weights) {
    refuse(kCombine, "topk_weights", "a tensor", "none: the weights came with the dispatch");
  }
  check_exact(kCombine, "topk_weights", *weights, Dtype::f32, {dispatched.tokens, dispatched.topk},
              where);
}

void check_signals(const BlockSignals& signals, const LatencyConfig& config,
                   const LatencyDispatched& dispatched, const Device& where) {
  if (where.kind != DeviceKind::cpu) {
    throw Error(ErrorKind::unsupported,
                std::string(kCombine) +
                    ": signals: got rows in GPU memory; expected rows in CPU memory: the kernels "
                    "wait for no block yet");
  }
  if (dispatched.order == RowOrder::rank_major) {
    refuse(kCombine, "signals", "signals with rank-major rows", "expert-major rows");
  }
  if (signals.block_rows < 1) {
    refuse(kCombine, "signals: block_rows", to_string(signals.block_rows), "at least 1");
  }
  const std::int64_t least = signals.is_unsigned ? 0 : std::numeric_limits<std::int32_t>::min();
  const std::int64_t most = signals.is_unsigned ? std::numeric_limits<std::uint32_t>::max()
                                                : std::numeric_limits<std::int32_t>::max();
  if (signals.threshold < least || signals.threshold > most) {
    refuse(kCombine, "signals: threshold", to_string(signals.threshold),
           to_string(least) + " to " + to_string(most) + ", for signals of " +
               (signals.is_unsigned ? "u32" : "i32"));
  }
  const std::int64_t rows = dispatched.ranks * config.capacity;
  const std::int64_t blocks = rows / signals.block_rows + (rows % signals.block_rows != 0);
  check_exact(kCombine, "signals", signals.made, Dtype::i32, {dispatched.local_experts, blocks},
              where);
}

}  // namespace

void check_latency_combine(const ConstTensorView& rows,
                           const std::optional<ConstTensorView>& topk_weights,
                           const LatencyConfig& config, const LatencyDispatched& dispatched,
                           const LatencyCombineOptions& options, const Device& where) {
  if (options.path > CombinePath::per_rank) {
    refuse(kCombine, "path", "number " + to_string(static_cast<int>(options.path)),
           "per_slot or per_rank");
  }
  if (options.format > CombineFormat::logfmt10) {
    refuse(kCombine, "format", "number " + to_string(static_cast<int>(options.format)),
           "as_is, e4m3 or logfmt10");
  }
  if (config.masks && options.path == CombinePath::per_slot &&
      dispatched.order == RowOrder::expert_major) {
    refuse(kCombine, "path", "per_slot in an exchange with masks",
           "per_rank: a place that several ranks write in turn could hold what a masked one wrote "
           "late");
  }
  check_waits(kCombine, options.wait_ns, dispatched.ranks, where);
  const Extents shape =
      dispatched.order == RowOrder::rank_major
          ? Extents{dispatched.ranks, config.capacity, config.hidden}
          : Extents{dispatched.local_experts, dispatched.ranks * config.capacity, config.hidden};
  check_exact(kCombine, "rows", rows, config.dtype, shape, where);
  check_weights(topk_weights, dispatched, where);
  if (options.signals) check_signals(*options.signals, config, dispatched, where);
  if (options.out) {
    check_exact(kCombine, "out", *options.out, config.dtype, {dispatched.tokens, config.hidden},
                where);
    if (overlap(*options.out, rows)) {
      refuse(kCombine, "out", "memory that overlaps rows",
             "memory of its own: rows are read while out is written");
    }
  }
}

}  // namespace ferry
