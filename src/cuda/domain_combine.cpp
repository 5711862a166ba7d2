// Combine between domains: sums inside the domain, for the own tokens and for those that crossed to
// here; the latter go back where they came from, and each owner adds what it has.
#include <utility>

#include "core/check.hpp"
#include "cuda/combine_job.hpp"
#include "cuda/domain_engine.hpp"

namespace ferry::cuda {

using std::to_string;

namespace {

constexpr const char* kStage = "combine: crossing";

std::size_t index(std::int64_t value) {
  return static_cast<std::size_t>(value);
}

/// What comes back to `owner` of all ranks before `peer`.
std::size_t place_of(const DomainPlan& state, Crossing how, const CrossingLayout& layout, int owner,
                     int peer) {
  std::size_t bytes = 0;
  for (int p = 0; p < peer; ++p) {
    bytes += layout.block_bytes(crossing_rows(state.exchange, state.crossing, how, owner, p));
  }
  return bytes;
}

}  // namespace

Combined DomainEngine::combine(const ConstTensorView& rows, const Plan& plan,
                               const CombineOptions& options) {
  check_usable(kCombine);
  const auto state = plan_of(plan, kCombine);
  check_combine(rows, state->tokens, state->topk, options, device());
  (void)inside().sms_for(kCombine, options.sms);
  if (options.order == RowOrder::expert_major && !state->routes_sent.load()) {
    refuse(kCombine, "plan", "a plan that no dispatch has used yet",
           "a dispatch first: it brings the routes that expert-major rows need");
  }
  DomainCall call(*this, kCombine, options.stream);
  const auto used = state->layouts.all();
  check_combine_rows(state->exchange, used, rows.rows(), {options.order, options.alignment});
  if (options.topk_weights) {
    check_combine_weights(state->exchange, used, options.topk_weights->shape, state->topk);
  }
  const Crossing how = options.crossing == Crossing::automatic ? state->crossed : options.crossing;
  if (how == Crossing::hierarchical && !state->of(how)) {
    refuse(kCombine, "crossing", "hierarchical with a plan that no hierarchical dispatch has used",
           "such a dispatch first: it brings what the sums inside a domain need");
  }
  CrossingTables& to = tables(call, state, how);
  share_routes(call, *state, how);
  const CrossingLayout layout =
      make_crossing_layout({rows.row_bytes(), 0, options.topk_weights ? state->topk : 0});

  std::vector<std::size_t> needs;
  for (int r = 0; r < size(); ++r) needs.push_back(place_of(*state, how, layout, r, size()));
  std::size_t out_bytes = 0;
  for (const CrossingBlock& block : to.lists.in) out_bytes += layout.block_bytes(block.rows);
  if (!stage_.has(DomainStage::kIn, needs) || !stage_.has_out(out_bytes)) {
    proxy_->run(
        [this, needs, out_bytes] {
          if (!stage_.has_out(out_bytes)) stage_.grow_out(out_bytes);
          if (!stage_.has(DomainStage::kIn, needs)) stage_.grow(kStage, DomainStage::kIn, needs);
        },
        config_.on_wait);
  }

  CallSignature signature;
  signature.kind = CallKind::combine;
  signature.dtype = static_cast<std::uint32_t>(rows.dtype);
  signature.columns = rows.columns();
  signature.topk = static_cast<std::uint32_t>(state->topk);
  signature.order = static_cast<std::uint16_t>(options.order);
  signature.weights = options.topk_weights ? 1 : 0;
  signature.plan = state->number;
  signature.crossing = static_cast<std::uint16_t>(how);
  auto crossing = new_crossing(kStage, signature);
  crossing->head.stage_segment = stage_.segment(DomainStage::kIn);
  crossing->from = stage_.data(DomainStage::kOut);
  std::uint64_t from = 0;
  std::int64_t chunks = 0;
  for (const CrossingBlock& block : to.lists.in) {
    crossing->windows.push_back({block.rank, from,
                                 place_of(*state, how, layout, block.rank, rank()),
                                 layout.block_bytes(block.rows)});
    from += layout.block_bytes(block.rows);
    chunks += layout.chunks(block.rows);
  }

  AddDomainsParameters add;
  Combined result;
  Held out_copy, bias0, bias1;
  const Extents own{state->tokens, rows.columns()};
  if (options.out) {
    result.x = {*options.out, std::shared_ptr<void>(options.out->data, [](void*) {})};
  } else {
    const Held held = call.take(index(state->tokens) * rows.row_bytes());
    result.x = {TensorView(held.data(), rows.dtype, own, device()), held.owner};
  }
  add.out = static_cast<std::byte*>(result.x.data());
  if (reinterpret_cast<std::uintptr_t>(add.out) % 16 != 0) {
    out_copy = call.take(result.x.view().bytes());
    add.out = out_copy.data();
  }
  if (options.bias0) add.bias0 = call.aligned(*options.bias0, bias0);
  if (options.bias1) add.bias1 = call.aligned(*options.bias1, bias1);
  if (options.topk_weights) {
    const Held held = call.take(index(state->tokens) * layout.weight_bytes);
    result.topk_weights = {
        TensorView(held.data(), Dtype::f32, {state->tokens, state->topk}, device()), held.owner};
    add.out_weights = result.topk_weights.as<float>();
  }

  CombineOptions within = options;
  within.stream = call.stream();
  within.crossing = Crossing::automatic;
  within.bias0.reset();
  within.bias1.reset();
  within.out.reset();
  Combined sums;
  try {
    sums = inside().combine(rows, to.inside, within);
  } catch (const Error& error) {
    throw told(kStage, error);
  }

  PackParameters pack;
  pack.layout = layout;
  pack.from.rows = static_cast<const std::byte*>(sums.x.data());
  pack.from.weights = options.topk_weights ? sums.topk_weights.as<const float>() : nullptr;
  pack.index = to.returned;
  pack.blocks = to.in;
  pack.stage = stage_.data(DomainStage::kOut);
  pack.sms = inside().sms_for(kCombine, options.sms);
  call.cross(crossing, pack, chunks);

  add.layout = layout;
  add.tokens = state->tokens;
  add.offset = to.sum_offset;
  add.parts = to.sums;
  add.rows = pack.from.rows;
  add.weights = pack.from.weights;
  add.blocks = to.out;
  add.stage = stage_.data(DomainStage::kIn);
  add.dtype = rows.dtype;
  add.sms = inside().local_sms();
  check(launch_add_domains(add, call.native()), "launch_add_domains");
  if (out_copy) {
    check(cudaMemcpyAsync(result.x.data(), add.out, result.x.view().bytes(),
                          cudaMemcpyDeviceToDevice, call.native()),
          "cudaMemcpyAsync");
  }
  result.event = call.finish(std::move(crossing), std::move(sums.event));
  return result;
}

}  // namespace ferry::cuda
