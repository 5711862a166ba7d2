#include "core/check.hpp"

#include <algorithm>
#include <chrono>
#include <cstdint>
#include <utility>

namespace ferry {
namespace {

using std::to_string;

std::string text(Dtype dtype) {
  return std::string(name_of(dtype));
}

bool is_float(Dtype dtype) {
  return dtype == Dtype::f32 || dtype == Dtype::bf16 || dtype == Dtype::f16;
}

void check_row_bytes(std::string_view call, std::string_view name, std::size_t bytes) {
  if (bytes == 0 || bytes % 16 != 0) {
    refuse(call, name, to_string(bytes) + " bytes a row", "a multiple of 16, at least 16");
  }
  if (bytes > kMaxRowBytes) {
    refuse(call, name, to_string(bytes) + " bytes a row", "at most " + to_string(kMaxRowBytes));
  }
}

void check_aligned(std::string_view call, std::string_view name, const ConstTensorView& tensor) {
  const auto address = reinterpret_cast<std::uintptr_t>(tensor.data);
  if (address % size_of(tensor.dtype) != 0) {
    refuse(call, name, "a pointer that is not aligned to its " + text(tensor.dtype) + " elements",
           "a multiple of " + to_string(size_of(tensor.dtype)) + " bytes (copy the tensor first)");
  }
}

bool overlap(const ConstTensorView& a, const ConstTensorView& b) {
  const auto x = reinterpret_cast<std::uintptr_t>(a.data);
  const auto y = reinterpret_cast<std::uintptr_t>(b.data);
  return a.bytes() > 0 && b.bytes() > 0 && x < y + b.bytes() && y < x + a.bytes();
}

void check_on_cpu(std::string_view call, std::string_view name, const Device& device) {
  if (device.kind != DeviceKind::cpu) {
    refuse(call, name, "device cuda:" + to_string(device.index),
           "cpu, because this group runs on the host engine");
  }
}

void check_alignment(std::string_view call, std::int64_t alignment) {
  if (alignment < 1 || alignment > (std::int64_t{1} << 20)) {
    refuse(call, "alignment", to_string(alignment), "1 … 1048576 rows");
  }
}

}  // namespace

void refuse(std::string_view call, std::string_view argument, const std::string& got,
            const std::string& expected) {
  throw Error(ErrorKind::invalid_argument, std::string(call) + ": " + std::string(argument) +
                                               ": got " + got + "; expected " + expected);
}

std::size_t checked_bytes(std::string_view call, std::string_view name, const Extents& shape,
                          Dtype dtype) {
  std::int64_t bytes = static_cast<std::int64_t>(size_of(dtype));
  bool empty = false;
  for (std::int64_t extent : shape) {
    if (extent < 0) refuse(call, name, "shape " + to_string(shape), "no negative extent");
    empty = empty || extent == 0;
  }
  for (std::int64_t extent : shape) {
    // Not only the product: strides are products of some of the extents.
    if (__builtin_mul_overflow(bytes, std::max<std::int64_t>(extent, 1), &bytes) ||
        bytes > (std::int64_t{1} << 62)) {
      refuse(call, name, "shape " + to_string(shape), "at most 2^62 bytes");
    }
  }
  return empty ? 0 : static_cast<std::size_t>(bytes);
}

void check_config(const GroupConfig& config, int ranks) {
  if (ranks < 1 || ranks > kMaxRanks) {
    refuse("Group", "bootstrap", to_string(ranks) + " ranks", "1 … " + to_string(kMaxRanks));
  }
  if (config.experts < 1 || config.experts > (1 << 20)) {
    refuse("Group", "experts", to_string(config.experts), "1 … 1048576");
  }
  if (config.deadline <= std::chrono::nanoseconds(0) || config.deadline > std::chrono::hours(24)) {
    refuse("Group", "deadline", to_string(config.deadline.count()) + " ns",
           "more than 0 and at most 24 hours");
  }
  if (config.memory_bytes > (std::size_t{1} << 46)) {
    refuse("Group", "memory_bytes", to_string(config.memory_bytes), "at most 64 TiB");
  }
}

void check_config(const LatencyConfig& config) {
  constexpr std::string_view kCall = "LatencyExchange";
  if (config.capacity < 1 || config.capacity > (1 << 20)) {
    refuse(kCall, "capacity", to_string(config.capacity), "1 … 1048576 tokens");
  }
  if (!is_float(config.dtype)) refuse(kCall, "dtype", text(config.dtype), "f32, bf16 or f16");
  if (config.hidden < 1 || config.hidden > (1 << 24)) {
    refuse(kCall, "hidden", to_string(config.hidden), "1 … 16777216 channels");
  }
  check_row_bytes(kCall, "hidden", static_cast<std::size_t>(config.hidden) * size_of(config.dtype));
  if (config.topk < 1 || config.topk > kMaxTopk) {
    refuse(kCall, "topk", to_string(config.topk), "1 … 64");
  }
}

void check_size(const LatencyConfig& config, std::int64_t local_experts, int ranks) {
  // In doubles: the product of the four has no place in 64 bits.
  const double rows = static_cast<double>(ranks) * static_cast<double>(config.capacity);
  const double bytes = 2 * rows * static_cast<double>(local_experts + config.topk + 1) *
                       (static_cast<double>(config.hidden) * 4.5 + 1024);
  if (rows > static_cast<double>(kMaxRows) || bytes > static_cast<double>(1ull << 46)) {
    refuse("LatencyExchange", "capacity",
           to_string(config.capacity) + " tokens of " + to_string(config.hidden) + " channels on " +
               to_string(ranks) + " ranks with " + to_string(local_experts) + " experts each",
           "buffers of less than 64 TiB and 2^31 rows an expert; use a smaller capacity");
  }
}

void check_tensor(std::string_view call, std::string_view name, const ConstTensorView& tensor,
                  int dims) {
  check_on_cpu(call, name, tensor.device);
  if (tensor.dims() != dims) {
    refuse(call, name, "shape " + to_string(tensor.shape), to_string(dims) + " dimensions");
  }
  checked_bytes(call, name, tensor.shape, tensor.dtype);
  if (!tensor.is_dense()) {
    refuse(call, name,
           "strides " + to_string(tensor.strides) + " for shape " + to_string(tensor.shape),
           "a dense row-major tensor (call contiguous() first)");
  }
  if (tensor.data == nullptr && tensor.shape.product() != 0) {
    refuse(call, name, "a null pointer with shape " + to_string(tensor.shape), "data");
  }
  if (tensor.shape.product() != 0) check_aligned(call, name, tensor);
}

void check_exact(std::string_view call, std::string_view name, const ConstTensorView& tensor,
                 Dtype dtype, const Extents& shape) {
  if (tensor.dtype != dtype) refuse(call, name, "dtype " + text(tensor.dtype), text(dtype));
  check_tensor(call, name, tensor, shape.size());
  if (tensor.shape != shape) {
    refuse(call, name, "shape " + to_string(tensor.shape), to_string(shape));
  }
}

std::vector<std::int32_t> checked_routes(std::string_view call, const ConstTensorView& topk_idx,
                                         std::int64_t experts) {
  check_on_cpu(call, "topk_idx", topk_idx.device);
  if (topk_idx.dtype != Dtype::i64 && topk_idx.dtype != Dtype::i32) {
    refuse(call, "topk_idx", "dtype " + text(topk_idx.dtype), "i64 or i32");
  }
  if (topk_idx.dims() != 2) {
    refuse(call, "topk_idx", "shape " + to_string(topk_idx.shape), "2 dimensions, [tokens, topk]");
  }
  const std::int64_t tokens = topk_idx.shape[0], topk = topk_idx.shape[1];
  if (topk < 1 || topk > kMaxTopk) {
    refuse(call, "topk_idx", "topk " + to_string(topk), "1 … 64 slots a token");
  }
  if (tokens < 0 || tokens > (std::int64_t{1} << 30)) {
    refuse(call, "topk_idx", to_string(tokens) + " tokens", "0 … 2^30");
  }
  if (tokens * topk > kMaxRows) {
    refuse(call, "topk_idx", to_string(tokens) + " tokens × " + to_string(topk) + " slots",
           "at most 2^31 - 1 slots");
  }
  if (topk_idx.data == nullptr && tokens != 0) refuse(call, "topk_idx", "a null pointer", "data");
  if (tokens != 0) check_aligned(call, "topk_idx", topk_idx);
  std::vector<std::int32_t> routes(static_cast<std::size_t>(tokens * topk));
  for (std::int64_t t = 0; t < tokens; ++t) {
    for (std::int64_t k = 0; k < topk; ++k) {
      const std::int64_t at = t * topk_idx.strides[0] + k * topk_idx.strides[1];
      const std::int64_t id = topk_idx.dtype == Dtype::i64
                                  ? static_cast<const std::int64_t*>(topk_idx.data)[at]
                                  : static_cast<const std::int32_t*>(topk_idx.data)[at];
      if (id < -1 || id >= experts) {
        refuse(call, "topk_idx",
               "expert " + to_string(id) + " at [" + to_string(t) + ", " + to_string(k) + "]",
               "-1 (unused) or 0 … " + to_string(experts - 1));
      }
      routes[static_cast<std::size_t>(t * topk + k)] = static_cast<std::int32_t>(id);
    }
  }
  return routes;
}

void check_dispatch(const ConstTensorView& x, std::int64_t tokens, int topk,
                    const DispatchOptions& options) {
  constexpr std::string_view kCall = "dispatch";
  check_tensor(kCall, "x", x, 2);
  if (x.shape[0] != tokens) {
    refuse(kCall, "x", to_string(x.shape[0]) + " rows",
           to_string(tokens) + ", the tokens of the plan");
  }
  check_row_bytes(kCall, "x", x.row_bytes());
  check_alignment(kCall, options.alignment);
  if (options.order == RowOrder::rank_major && options.alignment != 1) {
    refuse(kCall, "alignment", to_string(options.alignment),
           "1 for rank_major (only expert_major output is padded)");
  }
  if (options.worst_case_rows < 0) {
    refuse(kCall, "worst_case_rows", to_string(options.worst_case_rows), "0 (exact) or more");
  }
  if (options.worst_case_rows > kMaxRows) {
    refuse(kCall, "worst_case_rows", to_string(options.worst_case_rows),
           "at most " + to_string(kMaxRows));
  }
  if (options.topk_weights) {
    check_exact(kCall, "topk_weights", *options.topk_weights, Dtype::f32, {tokens, topk});
  }
  if (options.scales) {
    const ConstTensorView& scales = *options.scales;
    check_on_cpu(kCall, "scales", scales.device);
    if (scales.dtype != Dtype::f32) {
      refuse(kCall, "scales", "dtype " + text(scales.dtype), "f32");
    }
    if (scales.dims() != 2 || scales.shape[0] != tokens || scales.shape[1] < 1) {
      refuse(kCall, "scales", "shape " + to_string(scales.shape),
             "[" + to_string(tokens) + ", scales a token ≥ 1]");
    }
    if (scales.shape[1] > static_cast<std::int64_t>(kMaxRowBytes / sizeof(float))) {
      refuse(kCall, "scales", to_string(scales.shape[1]) + " scales a token",
             "at most " + to_string(kMaxRowBytes / sizeof(float)));
    }
    if (scales.data == nullptr && tokens != 0) refuse(kCall, "scales", "a null pointer", "data");
    if (tokens != 0) check_aligned(kCall, "scales", scales);
  }
  if (options.out) {
    check_tensor(kCall, "out", *options.out, 2);
    if (options.out->dtype != x.dtype || options.out->columns() != x.columns()) {
      refuse(kCall, "out", text(options.out->dtype) + " " + to_string(options.out->shape),
             text(x.dtype) + " with " + to_string(x.columns()) + " columns, as x");
    }
  }
}

void check_combine(const ConstTensorView& rows, std::int64_t tokens, int topk,
                   const CombineOptions& options) {
  constexpr std::string_view kCall = "combine";
  if (!is_float(rows.dtype)) {
    refuse(kCall, "rows", "dtype " + text(rows.dtype),
           "f32, bf16 or f16 (dispatch carries any dtype, combine adds)");
  }
  check_tensor(kCall, "rows", rows, 2);
  check_row_bytes(kCall, "rows", rows.row_bytes());
  check_alignment(kCall, options.alignment);
  const Extents own{tokens, rows.columns()};
  if (options.bias0) check_exact(kCall, "bias0", *options.bias0, rows.dtype, own);
  if (options.bias1) check_exact(kCall, "bias1", *options.bias1, rows.dtype, own);
  if (options.out) {
    check_exact(kCall, "out", *options.out, rows.dtype, own);
    if (overlap(*options.out, rows)) {
      refuse(kCall, "out", "memory that overlaps rows",
             "memory of its own: peers read the rows "
             "while out is written");
    }
    for (const auto& [name, bias] :
         {std::pair("bias0", &options.bias0), {"bias1", &options.bias1}}) {
      // The same memory is fine: each row is read before it is written.
      if (*bias && (*bias)->data != options.out->data && overlap(*options.out, **bias)) {
        refuse(kCall, "out", std::string("memory that overlaps ") + name,
               "memory of its own, or exactly that of the bias");
      }
    }
  }
  if (options.topk_weights) {
    const ConstTensorView& weights = *options.topk_weights;
    if (weights.dtype != Dtype::f32) {
      refuse(kCall, "topk_weights", "dtype " + text(weights.dtype), "f32");
    }
    check_tensor(kCall, "topk_weights", weights, 2);
    if (weights.shape[1] != topk) {
      refuse(kCall, "topk_weights", "shape " + to_string(weights.shape),
             to_string(topk) + " weights a row, the topk of the plan");
    }
  }
  if (options.apply_weights && options.order != RowOrder::expert_major) {
    refuse(kCall, "apply_weights", "true with rank_major rows",
           "expert_major (rank-major rows hold one row for all slots of a rank)");
  }
  if (options.apply_weights && !options.topk_weights) {
    refuse(kCall, "apply_weights", "true without topk_weights",
           "topk_weights, as dispatch returned them");
  }
}

void check_latency_dispatch(const ConstTensorView& x, const ConstTensorView& topk_idx,
                            const LatencyConfig& config, const LatencyDispatchOptions& options) {
  constexpr std::string_view kCall = "latency dispatch";
  if (x.dtype != config.dtype) {
    refuse(kCall, "x", "dtype " + text(x.dtype), text(config.dtype) + ", as configured");
  }
  check_tensor(kCall, "x", x, 2);
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
  if (options.format == WireFormat::as_is && options.scale_format != ScaleFormat::f32) {
    refuse(kCall, "scale_format", "a scale format without quantisation",
           "format e4m3, or scale_format f32");
  }
}

}  // namespace ferry
