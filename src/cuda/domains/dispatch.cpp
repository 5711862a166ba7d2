// Dispatch between domains: what crosses is packed and posted; meanwhile the engine inside brings
// the own tokens to their ranks, and what has come when all of it is here.
#include <utility>

#include "core/check.hpp"
#include "core/exchange_signature.hpp"
#include "core/wire_row.hpp"
#include "cuda/domains/engine.hpp"
#include "cuda/throughput/exchange.hpp"

namespace ferry::cuda {

using std::to_string;

namespace {

constexpr const char* kDispatchCrossing = "dispatch: crossing";

/// After the swap of heads: some rank has not given as many rows as arrive.
void agree_on_rows(engine::Channel& channel) {
  for (const int peer : channel.ranks()) {
    const StepMessage theirs = channel.head(peer);
    if (theirs.status != StepStatus::too_many) continue;
    channel.all_ranks_throw();
    throw Error(ErrorKind::exhausted,
                "dispatch: grants: rank " + to_string(peer) + " would receive " +
                    to_string(theirs.need_bytes) + " rows but gave max_recv_rows = " +
                    to_string(theirs.rows) + "; nothing was sent",
                {channel.rank(), peer, "dispatch: grants", channel.generation(), 0, 0});
  }
}

}  // namespace

class DomainDispatch {
 public:
  DomainDispatch(DomainEngine& engine, const ConstTensorView& x, std::shared_ptr<DomainPlan> plan,
                 const DispatchOptions& options)
      : engine_(engine),
        x_(x),
        plan_(std::move(plan)),
        options_(options),
        row_(wire_row(x, options)),
        expected_(options.order == RowOrder::expert_major
                      ? plan_->exchange.expert_offsets(options.alignment).back()
                      : plan_->exchange.recv_rows()),
        given_(options.max_recv_rows > 0 ? options.max_recv_rows : expected_) {
    if (options.out && options.out->rows() < given_) {
      refuse(kDispatch, "out", to_string(options.out->rows()) + " rows",
             "at least " + to_string(given_));
    }
  }
  Received run();

 private:
  Device device() const { return engine_.device(); }
  StepMessage head(Crossing how) const;
  /// The own rows as they arrive: quantised, if they are.
  CrossingSource source(const DomainCall& call);
  /// First the own tokens, which lie in `rows`; then what `receive` launches, and the others.
  Received exchange_inside(const DomainCall& call, const CrossingTables& tables,
                           const CrossingRows& rows, const std::function<void()>& receive);

  DomainEngine& engine_;
  ConstTensorView x_;
  std::shared_ptr<DomainPlan> plan_;
  const DispatchOptions& options_;
  WireRow row_;
  std::int64_t expected_;
  std::int64_t given_;
  Held copy_{}, codes_{}, code_scales_{};  // of the own rows
};

StepMessage DomainDispatch::head(Crossing how) const {
  StepMessage head;
  head.call =
      dispatch_signature(row_, plan_->topk, options_, !plan_->routes_sent.load(), plan_->number);
  head.call.exchange.crossing = static_cast<std::uint16_t>(how);
  if (expected_ > given_) {
    head.status = StepStatus::too_many;
    head.rows = given_;
    head.need_bytes = static_cast<std::uint64_t>(expected_);
  }
  return head;
}

CrossingSource DomainDispatch::source(const DomainCall& call) {
  CrossingSource source;
  source.rows = call.aligned(x_, copy_);
  source.weights = call.floats(options_.topk_weights);
  if (options_.scales) {
    source.scales = call.floats(options_.scales);
    source.scale_token_stride = options_.scales->strides[0];
    source.scale_column_stride = options_.scales->strides[1];
  }
  if (!row_.quantized) return source;
  codes_ = call.take(index(x_.rows()) * row_.bytes());
  code_scales_ = call.take(index(x_.rows() * row_.scale_columns) * sizeof(float));
  QuantizeRowsParameters quantize;
  quantize.x = source.rows;
  quantize.dtype = x_.dtype;
  quantize.tokens = x_.rows();
  quantize.columns = row_.columns;
  quantize.round_scale = row_.round_scale;
  quantize.codes = codes_.data();
  quantize.scales = reinterpret_cast<float*>(code_scales_.data());
  quantize.num_sms = engine_.inside().local_sms();
  check(launch_quantize_rows(quantize, call.native()), "launch_quantize_rows");
  source.rows = quantize.codes;
  source.scales = quantize.scales;
  source.scale_token_stride = row_.scale_columns;
  source.scale_column_stride = 1;
  return source;
}

Received DomainDispatch::exchange_inside(const DomainCall& call, const CrossingTables& tables,
                                         const CrossingRows& rows,
                                         const std::function<void()>& receive) {
  DispatchOptions within = options_;
  within.stream = call.stream();
  within.format = WireFormat::as_is;
  within.scale_format = ScaleFormat::f32;
  within.crossing = Crossing::automatic;
  if (row_.scale_columns > 0) {
    within.scales =
        ConstTensorView(rows.scales, Dtype::f32, {tables.count, row_.scale_columns}, device());
  }
  if (options_.topk_weights) {
    within.topk_weights =
        ConstTensorView(rows.weights, Dtype::f32, {tables.count, plan_->topk}, device());
  }
  const ConstTensorView x(rows.rows, row_.dtype, {tables.count, row_.columns}, device());
  try {
    return dispatch_split(engine_.inside(), x, tables.inside, within, {tables.own, receive});
  } catch (const Error& error) {
    throw engine_.told(kDispatchCrossing, error);
  }
}

Received DomainDispatch::run() {
  DomainCall call(engine_, kDispatch, options_.stream);
  const Crossing how = engine_.crossing_of(*plan_, options_.crossing);
  const CrossingTables& tables = engine_.tables(call, plan_, how);
  const std::int64_t weight_columns = options_.topk_weights ? plan_->topk : 0;
  const CrossingWay way{kDispatchCrossing, plan_.get(), how, false,
                        make_crossing_layout({row_.bytes(), row_.scale_columns, weight_columns})};
  engine_.make_room(way, tables);

  PackParameters pack;
  pack.from = source(call);
  pack.num_sms = engine_.inside().sms_for(kDispatch, options_.num_sms);
  const Held rows = call.take(index(tables.count) * way.layout.row_bytes);
  const Held scales = call.take(index(tables.count) * way.layout.scale_bytes);
  const Held weights = call.take(index(tables.count) * way.layout.weight_bytes);
  GatherParameters gather;
  gather.layout = way.layout;
  gather.count = tables.own;
  gather.from = tables.from;
  gather.own = pack.from;
  gather.to = {rows.data(), reinterpret_cast<float*>(scales.data()),
               reinterpret_cast<float*>(weights.data())};
  gather.num_sms = engine_.inside().local_sms();
  UnpackParameters unpack;
  unpack.layout = way.layout;
  unpack.blocks = tables.in;
  unpack.staging = engine_.staging_.data(StagingBuffers::kIn);
  unpack.to = {gather.to.rows + tables.own * static_cast<std::int64_t>(way.layout.row_bytes),
               gather.to.scales + tables.own * row_.scale_columns,
               gather.to.weights + tables.own * weight_columns};
  unpack.num_sms = gather.num_sms;

  check(launch_gather(gather, call.native()), "launch_gather");
  call.send(way, tables, head(how), pack, agree_on_rows);
  Received received = exchange_inside(call, tables, gather.to, [&] {
    unpack.portions = call.portions();
    call.receive([&](int portion, cudaStream_t stream) {
      unpack.portion = portion;
      check(launch_unpack(unpack, stream), "launch_unpack");
    });
  });
  plan_->crossed = how;
  plan_->layouts.add({options_.order, options_.alignment, options_.max_recv_rows});
  plan_->routes_sent.store(true);
  received.plan = {};
  received.event = call.finish(std::move(received.event));
  return received;
}

Received dispatch(DomainEngine& engine, const ConstTensorView& x, const Plan& plan,
                  const DispatchOptions& options) {
  engine.check_usable(kDispatch);
  auto state = engine.plan_of(plan, kDispatch);
  check_dispatch(x, state->tokens, state->topk, options, engine.device());
  (void)engine.inside().sms_for(kDispatch, options.num_sms);
  return DomainDispatch(engine, x, std::move(state), options).run();
}

}  // namespace ferry::cuda
