// Combine between domains: sums inside the domain, for the tokens that crossed to here, which go
// back where they came from, and meanwhile for the own ones; each owner adds what it has as it
// comes.
#include <utility>

#include "core/check.hpp"
#include "core/exchange_signature.hpp"
#include "cuda/domains/engine.hpp"
#include "cuda/throughput/exchange.hpp"

namespace ferry::cuda {
namespace {

constexpr const char* kCombineCrossing = "combine: crossing";

}  // namespace

class DomainCombine {
 public:
  DomainCombine(DomainEngine& engine, const ConstTensorView& rows, std::shared_ptr<DomainPlan> plan,
                const CombineOptions& options)
      : engine_(engine), rows_(rows), plan_(std::move(plan)), options_(options) {}
  Combined run();

 private:
  Device device() const { return engine_.device(); }
  bool has_weights() const { return options_.topk_weights.has_value(); }
  Crossing crossing() const;
  void check_rows() const;
  StepMessage head(Crossing how) const;
  /// First the sums of what crossed to here, which `send` takes; then those of the own tokens.
  Combined sum_inside(const DomainCall& call, const CrossingTables& tables,
                      const std::function<void(const Combined&)>& send);
  /// The result's memory, and where the kernel finds and puts everything but what has crossed.
  AddDomainsParameters prepare(const DomainCall& call);

  DomainEngine& engine_;
  ConstTensorView rows_;
  std::shared_ptr<DomainPlan> plan_;
  const CombineOptions& options_;
  Combined result_{};
  Held out_{}, bias0_{}, bias1_{};  // aligned copies
};

Crossing DomainCombine::crossing() const {
  const Crossing how =
      options_.crossing == Crossing::automatic ? plan_->crossed : options_.crossing;
  if (how == Crossing::hierarchical && !plan_->of(how)) {
    refuse(kCombine, "crossing", "hierarchical with a plan that no hierarchical dispatch has used",
           "such a dispatch first: it brings what the sums inside a domain need");
  }
  return how;
}

void DomainCombine::check_rows() const {
  const auto used = plan_->layouts.all();
  check_combine_rows(plan_->exchange, used, rows_.rows(), {options_.order, options_.alignment});
  if (has_weights()) {
    check_combine_weights(plan_->exchange, used, options_.topk_weights->shape, plan_->topk);
  }
}

StepMessage DomainCombine::head(Crossing how) const {
  StepMessage head;
  head.call = combine_signature(rows_, plan_->topk, options_, plan_->number);
  head.call.exchange.crossing = static_cast<std::uint16_t>(how);
  return head;
}

Combined DomainCombine::sum_inside(const DomainCall& call, const CrossingTables& tables,
                                   const std::function<void(const Combined&)>& send) {
  CombineOptions within = options_;
  within.stream = call.stream();
  within.crossing = Crossing::automatic;
  within.bias0.reset();
  within.bias1.reset();
  within.out.reset();
  try {
    return combine_split(engine_.inside(), rows_, tables.inside, within, {tables.own, send});
  } catch (const Error& error) {
    throw engine_.told(kCombineCrossing, error);
  }
}

AddDomainsParameters DomainCombine::prepare(const DomainCall& call) {
  AddDomainsParameters add;
  const Extents shape{plan_->tokens, rows_.columns()};
  if (options_.out) {
    result_.x = {*options_.out, std::shared_ptr<void>(options_.out->data, [](void*) {})};
  } else {
    const Held held = call.take(index(plan_->tokens) * rows_.row_bytes());
    result_.x = {TensorView(held.data(), rows_.dtype, shape, device()), held.owner};
  }
  add.out = static_cast<std::byte*>(result_.x.data());
  if (reinterpret_cast<std::uintptr_t>(add.out) % 16 != 0) {
    out_ = call.take(result_.x.view().bytes());
    add.out = out_.data();
  }
  if (has_weights()) {
    const Extents slots{plan_->tokens, plan_->topk};
    const Held held = call.take(index(slots.product()) * sizeof(float));
    result_.topk_weights = {TensorView(held.data(), Dtype::f32, slots, device()), held.owner};
    add.out_weights = result_.topk_weights.as<float>();
  }
  if (options_.bias0) add.bias0 = call.aligned(*options_.bias0, bias0_);
  if (options_.bias1) add.bias1 = call.aligned(*options_.bias1, bias1_);
  add.dtype = rows_.dtype;
  add.num_sms = engine_.inside().local_sms();
  return add;
}

Combined DomainCombine::run() {
  DomainCall call(engine_, kCombine, options_.stream);
  check_rows();
  const Crossing how = crossing();
  const CrossingTables& tables = engine_.tables(call, plan_, how);
  engine_.share_routes(call, *plan_, how);
  const std::int64_t weight_columns = has_weights() ? plan_->topk : 0;
  const CrossingWay way{kCombineCrossing, plan_.get(), how, true,
                        make_crossing_layout({rows_.row_bytes(), 0, weight_columns})};
  engine_.make_room(way, tables);
  AddDomainsParameters add = prepare(call);
  const Combined sums = sum_inside(call, tables, [&](const Combined& made) {
    PackParameters pack;
    pack.from.rows = static_cast<const std::byte*>(made.x.data());
    pack.from.weights = has_weights() ? made.topk_weights.as<const float>() : nullptr;
    pack.num_sms = engine_.inside().sms_for(kCombine, options_.num_sms);
    call.send(way, tables, head(how), pack);
  });

  add.layout = way.layout;
  add.offset = tables.sum_offset;
  add.parts = tables.sums;
  add.rows = static_cast<const std::byte*>(sums.x.data());
  add.weights = has_weights() ? sums.topk_weights.as<const float>() : nullptr;
  add.blocks = tables.out;
  add.staging = engine_.staging_.data(StagingBuffers::kIn);
  const auto ends = tokens_after(tables.lists, way.layout, plan_->tokens, call.portions());
  call.receive([&](int portion, cudaStream_t stream) {
    add.end = ends[index(portion)];
    check(launch_add_domains(add, stream), "launch_add_domains");
    add.begin = add.end;
  });
  if (out_) {
    check(cudaMemcpyAsync(result_.x.data(), add.out, result_.x.view().bytes(),
                          cudaMemcpyDeviceToDevice, call.native()),
          "cudaMemcpyAsync");
  }
  result_.event = call.finish(sums.event);
  return result_;
}

Combined combine(DomainEngine& engine, const ConstTensorView& rows, const Plan& plan,
                 const CombineOptions& options) {
  engine.check_usable(kCombine);
  auto state = engine.plan_of(plan, kCombine);
  check_combine(rows, state->tokens, state->topk, options, engine.device());
  (void)engine.inside().sms_for(kCombine, options.num_sms);
  if (options.order == RowOrder::expert_major && !state->routes_sent.load()) {
    refuse(kCombine, "plan", "a plan that no dispatch has used yet",
           "a dispatch first: it brings the routes that expert-major rows need");
  }
  return DomainCombine(engine, rows, std::move(state), options).run();
}

}  // namespace ferry::cuda
