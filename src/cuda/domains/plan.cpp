// Plans between domains: the CPU reads the routes and learns what all ranks send. The first call
// that crosses also learns the incoming routes and plans the exchange inside the domain
// (tables.cpp).
#include <algorithm>
#include <cstring>
#include <utility>

#include "base/text.hpp"
#include "core/check.hpp"
#include "cuda/domains/engine.hpp"
#include "cuda/runtime/event.hpp"
#include "engine/growth.hpp"

namespace ferry::cuda {

using std::to_string;

namespace {

constexpr std::size_t kMostWords = 300;

std::size_t index(std::int64_t value) {
  return static_cast<std::size_t>(value);
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
  if (buffer_used_) poll([&] { return is_done(buffer_used_); }, kUntilItEnds, config_.on_wait);
  std::byte* copy = buffer_.take(span);
  check(cudaMemcpyAsync(copy, topk_idx.data, span, cudaMemcpyDeviceToHost, call.native()),
        "cudaMemcpyAsync");
  buffer_used_ = inside().gpu().events()->take();
  check(cudaEventRecord(buffer_used_.get(), call.native()), "cudaEventRecord");
  poll([&] { return is_done(buffer_used_); }, kUntilItEnds, config_.on_wait);
  try {
    return checked_routes("plan",
                          {copy, topk_idx.dtype, topk_idx.shape, topk_idx.strides, Device{}},
                          config_.experts);
  } catch (const Error& error) {
    invalid = error;
    return {};
  }
}

void DomainEngine::to_gpu(DomainCall& call, void* to, const void* from, std::size_t bytes) {
  if (bytes == 0) return;
  if (buffer_used_) poll([&] { return is_done(buffer_used_); }, kUntilItEnds, config_.on_wait);
  std::byte* copy = buffer_.take(bytes);
  std::memcpy(copy, from, bytes);
  check(cudaMemcpyAsync(to, copy, bytes, cudaMemcpyHostToDevice, call.native()), "cudaMemcpyAsync");
  buffer_used_ = inside().gpu().events()->take();
  check(cudaEventRecord(buffer_used_.get(), call.native()), "cudaEventRecord");
}

void DomainEngine::check_counts(std::span<const std::int32_t> counts) {
  const auto each = index(size() + placement_.experts);
  for (int source = 0; source < size(); ++source) {
    const auto row = counts.subspan(index(source) * each, each);
    for (int target = 0; target < size(); ++target) {
      const std::int64_t tokens = row[index(target)];
      std::int64_t slots = 0;
      bool possible = tokens >= 0;
      for (std::int64_t e = placement_.first_expert(target);
           e < placement_.first_expert(target + 1); ++e) {
        const std::int32_t count = row[index(size() + e)];
        possible = possible && count >= 0;
        slots += count;
      }
      if (!possible || slots < tokens || slots > tokens * kMaxTopk) {
        channel_.throw_violation("plan: counts", source,
                                 "said that it sends " + to_string(tokens) + " tokens in " +
                                     to_string(slots) + " slots to rank " + to_string(target));
      }
    }
  }
}

/// On the proxy's thread.
void DomainEngine::swap_counts(DomainPlan& state, RouteCounts own,
                               const std::optional<Error>& invalid) {
  constexpr const char* kStage = "plan: counts";
  std::vector<std::int32_t> counts(own.tokens_per_rank);
  counts.insert(counts.end(), own.slots_per_expert.begin(), own.slots_per_expert.end());
  const std::size_t each = counts.size();
  const auto crossings = count_crossings(own, placement_, parts_.domains, rank());
  counts.insert(counts.end(), crossings.begin(), crossings.end());
  std::vector<std::byte> body(counts.size() * sizeof(std::int32_t));
  StepMessage head;
  head.call.kind = CallKind::plan;
  head.call.topk = static_cast<std::uint32_t>(state.topk);
  if (invalid) {
    const std::string words = printable(invalid->what(), std::min(kMostWords, body.size()));
    head.status = StepStatus::invalid;
    head.handle_bytes = static_cast<std::uint32_t>(words.size());
    std::memcpy(body.data(), words.data(), words.size());
  } else {
    std::memcpy(body.data(), counts.data(), body.size());
  }
  channel_.swap(kStage, head, body);
  engine::check_same_call(channel_, kStage, head.call);
  if (invalid) throw *invalid;
  for (int peer = 0; peer < size(); ++peer) {
    const StepMessage theirs = channel_.head(peer);
    if (theirs.status != StepStatus::invalid) continue;
    const std::string_view words(reinterpret_cast<const char*>(channel_.body(peer)),
                                 std::min<std::size_t>(theirs.handle_bytes, kMostWords));
    throw Error(ErrorKind::peer_failed,
                std::string(kStage) + ": rank " + to_string(peer) +
                    " was given an id that is no expert: " + printable(words, kMostWords) +
                    " (on that rank)",
                {rank(), peer, kStage, channel_.generation(), 0, 0});
  }
  std::vector<std::int32_t> all(each * index(size()));
  std::vector<std::int32_t> domain_tokens(crossings.size() * index(size()));
  for (int s = 0; s < size(); ++s) {
    std::memcpy(all.data() + index(s) * each, channel_.body(s), each * sizeof(std::int32_t));
    std::memcpy(domain_tokens.data() + index(s) * crossings.size(),
                channel_.body(s) + each * sizeof(std::int32_t),
                crossings.size() * sizeof(std::int32_t));
  }
  check_counts(all);
  state.exchange = make_plan(std::move(own), all, placement_, rank());
  const int culprit = impossible_crossing(state.exchange, parts_.domains, domain_tokens);
  if (culprit >= 0) {
    channel_.throw_violation(kStage, culprit,
                             "counted tokens for a domain that do not fit those for its ranks");
  }
  state.crossing = make_crossing_plan(state.exchange, parts_.domains, std::move(domain_tokens),
                                      config_.crossing);
}

Plan DomainEngine::plan(const ConstTensorView& topk_idx, const PlanOptions& options) {
  check_usable("plan");
  check_stream("plan", options.stream, device());
  check_routes("plan", topk_idx, device());
  DomainCall call(*this, "plan", options.stream);
  auto state = std::make_shared<DomainPlan>();
  state->engine = weak_from_this();
  state->tokens = topk_idx.shape[0];
  state->topk = static_cast<int>(topk_idx.shape[1]);
  state->on_wait = config_.on_wait;
  std::optional<Error> invalid;
  std::vector<std::int32_t> ids = read_routes(call, topk_idx, invalid);
  if (invalid) ids.assign(index(state->tokens * state->topk), -1);
  proxy_->run(
      [this, state, invalid, ids = std::move(ids)]() mutable {
        swap_counts(*state, count_routes(std::move(ids), state->tokens, state->topk, placement_),
                    invalid);
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
  return Plan(state);
}

}  // namespace ferry::cuda
