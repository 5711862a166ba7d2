// Dispatch: grants, push, delivery, and the fan-out to expert-major order.
#include <algorithm>
#include <cstring>
#include <utility>

#include "core/check.hpp"
#include "host/engine.hpp"
#include "host/kernels/kernels.hpp"
#include "host/regions.hpp"

namespace ferry::host {
namespace {

constexpr const char* kCall = "dispatch";
constexpr const char* kStage = "dispatch: grants";
/// Above this many bytes an exchange does not stay in the caches, so stores go past them.
constexpr std::size_t kStreamBytes = std::size_t{4} << 20;

/// One dispatch, from its arguments to its results.
class DispatchJob {
 public:
  DispatchJob(HostEngine& engine, const ConstTensorView& x, std::shared_ptr<PlanState> plan,
              const DispatchOptions& options)
      : engine_(engine),
        plan_(std::move(plan)),
        x_(x),
        options_(options),
        regions_(engine.shared_memory()) {
    options_.stream = nullptr;
    carries_routes_ = !plan_->routes_sent.load();  // for the sizes; `run` decides
  }

  /// Learns the count if the output is exact, and allocates the result tensors if there is room
  /// now. False: `run` will make room.
  bool allocate() {
    if (options_.worst_case_rows == 0) {
      plan_->ready.wait(engine_.config().deadline, engine_.config().on_wait);
      rank_rows_ = plan().recv_rows();
      out_rows_ = needed_rows();
    } else {
      // Every row that arrives fills at least one expert-major row, so this bounds both.
      rank_rows_ = out_rows_ = options_.worst_case_rows;
    }
    if (options_.out && options_.out->rows() < out_rows_) {
      refuse(kCall, "out", std::to_string(options_.out->rows()) + " rows",
             "at least " + std::to_string(out_rows_));
    }
    return allocate_regions();
  }
  /// The dispatch will take place: if it is the plan's first, it brings the routes.
  void enter() { plan_->routes_sent.store(true); }

  void run();
  const Received& result() const { return result_; }

 private:
  bool expert_major() const { return options_.order == RowOrder::expert_major; }
  bool has_weights() const { return options_.topk_weights.has_value(); }
  std::int64_t scale_columns() const { return options_.scales ? options_.scales->shape[1] : 0; }
  Channel& channel() { return engine_.channel(); }
  const ExchangePlan& plan() const { return plan_->exchange; }

  /// Rows of the output that this plan fills.
  std::int64_t needed_rows() const {
    return expert_major() ? plan().expert_offsets(options_.alignment).back() : plan().recv_rows();
  }

  std::vector<std::size_t> region_sizes() const;
  bool allocate_regions();
  bool allocate_side();
  void make_tensors();
  StepMessage grant() const;
  void agree();
  void check_grants();
  void push();
  void push_rows();
  void push_side(int peer, const StepMessage& theirs);
  void write(int peer, fabric::Address to, const void* from, std::size_t bytes);
  void finish_side();
  void check_routes();
  void fan_out();

  HostEngine& engine_;
  std::shared_ptr<PlanState> plan_;
  ConstTensorView x_;
  DispatchOptions options_;
  Regions regions_;
  Received result_{};
  Tensor landed_{};  // x in registered memory
  bool carries_routes_ = false;
  bool allocated_ = false;
  std::int64_t rank_rows_ = 0;  // of the rank-major region and tensors
  std::int64_t out_rows_ = 0;
  Region rank_region_{};
  Region side_region_{};
  Region expert_region_{};
  std::vector<std::uint64_t> put_bytes_{};  // outside the domain, for each peer
};

std::vector<std::size_t> DispatchJob::region_sizes() const {
  std::vector<std::size_t> sizes{
      make_receive_layout(rank_rows_, x_.row_bytes(), scale_columns()).bytes,
      make_side_layout(rank_rows_, plan_->topk, carries_routes_, has_weights()).bytes};
  if (expert_major()) {
    sizes.push_back(make_receive_layout(out_rows_, x_.row_bytes(), scale_columns()).bytes);
  }
  return sizes;
}

bool DispatchJob::allocate_regions() {
  if (allocated_) return allocate_side();
  const auto taken = regions_.take(region_sizes());
  if (!taken) return false;
  rank_region_ = (*taken)[0];
  side_region_ = (*taken)[1];
  if (expert_major()) expert_region_ = (*taken)[2];
  allocated_ = true;
  make_tensors();
  return true;
}

/// The dispatch before failed, so this one carries the routes, for which it has no room yet.
bool DispatchJob::allocate_side() {
  const std::size_t bytes = region_sizes()[1];
  if (bytes <= side_region_.bytes) return true;
  const auto taken = regions_.take({bytes});
  if (taken) side_region_ = taken->front();
  return taken.has_value();
}

void DispatchJob::make_tensors() {
  const std::int64_t columns = x_.columns();
  const Region& rows = expert_major() ? expert_region_ : rank_region_;
  const auto layout = make_receive_layout(out_rows_, x_.row_bytes(), scale_columns());
  const std::shared_ptr<void> owner = regions_.keep(rows);
  landed_ = {TensorView(rows.data, x_.dtype, {out_rows_, columns}), owner};
  result_.x = landed_;
  if (options_.out) {
    void* data = options_.out->data;
    result_.x = {TensorView(data, x_.dtype, {out_rows_, columns}),
                 std::shared_ptr<void>(data, [](void*) {})};
  }
  if (options_.scales) {
    result_.scales = {
        TensorView(rows.data + layout.scales, Dtype::f32, {out_rows_, scale_columns()}), owner};
  }
  const Extents routes{rank_rows_, plan_->topk};
  result_.topk_idx = heap_tensor(routes, Dtype::i64);
  result_.source_token = heap_tensor({rank_rows_}, Dtype::i32);
  if (has_weights()) result_.topk_weights = heap_tensor(routes, Dtype::f32);
  if (expert_major()) {
    const std::int64_t local = engine_.placement().local_experts(engine_.rank());
    result_.slot_rows = heap_tensor(routes, Dtype::i64);
    result_.expert_offsets = heap_tensor({local + 1}, Dtype::i64);
  }
}

StepMessage DispatchJob::grant() const {
  StepMessage head;
  head.call.kind = CallKind::dispatch;
  head.call.dtype = static_cast<std::uint32_t>(x_.dtype);
  head.call.columns = x_.columns();
  head.call.scale_columns = scale_columns();
  head.call.topk = static_cast<std::uint32_t>(plan_->topk);
  head.call.order = static_cast<std::uint32_t>(options_.order);
  head.call.routes = carries_routes_ ? 1 : 0;
  head.call.weights = has_weights() ? 1 : 0;
  head.call.plan = plan_->number;
  return head;
}

void DispatchJob::agree() {
  StepMessage head = grant();
  const std::int64_t needed = needed_rows();
  if (options_.worst_case_rows > 0 && needed > options_.worst_case_rows) {
    head.status = StepStatus::too_many;
    head.rows = options_.worst_case_rows;
    head.need_bytes = static_cast<std::uint64_t>(needed);
  } else {
    head.need_bytes = Regions::total(region_sizes());
  }
  try {
    engine_.agree(kStage, head, [&] {
      if (!allocate_regions()) return false;
      head.segment = rank_region_.address.segment;
      head.offset = rank_region_.address.offset;
      head.side_segment = side_region_.address.segment;
      head.side_offset = side_region_.address.offset;
      head.rows = rank_rows_;
      return true;
    });
  } catch (const Error&) {
    if (carries_routes_) plan_->routes_sent.store(false);
    throw;
  }
}

void DispatchJob::run() {
  engine_.await_counts(*plan_);
  // Now it is known what became of the dispatches before; all ranks find the same.
  carries_routes_ = !plan_->routes_known.load(std::memory_order_acquire);
  agree();
  check_grants();
  regions_.promise();
  push();
  channel().await_delivered("dispatch: rows");
  regions_.settle();
  finish_side();
  if (expert_major()) fan_out();
  if (options_.out && landed_.view().bytes() > 0) {
    std::memcpy(options_.out->data, landed_.data(), landed_.view().bytes());
  }
  regions_.release_all();
}

void DispatchJob::check_grants() {
  for (int peer = 0; peer < engine_.size(); ++peer) {
    const StepMessage theirs = channel().head(peer);
    if (theirs.rows < plan().recv_rows_of(peer) || theirs.rows > kMaxRows) {
      channel().distrust(kStage, peer,
                         "granted room for " + std::to_string(theirs.rows) +
                             " rows, expected at least " +
                             std::to_string(plan().recv_rows_of(peer)));
    }
    const auto rows = make_receive_layout(theirs.rows, x_.row_bytes(), scale_columns());
    const auto side = make_side_layout(theirs.rows, plan_->topk, carries_routes_, has_weights());
    channel().checked(kStage, peer, {theirs.segment, theirs.offset}, rows.bytes);
    channel().checked(kStage, peer, {theirs.side_segment, theirs.side_offset}, side.bytes);
  }
}

void DispatchJob::write(int peer, fabric::Address to, const void* from, std::size_t bytes) {
  if (bytes == 0) return;
  if (std::byte* target = channel().pointer(peer, to)) {
    std::memcpy(target, from, bytes);
  } else {
    channel().reach().write(peer, {to.segment, to.offset}, from, bytes, channel().delivery_tag());
    put_bytes_[static_cast<std::size_t>(peer)] += bytes;
  }
}

void DispatchJob::push() {
  put_bytes_.assign(static_cast<std::size_t>(engine_.size()), 0);
  push_rows();
  for (int i = 0; i < engine_.size(); ++i) {
    const int peer = (engine_.rank() + i) % engine_.size();
    push_side(peer, channel().head(peer));
    channel().deliver(peer, put_bytes_[static_cast<std::size_t>(peer)]);
  }
}

void DispatchJob::push_rows() {
  const std::size_t row_bytes = x_.row_bytes();
  const auto* from = static_cast<const std::byte*>(x_.data);
  const auto ranks = static_cast<std::size_t>(engine_.size());
  std::vector<fabric::Address> target(ranks);
  std::vector<std::byte*> base(ranks);
  for (int peer = 0; peer < engine_.size(); ++peer) {
    const StepMessage theirs = channel().head(peer);
    const auto d = static_cast<std::size_t>(peer);
    const auto layout = make_receive_layout(theirs.rows, row_bytes, scale_columns());
    const std::uint64_t first = static_cast<std::uint64_t>(plan().peer_row[d]) * row_bytes;
    target[d] = {theirs.segment, theirs.offset + layout.rows + first};
    base[d] = channel().pointer(peer, target[d]);
  }
  const Kernels& run = kernels();
  const bool stream = plan().lanes.size() * row_bytes > kStreamBytes;
  for (std::int64_t token = 0; token < plan_->tokens; ++token) {
    const std::byte* row = from + static_cast<std::size_t>(token) * row_bytes;
    const auto t = static_cast<std::size_t>(token);
    for (std::int64_t l = plan().lane_offset[t]; l < plan().lane_offset[t + 1]; ++l) {
      const Lane lane = plan().lanes[static_cast<std::size_t>(l)];
      const auto d = static_cast<std::size_t>(lane.rank);
      const std::uint64_t at = static_cast<std::uint64_t>(lane.row) * row_bytes;
      if (base[d] == nullptr) {
        write(lane.rank, {target[d].segment, target[d].offset + at}, row, row_bytes);
      } else if (stream) {
        run.copy_stream(base[d] + at, row, row_bytes);
      } else {
        std::memcpy(base[d] + at, row, row_bytes);
      }
    }
  }
  if (stream) run.stream_fence();  // before any flag is published
}

void DispatchJob::push_side(int peer, const StepMessage& theirs) {
  const auto d = static_cast<std::size_t>(peer);
  const auto rows = static_cast<std::size_t>(plan().send_rows(peer));
  if (rows == 0) return;
  const auto topk = static_cast<std::size_t>(plan_->topk);
  const auto first = static_cast<std::size_t>(plan().peer_row[d]);
  const std::int32_t* tokens = plan().send_tokens.data() + plan().send_offset[d];
  const auto side = make_side_layout(theirs.rows, plan_->topk, carries_routes_, has_weights());
  const auto send = [&](std::uint32_t segment, std::uint64_t offset, const auto& values) {
    write(peer, {segment, offset}, values.data(), values.size() * sizeof(values[0]));
  };
  std::vector<std::int32_t> routes;
  if (carries_routes_ || has_weights()) {
    routes.resize(rows * topk);
    local_routes(plan(), peer, routes.data());
  }
  if (carries_routes_) {
    write(peer, {theirs.side_segment, theirs.side_offset + side.source_token + first * 4}, tokens,
          rows * sizeof(std::int32_t));
    send(theirs.side_segment, theirs.side_offset + side.topk_idx + first * topk * 4, routes);
  }
  if (has_weights()) {
    std::vector<float> weights(rows * topk);
    const auto* own = static_cast<const float*>(options_.topk_weights->data);
    for (std::size_t i = 0; i < rows; ++i) {
      const float* row = own + static_cast<std::size_t>(tokens[i]) * topk;
      for (std::size_t k = 0; k < topk; ++k) {
        weights[i * topk + k] = routes[i * topk + k] < 0 ? 0.0f : row[k];
      }
    }
    send(theirs.side_segment, theirs.side_offset + side.weights + first * topk * 4, weights);
  }
  if (options_.scales) {
    const ConstTensorView& scales = *options_.scales;
    const auto columns = static_cast<std::size_t>(scale_columns());
    std::vector<float> packed(rows * columns);
    const auto* own = static_cast<const float*>(scales.data);
    for (std::size_t i = 0; i < rows; ++i) {
      for (std::size_t c = 0; c < columns; ++c) {
        packed[i * columns + c] =
            own[tokens[i] * scales.strides[0] + static_cast<std::int64_t>(c) * scales.strides[1]];
      }
    }
    const auto layout = make_receive_layout(theirs.rows, x_.row_bytes(), scale_columns());
    send(theirs.segment, theirs.offset + layout.scales + first * columns * 4, packed);
  }
}

void DispatchJob::finish_side() {
  const std::int64_t rows = plan().recv_rows();
  const auto slots = static_cast<std::size_t>(rows) * static_cast<std::size_t>(plan_->topk);
  const auto side = make_side_layout(rank_rows_, plan_->topk, carries_routes_, has_weights());
  if (carries_routes_) {
    const auto* tokens =
        reinterpret_cast<const std::int32_t*>(side_region_.data + side.source_token);
    const auto* routes = reinterpret_cast<const std::int32_t*>(side_region_.data + side.topk_idx);
    plan_->routes.source_token.assign(tokens, tokens + rows);
    plan_->routes.topk_idx.assign(routes, routes + slots);
    check_routes();
    plan_->routes_known.store(true, std::memory_order_release);
  }
  auto* ids = result_.topk_idx.as<std::int64_t>();
  const std::int64_t all = rank_rows_ * plan_->topk;
  std::copy_n(plan_->routes.topk_idx.begin(), slots, ids);
  std::fill(ids + slots, ids + all, -1);
  auto* tokens = result_.source_token.as<std::int32_t>();
  std::copy_n(plan_->routes.source_token.begin(), rows, tokens);
  std::fill(tokens + rows, tokens + rank_rows_, -1);
  if (has_weights()) {
    auto* weights = result_.topk_weights.as<float>();
    if (slots > 0) std::memcpy(weights, side_region_.data + side.weights, slots * sizeof(float));
    std::fill(weights + slots, weights + all, 0.0f);
  }
}

void DispatchJob::check_routes() {
  // What came in decides where rows are written from here on: it must be what the counts said.
  const auto local = static_cast<std::size_t>(plan().local_experts());
  const auto topk = static_cast<std::size_t>(plan_->topk);
  std::vector<std::int32_t> slots(local);
  for (int source = 0; source < engine_.size(); ++source) {
    const auto s = static_cast<std::size_t>(source);
    std::fill(slots.begin(), slots.end(), 0);
    bool possible = true;
    for (auto i = static_cast<std::size_t>(plan().recv_offset[s]) * topk;
         i < static_cast<std::size_t>(plan().recv_offset[s + 1]) * topk; ++i) {
      const std::int32_t id = plan_->routes.topk_idx[i];
      if (id == -1) continue;
      possible = possible && id >= 0 && static_cast<std::size_t>(id) < local;
      if (possible) ++slots[static_cast<std::size_t>(id)];
    }
    if (!possible ||
        !std::equal(slots.begin(), slots.end(),
                    plan().expert_slots.begin() + static_cast<std::ptrdiff_t>(s * local))) {
      channel().distrust("dispatch: rows", source, "sent routes that are not those it counted");
    }
  }
}

void DispatchJob::fan_out() {
  const auto offsets = plan().expert_offsets(options_.alignment);
  const auto slot_rows = place_slots(plan_->routes.topk_idx, offsets);
  std::copy(slot_rows.begin(), slot_rows.end(), result_.slot_rows.as<std::int64_t>());
  std::copy(offsets.begin(), offsets.end(), result_.expert_offsets.as<std::int64_t>());

  const std::size_t row_bytes = x_.row_bytes();
  const std::size_t scale_bytes = static_cast<std::size_t>(scale_columns()) * sizeof(float);
  const auto from = make_receive_layout(rank_rows_, row_bytes, scale_columns());
  const auto to = make_receive_layout(out_rows_, row_bytes, scale_columns());
  const std::byte* rows = rank_region_.data + from.rows;
  const std::byte* scales = rank_region_.data + from.scales;
  std::byte* out_rows = expert_region_.data + to.rows;
  std::byte* out_scales = expert_region_.data + to.scales;
  const auto topk = static_cast<std::size_t>(plan_->topk);
  for (std::size_t i = 0; i < slot_rows.size(); ++i) {
    if (slot_rows[i] < 0) continue;
    const auto source = i / topk;
    const auto target = static_cast<std::size_t>(slot_rows[i]);
    std::memcpy(out_rows + target * row_bytes, rows + source * row_bytes, row_bytes);
    std::memcpy(out_scales + target * scale_bytes, scales + source * scale_bytes, scale_bytes);
  }
  const auto zero = [&](std::int64_t begin, std::int64_t end) {
    const auto b = static_cast<std::size_t>(begin), n = static_cast<std::size_t>(end - begin);
    std::memset(out_rows + b * row_bytes, 0, n * row_bytes);
    std::memset(out_scales + b * scale_bytes, 0, n * scale_bytes);
  };
  const auto slots = plan().slots_per_expert();
  for (std::size_t e = 0; e < slots.size(); ++e) zero(offsets[e] + slots[e], offsets[e + 1]);
  zero(offsets.back(), out_rows_);
}

}  // namespace

Received HostEngine::dispatch(const ConstTensorView& x, const Plan& plan,
                              const DispatchOptions& options) {
  Call call(*this, kCall);
  PlanState& state = checked(plan, kCall);
  if (state.engine.lock().get() != this) {
    refuse(kCall, "plan", "a plan of another group", "one of this group");
  }
  check_dispatch(x, state.tokens, state.topk, options);
  auto job = std::make_shared<DispatchJob>(*this, x, plan.state(), options);
  const bool room = job->allocate();
  const Event event =
      enter(kCall, options.stream, [job] { job->run(); }, &call, [job] { job->enter(); });
  // An exact size blocks the caller for the count only; without room now, for the whole call.
  if (!room) finish(kCall, event);
  Received result = job->result();
  result.event = event;
  return result;
}

}  // namespace ferry::host
