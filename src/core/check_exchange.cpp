// The arguments of plan, dispatch and combine.
#include <cstdint>
#include <utility>

#include "core/check.hpp"
#include "core/wire_row.hpp"

namespace ferry {

using std::to_string;

bool overlap(const ConstTensorView& a, const ConstTensorView& b) {
  const auto x = reinterpret_cast<std::uintptr_t>(a.data);
  const auto y = reinterpret_cast<std::uintptr_t>(b.data);
  return a.bytes() > 0 && b.bytes() > 0 && x < y + b.bytes() && y < x + a.bytes();
}

namespace {

void check_crossing(std::string_view call, Crossing crossing) {
  if (crossing <= Crossing::hierarchical) return;
  refuse(call, "crossing", "number " + to_string(static_cast<int>(crossing)),
         "automatic, direct or hierarchical");
}

void check_order(std::string_view call, RowOrder order, std::int64_t alignment) {
  if (order > RowOrder::expert_major) {
    refuse(call, "order", "number " + to_string(static_cast<int>(order)),
           "rank_major or expert_major");
  }
  if (alignment < 1 || alignment > (std::int64_t{1} << 20)) {
    refuse(call, "alignment", to_string(alignment), "1 … 1048576 rows");
  }
  if (order == RowOrder::rank_major && alignment != 1) {
    refuse(call, "alignment", to_string(alignment),
           "1 for rank_major (only expert_major rows are padded)");
  }
}

}  // namespace

void check_formats(std::string_view call, WireFormat format, ScaleFormat scales) {
  if (format > WireFormat::nvfp4) {
    refuse(call, "format", "number " + to_string(static_cast<int>(format)), "as_is, e4m3 or nvfp4");
  }
  if (scales > ScaleFormat::ue8m0_packed) {
    refuse(call, "scale_format", "number " + to_string(static_cast<int>(scales)),
           "f32, f32_pow2 or ue8m0_packed");
  }
  if (format != WireFormat::e4m3 && scales != ScaleFormat::f32) {
    refuse(call, "scale_format",
           format == WireFormat::nvfp4 ? "a scale format with format nvfp4, whose scales are e4m3"
                                       : "a scale format without quantisation",
           "format e4m3, or scale_format f32");
  }
}

namespace {

/// Rows of dispatch, as they are or quantised on the way.
void check_format(std::string_view call, const ConstTensorView& x, const DispatchOptions& options) {
  if (options.format > WireFormat::e4m3) {
    const bool known = options.format == WireFormat::nvfp4;
    refuse(call, "format",
           known ? "nvfp4" : "number " + to_string(static_cast<int>(options.format)),
           "as_is or e4m3 (nvfp4: latency mode)");
  }
  check_formats(call, options.format, options.scale_format);
  if (options.format == WireFormat::as_is) return;
  if (!is_float(x.dtype)) {
    refuse(call, "x", "dtype " + dtype_text(x.dtype), "f32, bf16 or f16 with format e4m3");
  }
  if (x.columns() % 16 != 0) {
    refuse(call, "x", "hidden " + to_string(x.columns()),
           "a multiple of 16 with format e4m3 (a channel becomes a byte)");
  }
  if (options.scale_format == ScaleFormat::ue8m0_packed) {
    refuse(call, "scale_format", "ue8m0_packed", "f32 or f32_pow2 (packed: latency mode)");
  }
  if (options.scales) {
    refuse(call, "scales", "a tensor with format e4m3", "none: the scales are made on the way");
  }
}

}  // namespace

void check_routes(std::string_view call, const ConstTensorView& topk_idx, const Device& where) {
  check_view(call, "topk_idx", topk_idx, where);
  if (topk_idx.dtype != Dtype::i64 && topk_idx.dtype != Dtype::i32) {
    refuse(call, "topk_idx", "dtype " + dtype_text(topk_idx.dtype), "i64 or i32");
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
  check_data(call, "topk_idx", topk_idx);
}

std::vector<std::int32_t> checked_routes(std::string_view call, const ConstTensorView& topk_idx,
                                         std::int64_t experts) {
  check_routes(call, topk_idx);
  const std::int64_t tokens = topk_idx.shape[0], topk = topk_idx.shape[1];
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
                    const DispatchOptions& options, const Device& where) {
  constexpr std::string_view kCall = "dispatch";
  check_stream(kCall, options.stream, where);
  check_tensor(kCall, "x", x, 2, where);
  if (x.shape[0] != tokens) {
    refuse(kCall, "x", to_string(x.shape[0]) + " rows",
           to_string(tokens) + ", the tokens of the plan");
  }
  check_row_bytes(kCall, "x", x.row_bytes());
  check_crossing(kCall, options.crossing);
  check_format(kCall, x, options);
  check_order(kCall, options.order, options.alignment);
  if (options.max_recv_rows < 0) {
    refuse(kCall, "max_recv_rows", to_string(options.max_recv_rows), "0 (exact) or more");
  }
  if (options.max_recv_rows > kMaxRows) {
    refuse(kCall, "max_recv_rows", to_string(options.max_recv_rows),
           "at most " + to_string(kMaxRows));
  }
  if (options.topk_weights) {
    check_exact(kCall, "topk_weights", *options.topk_weights, Dtype::f32, {tokens, topk}, where);
  }
  if (options.row_weights && options.order != RowOrder::expert_major) {
    refuse(kCall, "row_weights", "true with rank_major rows",
           "expert_major (rank-major rows have a weight for each slot)");
  }
  if (options.row_weights && !options.topk_weights) {
    refuse(kCall, "row_weights", "true without topk_weights", "topk_weights beside it");
  }
  if (options.scales) {
    const ConstTensorView& scales = *options.scales;
    check_view(kCall, "scales", scales, where);
    if (scales.dtype != Dtype::f32) {
      refuse(kCall, "scales", "dtype " + dtype_text(scales.dtype), "f32");
    }
    if (scales.dims() != 2 || scales.shape[0] != tokens || scales.shape[1] < 1) {
      refuse(kCall, "scales", "shape " + to_string(scales.shape),
             "[" + to_string(tokens) + ", scales a token ≥ 1]");
    }
    if (scales.shape[1] > static_cast<std::int64_t>(kMaxRowBytes / sizeof(float))) {
      refuse(kCall, "scales", to_string(scales.shape[1]) + " scales a token",
             "at most " + to_string(kMaxRowBytes / sizeof(float)));
    }
    check_data(kCall, "scales", scales);
  }
  if (options.out) {
    check_tensor(kCall, "out", *options.out, 2, where);
    const Dtype dtype = wire_row(x, options).dtype;
    if (options.out->dtype != dtype || options.out->columns() != x.columns()) {
      refuse(kCall, "out", dtype_text(options.out->dtype) + " " + to_string(options.out->shape),
             dtype_text(dtype) + " with " + to_string(x.columns()) + " columns, as x" +
                 (dtype == x.dtype ? "" : " and format"));
    }
    if (options.out->rows() < options.max_recv_rows) {
      refuse(kCall, "out", to_string(options.out->rows()) + " rows",
             "at least " + to_string(options.max_recv_rows));
    }
  }
}

void check_combine(const ConstTensorView& rows, std::int64_t tokens, int topk,
                   const CombineOptions& options, const Device& where) {
  constexpr std::string_view kCall = "combine";
  if (!is_float(rows.dtype)) {
    refuse(kCall, "rows", "dtype " + dtype_text(rows.dtype),
           "f32, bf16 or f16 (dispatch carries any dtype, combine adds)");
  }
  check_stream(kCall, options.stream, where);
  check_tensor(kCall, "rows", rows, 2, where);
  check_row_bytes(kCall, "rows", rows.row_bytes());
  check_crossing(kCall, options.crossing);
  check_order(kCall, options.order, options.alignment);
  const Extents own{tokens, rows.columns()};
  if (options.bias0) check_exact(kCall, "bias0", *options.bias0, rows.dtype, own, where);
  if (options.bias1) check_exact(kCall, "bias1", *options.bias1, rows.dtype, own, where);
  if (options.out) {
    check_exact(kCall, "out", *options.out, rows.dtype, own, where);
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
  if (weights_of_rows(options)) {
    check_exact(kCall, "topk_weights", *options.topk_weights, Dtype::f32, {rows.shape[0]}, where);
  } else if (options.topk_weights) {
    const ConstTensorView& weights = *options.topk_weights;
    check_tensor(kCall, "topk_weights", weights, 2, where);
    if (weights.dtype != Dtype::f32) {
      refuse(kCall, "topk_weights", "dtype " + dtype_text(weights.dtype), "f32");
    }
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

namespace {

std::string in_words(const RowLayout& layout) {
  if (layout.order == RowOrder::rank_major) return "rank_major";
  return "expert_major with alignment " + to_string(layout.alignment);
}

}  // namespace

void check_combine_rows(const ExchangePlan& plan, const std::vector<RowLayout>& dispatched,
                        std::int64_t rows, const RowLayout& layout) {
  constexpr std::string_view kCall = "combine";
  const bool expert_major = layout.order == RowOrder::expert_major;
  std::string others;  // alignments of expert-major dispatches
  bool same_alignment = false;
  std::string worst;
  for (const RowLayout& used : dispatched) {
    if (used.order != layout.order) continue;
    if (used.alignment != layout.alignment) {
      others += (others.empty() ? "" : " or ") + to_string(used.alignment);
      continue;
    }
    same_alignment = true;
    if (used.max_recv_rows == 0) continue;
    if (rows == used.max_recv_rows) return;
    worst += " or " + to_string(used.max_recv_rows) + " (max_recv_rows)";
  }
  if (expert_major && !same_alignment && !others.empty()) {
    refuse(kCall, "alignment", to_string(layout.alignment),
           others + ", as given to the plan's expert_major dispatch");
  }
  const std::int64_t exact =
      expert_major ? plan.expert_offsets(layout.alignment).back() : plan.recv_rows();
  if (rows == exact) return;
  refuse(kCall, "rows", to_string(rows) + " rows as " + in_words(layout),
         to_string(exact) + worst +
             ", the plan's rows in that order; give the rows that dispatch returned, with its "
             "order and alignment");
}

void check_combine_weights(const ExchangePlan& plan, const std::vector<RowLayout>& dispatched,
                           const Extents& shape, int topk) {
  if (shape.size() == 1 || shape[0] == plan.recv_rows()) return;
  for (const RowLayout& used : dispatched) {
    if (used.max_recv_rows > 0 && shape[0] == used.max_recv_rows) return;
  }
  refuse("combine", "topk_weights", "shape " + to_string(shape),
         to_string(Extents{plan.recv_rows(), topk}) +
             ", one row for each received row, as dispatch returned them");
}

}  // namespace ferry
