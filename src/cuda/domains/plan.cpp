// Plans between domains: the CPU reads the routes and learns what all ranks send. The first direct
// or hierarchical call of a plan also learns the incoming routes and plans the exchange inside the
// domain.
#include <algorithm>
#include <cstring>
#include <numeric>
#include <span>
#include <string>
#include <utility>

#include "base/text.hpp"
#include "core/check.hpp"
#include "core/exchange_signature.hpp"
#include "core/packed_routes.hpp"
#include "cuda/domains/engine.hpp"
#include "cuda/runtime/event.hpp"
#include "engine/counts.hpp"
#include "engine/growth.hpp"

namespace ferry::cuda {

using std::to_string;

namespace {

constexpr std::size_t kMostWords = 300;

/// Bytes of the routes of so many rows: tokens, then packed ids.
std::size_t route_bytes(std::int64_t rows, const PackedRoutes& form) {
  return round_up(index(rows) * (sizeof(std::int32_t) + form.row_bytes()), kLineBytes);
}

/// Tokens and their ids as they cross.
std::vector<std::byte> packed(std::span<const std::int32_t> tokens, const RouteCounts& own,
                              const PackedRoutes& form) {
  std::vector<std::byte> routes(tokens.size() * (sizeof(std::int32_t) + form.row_bytes()));
  if (!tokens.empty()) std::memcpy(routes.data(), tokens.data(), tokens.size_bytes());
  std::byte* to = routes.data() + tokens.size_bytes();
  for (const std::int32_t token : tokens) {
    form.pack(own.topk_idx.data() + index(token) * index(form.topk), 1, to);
    to += form.row_bytes();
  }
  return routes;
}

/// Gathers tables into one place of memory.
class Tables {
 public:
  template <class T>
  std::size_t add(const std::vector<T>& values) {
    const std::size_t at = carver_.take(values.size() * sizeof(T));
    bytes_.resize(carver_.end);
    if (!values.empty()) std::memcpy(bytes_.data() + at, values.data(), values.size() * sizeof(T));
    return at;
  }
  const std::vector<std::byte>& bytes() const { return bytes_; }

 private:
  Carver carver_{};
  std::vector<std::byte> bytes_{};
};

std::vector<std::int64_t> first_rows(const std::vector<CrossingBlock>& blocks) {
  std::vector<std::int64_t> first(1, 0);
  for (const CrossingBlock& block : blocks) first.push_back(first.back() + block.rows);
  return first;
}

}  // namespace

/// i32 [T, K], or why they cannot be.
std::vector<std::int32_t> DomainEngine::read_routes(DomainCall& call,
                                                    const ConstTensorView& topk_idx,
                                                    std::optional<Error>& invalid) {
  const std::int64_t tokens = topk_idx.shape[0], topk = topk_idx.shape[1];
  if (tokens == 0) return {};
  const std::size_t span =
      index((tokens - 1) * topk_idx.strides[0] + (topk - 1) * topk_idx.strides[1] + 1) *
      size_of(topk_idx.dtype);
  poll([&] { return is_done(buffer_used_); }, kUntilItEnds, config_.on_wait);
  std::byte* copy = buffer_.take(span);
  check(cudaMemcpyAsync(copy, topk_idx.data, span, cudaMemcpyDeviceToHost, call.native()),
        "cudaMemcpyAsync");
  buffer_used_ = inside().gpu().events()->take();
  check(cudaEventRecord(buffer_used_.get(), call.native()), "cudaEventRecord");
  poll([&] { return is_done(buffer_used_); }, kUntilItEnds, config_.on_wait);
  try {
    auto routes =
        checked_routes("plan", {copy, topk_idx.dtype, topk_idx.shape, topk_idx.strides, Device{}},
                       config_.experts);
    now_.check_alive(routes, topk, placement_);
    return routes;
  } catch (const Error& error) {
    invalid = error;
    return {};
  }
}

void DomainEngine::to_gpu(DomainCall& call, void* to, const void* from, std::size_t bytes) {
  if (bytes == 0) return;
  poll([&] { return is_done(buffer_used_); }, kUntilItEnds, config_.on_wait);
  std::byte* copy = buffer_.take(bytes);
  std::memcpy(copy, from, bytes);
  check(cudaMemcpyAsync(to, copy, bytes, cudaMemcpyHostToDevice, call.native()), "cudaMemcpyAsync");
  buffer_used_ = inside().gpu().events()->take();
  check(cudaEventRecord(buffer_used_.get(), call.native()), "cudaEventRecord");
}

/// On the proxy's thread.
void DomainEngine::swap_counts(DomainPlan& state, RouteCounts own, std::uint64_t placement_digest,
                               const std::optional<Error>& invalid) {
  constexpr const char* kStage = "plan: counts";
  const auto counts = engine::counts_message(own, placement_, topology_, rank());
  std::vector<std::byte> body(counts.size() * sizeof(std::int32_t));
  const std::size_t most_words = std::min(kMostWords, channel_.max_body_bytes());
  StepMessage head;
  head.call = plan_signature(state.topk, placement_digest);
  if (invalid) {
    const std::string words = printable(invalid->what(), most_words);
    body.resize(std::max(body.size(), words.size()));
    head.status = StepStatus::invalid;
    head.handle_bytes = static_cast<std::uint32_t>(words.size());
    std::memcpy(body.data(), words.data(), words.size());
  } else {
    std::memcpy(body.data(), counts.data(), body.size());
  }
  channel_.swap(kStage, head, body);
  engine::check_same_call(channel_, kStage, head.call);
  if (invalid) throw *invalid;
  for (const int peer : channel_.ranks()) {
    const StepMessage theirs = channel_.head(peer);
    if (theirs.status != StepStatus::invalid) continue;
    const std::string_view words(reinterpret_cast<const char*>(channel_.body(peer)),
                                 std::min<std::size_t>(theirs.handle_bytes, most_words));
    throw Error(ErrorKind::peer_failed,
                std::string(kStage) + ": rank " + to_string(peer) +
                    " was given an id that is no expert, or one of a rank that is lost: " +
                    printable(words, kMostWords) + " (on that rank)",
                {rank(), peer, kStage, channel_.generation(), 0, 0});
  }
  engine::take_counts(channel_, config_, placement_, topology_, std::move(own), state);
}

Plan DomainEngine::plan(const ConstTensorView& topk_idx, const PlanOptions& options) {
  check_usable("plan");
  check_stream("plan", options.stream, device());
  check_routes("plan", topk_idx, device());
  DomainCall call(*this, "plan", options.stream);
  auto state = std::make_shared<DomainPlan>();
  state->engine = weak_from_this();
  state->epoch = static_cast<std::uint32_t>(epoch());
  state->tokens = topk_idx.shape[0];
  state->topk = static_cast<int>(topk_idx.shape[1]);
  state->on_wait = config_.on_wait;
  std::optional<Error> invalid;
  std::vector<std::int32_t> ids = read_routes(call, topk_idx, invalid);
  if (invalid) ids.assign(index(state->tokens * state->topk), -1);
  proxy_->run(
      [this, state, invalid, ids = std::move(ids), digest = options.placement_digest]() mutable {
        swap_counts(*state, count_routes(std::move(ids), state->tokens, state->topk, placement_),
                    digest, invalid);
      },
      config_.on_wait);
  state->number = ++plans_;  // only now: a plan that failed, failed on all ranks
  const auto& matrix = state->exchange.rank_tokens;
  state->matrix = call.take(matrix.size() * sizeof(std::int32_t));
  to_gpu(call, state->matrix.data(), matrix.data(), matrix.size() * sizeof(std::int32_t));
  state->rank_rows = TensorView(state->matrix.data(), Dtype::i32, {size(), size()}, device());
  if (call.blocking()) {
    poll([&] { return is_done(buffer_used_); }, kUntilItEnds, config_.on_wait);
  }
  return Access::plan(state);
}

/// On the proxy's thread: the routes of the own tokens that cross, to where they cross, and of
/// those that cross to here into `come`.
std::vector<CrossedRoutes> DomainEngine::swap_routes(DomainPlan& state, const CrossingLists& lists,
                                                     std::vector<std::int32_t>& come) {
  constexpr const char* kStage = "dispatch: routes";
  const int topk = state.topk;
  const PackedRoutes form(placement_.experts, topk);
  const auto place = [&](int target, int source) {  // of a source's routes at a rank
    std::size_t bytes = 0;
    for (int s = 0; s < source; ++s) {
      bytes +=
          route_bytes(crossing_rows(state.exchange, state.crossing, lists.how, s, target), form);
    }
    return bytes;
  };
  std::vector<std::size_t> needs;
  for (int r = 0; r < size(); ++r) needs.push_back(place(r, size()));
  staging_.agree(kStage);
  if (!staging_.has(StagingBuffers::kRoutes, needs)) {
    staging_.grow(kStage, StagingBuffers::kRoutes, needs);
  }
  StepMessage head;
  head.call.kind = CallKind::dispatch;
  head.call.exchange.topk = static_cast<std::uint32_t>(topk);
  head.call.exchange.carries_routes = 1;
  head.call.exchange.plan_number = state.number;
  head.call.exchange.crossing = static_cast<std::uint16_t>(lists.how);
  head.staging_segment = staging_.segment(StagingBuffers::kRoutes);
  channel_.swap(kStage, head);
  engine::check_same_call(channel_, kStage, head.call);
  std::vector<std::uint64_t> sent(index(size()));
  std::size_t row = 0;
  for (const CrossingBlock& block : lists.out) {
    const StepMessage theirs = channel_.head(block.rank);
    const std::size_t at = place(block.rank, rank());
    channel_.checked(kStage, block.rank, {theirs.staging_segment, theirs.staging_offset},
                     at + route_bytes(block.rows, form));
    const std::vector<std::byte> routes =
        packed(std::span(lists.tokens).subspan(row, index(block.rows)), state.exchange.own, form);
    sent[index(block.rank)] = routes.size();
    channel_.reach().write(block.rank, {theirs.staging_segment, theirs.staging_offset + at},
                           routes.data(), routes.size(), channel_.delivery_tag());
    row += index(block.rows);
  }
  for (const int peer : channel_.ranks()) channel_.deliver(peer, sent[index(peer)]);
  channel_.await_delivered(kStage);
  come.resize(index(lists.in_rows()) * (1 + index(topk)));
  std::vector<CrossedRoutes> routes;
  std::int32_t* to = come.data();
  for (const CrossingBlock& block : lists.in) {
    const std::byte* from = staging_.data(StagingBuffers::kRoutes) + place(rank(), block.rank);
    const auto n = index(block.rows);
    if (n > 0) std::memcpy(to, from, n * sizeof(std::int32_t));
    form.unpack(from + n * sizeof(std::int32_t), n, to + n);
    routes.push_back({{to, n}, {to + n, n * index(topk)}});
    to += n * (1 + index(topk));
  }
  return routes;
}

void DomainEngine::upload(DomainCall& call, const DomainTokens& tokens, CrossingTables& to) {
  std::vector<std::int32_t> returned(index(to.lists.in_rows()));
  std::iota(returned.begin(), returned.end(), static_cast<std::int32_t>(tokens.own()));
  Tables tables;
  const std::size_t from = tables.add(tokens.from), names = tables.add(tokens.names),
                    sent = tables.add(to.lists.tokens), back = tables.add(returned),
                    offset = tables.add(tokens.sum_offset), sums = tables.add(tokens.sums),
                    out = tables.add(first_rows(to.lists.out)),
                    in = tables.add(first_rows(to.lists.in)), ids = tables.add(tokens.ids),
                    first = tables.add(tokens.first), shift = tables.add(tokens.shift);
  to.memory = call.take(tables.bytes().size());
  std::byte* data = to.memory.data();
  to_gpu(call, data, tables.bytes().data(), tables.bytes().size());
  to.count = tokens.count();
  to.own = tokens.own();
  to.from = reinterpret_cast<const std::int32_t*>(data + from);
  to.names = reinterpret_cast<const std::int32_t*>(data + names);
  to.sent = reinterpret_cast<const std::int32_t*>(data + sent);
  to.returned = reinterpret_cast<const std::int32_t*>(data + back);
  to.sum_offset = reinterpret_cast<const std::int64_t*>(data + offset);
  to.sums = reinterpret_cast<const std::int32_t*>(data + sums);
  to.out = {static_cast<int>(to.lists.out.size()),
            reinterpret_cast<const std::int64_t*>(data + out)};
  to.in = {static_cast<int>(to.lists.in.size()), reinterpret_cast<const std::int64_t*>(data + in)};
  to.ids = reinterpret_cast<const std::int32_t*>(data + ids);
  to.first = reinterpret_cast<const std::int64_t*>(data + first);
  to.shift = reinterpret_cast<const std::int32_t*>(data + shift);
}

/// The exchange of the domain tokens inside, with rows in the whole group's order.
void DomainEngine::plan_inside(DomainCall& call, int topk, int sources, CrossingTables& to) {
  const ConstTensorView routes(to.ids, Dtype::i32, {to.count, topk}, device());
  to.inside = inside().plan(routes, {call.stream()});
  auto& made = static_cast<CudaPlan&>(*Access::state(to.inside));
  if (!made.memory) {
    throw Error(ErrorKind::exhausted, std::string(call.name()) + ": no GPU memory for a plan of " +
                                          to_string(to.count) + " tokens");
  }
  made.scattered = true;
  made.token_names = to.names;
  ShiftDestinationsParameters parameters;
  parameters.destinations = made.view.data + made.view.layout.destinations;
  parameters.count = to.count;
  parameters.ranks = inside().size();
  parameters.destination_count = destinations_of(topk, inside().size());
  parameters.sources = sources;
  parameters.first = to.first;
  parameters.shift = to.shift;
  parameters.peer_row = reinterpret_cast<std::int64_t*>(made.view.data + made.view.layout.peer_row);
  check(launch_shift_destinations(parameters, call.native()), "launch_shift_destinations");
}

CrossingTables& DomainEngine::tables(DomainCall& call, const std::shared_ptr<DomainPlan>& plan,
                                     Crossing how) {
  auto& known = plan->of(how);
  if (known) {
    call.use(known->memory);
    call.use(static_cast<CudaPlan&>(*Access::state(known->inside)).memory);
    return *known;
  }
  struct Step {
    CrossingLists lists{};
    DomainTokens tokens{};
  };
  auto step = std::make_shared<Step>();
  proxy_->run(
      [this, step, plan, how] {
        step->lists = make_crossing_lists(plan->exchange, plan->crossing, how);
        std::vector<std::int32_t> come;
        const auto routes = swap_routes(*plan, step->lists, come);
        step->tokens =
            make_domain_tokens(plan->exchange, plan->crossing,
                               parts_.domains.members(domain_of(rank())), step->lists, routes);
        if (step->tokens.offender >= 0) {
          channel_.throw_violation("dispatch: routes", step->tokens.offender,
                                   "sent other routes than it had counted");
        }
      },
      config_.on_wait);
  auto made = std::make_unique<CrossingTables>();
  made->lists = std::move(step->lists);
  try {
    upload(call, step->tokens, *made);
    plan_inside(call, plan->topk, static_cast<int>(step->tokens.sources.size()), *made);
  } catch (const Error& error) {
    fail(call.name(), error);  // other ranks have made theirs
    throw;
  }
  known = std::move(made);
  return *known;
}

/// A dispatch that crossed another way has brought the routes: the rows lie alike.
void DomainEngine::share_routes(DomainCall& call, DomainPlan& state, Crossing how) {
  const auto& other = state.of(how == Crossing::direct ? Crossing::hierarchical : Crossing::direct);
  auto& to = static_cast<CudaPlan&>(*Access::state(state.of(how)->inside));
  if (to.routes_sent.load() || !other) return;
  auto& from = static_cast<CudaPlan&>(*Access::state(other->inside));
  if (!from.routes_sent.load()) return;
  to.gpu_routes = from.gpu_routes;
  to.slot_rows = from.slot_rows;
  for (const RowLayout& layout : from.layouts.all()) to.layouts.add(layout);
  check(cudaMemcpyAsync(to.memory.data() + to.routes_state, from.memory.data() + from.routes_state,
                        sizeof(std::uint64_t), cudaMemcpyDeviceToDevice, call.native()),
        "cudaMemcpyAsync");
  to.routes_sent.store(true);
}

}  // namespace ferry::cuda
