// Dispatch between domains: what crosses is packed and posted, what has come joins the own tokens,
// and the engine inside brings all of them to their ranks.
#include <algorithm>
#include <numeric>
#include <utility>

#include "core/check.hpp"
#include "core/wire_row.hpp"
#include "cuda/dispatch_job.hpp"
#include "cuda/domain_engine.hpp"
#include "engine/growth.hpp"

namespace ferry::cuda {

using std::to_string;

namespace {

constexpr const char* kStage = "dispatch: crossing";

std::size_t index(std::int64_t value) {
  return static_cast<std::size_t>(value);
}

/// What arrives at `target` of all sources before `source`.
std::size_t place_of(const DomainPlan& state, Crossing how, const CrossingLayout& layout,
                     int target, int source) {
  std::size_t bytes = 0;
  for (int s = 0; s < source; ++s) {
    bytes += layout.block_bytes(crossing_rows(state.exchange, state.crossing, how, s, target));
  }
  return bytes;
}

/// After the swap of heads: some rank has not given as many rows as arrive.
void agree_on_rows(engine::Channel& channel) {
  for (int peer = 0; peer < channel.size(); ++peer) {
    const StepMessage theirs = channel.head(peer);
    if (theirs.status != StepStatus::too_many) continue;
    channel.all_ranks_throw();
    throw Error(ErrorKind::exhausted,
                "dispatch: grants: rank " + to_string(peer) + " would receive " +
                    to_string(theirs.need_bytes) + " rows but gave worst_case_rows = " +
                    to_string(theirs.rows) + "; nothing was sent",
                {channel.rank(), peer, kStage, channel.generation(), 0, 0});
  }
}

}  // namespace

std::int64_t DomainEngine::expected_rows(const DomainPlan& state,
                                         const DispatchOptions& options) const {
  return options.order == RowOrder::expert_major
             ? state.exchange.expert_offsets(options.alignment).back()
             : state.exchange.recv_rows();
}

Received DomainEngine::dispatch(const ConstTensorView& x, const Plan& plan,
                                const DispatchOptions& options) {
  check_usable(kDispatch);
  const auto state = plan_of(plan, kDispatch);
  check_dispatch(x, state->tokens, state->topk, options, device());
  (void)inside().sms_for(kDispatch, options.sms);
  const std::int64_t expected = expected_rows(*state, options);
  const std::int64_t given = options.worst_case_rows > 0 ? options.worst_case_rows : expected;
  if (options.out && options.out->rows() < given) {
    refuse(kDispatch, "out", to_string(options.out->rows()) + " rows",
           "at least " + to_string(given));
  }
  DomainCall call(*this, kDispatch, options.stream);
  const Crossing how = crossing_of(*state, options.crossing);
  CrossingTables& to = tables(call, state, how);
  const WireRow row = wire_row(x, options);
  const CrossingLayout layout = make_crossing_layout(
      {row.bytes(), row.scale_columns, options.topk_weights ? state->topk : 0});

  std::vector<std::size_t> needs;
  for (int r = 0; r < size(); ++r) needs.push_back(place_of(*state, how, layout, r, size()));
  std::size_t out_bytes = 0;
  for (const CrossingBlock& block : to.lists.out) out_bytes += layout.block_bytes(block.rows);
  if (!stage_.has(DomainStage::kIn, needs) || !stage_.has_out(out_bytes)) {
    proxy_->run(
        [this, needs, out_bytes] {
          if (!stage_.has_out(out_bytes)) stage_.grow_out(out_bytes);
          if (!stage_.has(DomainStage::kIn, needs)) stage_.grow(kStage, DomainStage::kIn, needs);
        },
        config_.on_wait);
  }

  CallSignature signature =
      dispatch_signature(row, state->topk, options, !state->routes_sent.load(), state->number);
  signature.crossing = static_cast<std::uint16_t>(how);
  auto crossing = new_crossing(kStage, signature);
  StepMessage& head = crossing->head;
  if (expected > given) {
    head.status = StepStatus::too_many;
    head.rows = given;
    head.need_bytes = static_cast<std::uint64_t>(expected);
  }
  crossing->agree = agree_on_rows;
  head.stage_segment = stage_.segment(DomainStage::kIn);
  crossing->from = stage_.data(DomainStage::kOut);
  std::uint64_t from = 0;
  std::int64_t chunks = 0;
  for (const CrossingBlock& block : to.lists.out) {
    crossing->windows.push_back({block.rank, from,
                                 place_of(*state, how, layout, block.rank, rank()),
                                 layout.block_bytes(block.rows)});
    from += layout.block_bytes(block.rows);
    chunks += layout.chunks(block.rows);
  }

  // The rows as they arrive.
  Held copy, codes, code_scales;
  CrossingSource source;
  source.rows = call.aligned(x, copy);
  if (row.quantized) {
    QuantizeRowsParameters quantize;
    quantize.x = source.rows;
    quantize.dtype = x.dtype;
    quantize.tokens = x.rows();
    quantize.columns = row.columns;
    quantize.round_scale = row.round_scale;
    codes = call.take(index(x.rows()) * row.bytes());
    code_scales = call.take(index(x.rows() * row.scale_columns) * sizeof(float));
    quantize.codes = codes.data();
    quantize.scales = reinterpret_cast<float*>(code_scales.data());
    quantize.sms = inside().local_sms();
    check(launch_quantize_rows(quantize, call.native()), "launch_quantize_rows");
    source.rows = quantize.codes;
    source.scales = quantize.scales;
    source.scale_token_stride = row.scale_columns;
  } else if (options.scales) {
    source.scales = call.floats(options.scales);
    source.scale_token_stride = options.scales->strides[0];
    source.scale_column_stride = options.scales->strides[1];
  }
  source.weights = call.floats(options.topk_weights);

  GatherParameters gather;
  const std::size_t count = index(to.count);
  const Held rows = call.take(count * row.bytes());
  const Held scales = call.take(count * layout.scale_bytes);
  const Held weights = call.take(count * layout.weight_bytes);
  gather.layout = layout;
  gather.count = to.count;
  gather.from = to.from;
  gather.own = source;
  gather.blocks = to.in;
  gather.stage = stage_.data(DomainStage::kIn);
  gather.rows = rows.data();
  gather.scales = reinterpret_cast<float*>(scales.data());
  gather.weights = reinterpret_cast<float*>(weights.data());
  gather.sms = inside().local_sms();

  PackParameters pack;
  pack.layout = layout;
  pack.from = source;
  pack.index = to.sent;
  pack.blocks = to.out;
  pack.stage = stage_.data(DomainStage::kOut);
  pack.sms = inside().sms_for(kDispatch, options.sms);
  call.cross(crossing, pack, chunks);
  check(launch_gather(gather, call.native()), "launch_gather");

  DispatchOptions within = options;
  within.stream = call.stream();
  within.format = WireFormat::as_is;
  within.scale_format = ScaleFormat::f32;
  within.crossing = Crossing::automatic;
  if (row.scale_columns > 0) {
    within.scales =
        ConstTensorView(gather.scales, Dtype::f32, {to.count, row.scale_columns}, device());
  }
  if (options.topk_weights) {
    within.topk_weights =
        ConstTensorView(gather.weights, Dtype::f32, {to.count, state->topk}, device());
  }
  Received received;
  try {
    received = inside().dispatch(
        ConstTensorView(gather.rows, row.dtype, {to.count, row.columns}, device()), to.inside,
        within);
  } catch (const Error& error) {
    throw told(kStage, error);
  }
  state->crossed = how;
  state->layouts.add({options.order, options.alignment, options.worst_case_rows});
  state->routes_sent.store(true);
  received.plan = {};
  received.event = call.finish(std::move(crossing), std::move(received.event));
  return received;
}

}  // namespace ferry::cuda
