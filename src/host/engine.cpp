#include "host/engine.hpp"

#include <algorithm>
#include <chrono>
#include <cstring>
#include <exception>
#include <new>
#include <thread>
#include <utility>

#include "core/check.hpp"
#include "host/latency.hpp"

namespace ferry::host {

Tensor heap_tensor(const Extents& shape, Dtype dtype) {
  const std::size_t bytes = checked_bytes("result", "shape", shape, dtype);
  constexpr std::align_val_t kAlign{64};
  void* data = ::operator new(std::max<std::size_t>(bytes, 1), kAlign, std::nothrow);
  if (data == nullptr) {
    throw Error(ErrorKind::exhausted, "no memory for a result of " + std::to_string(bytes) +
                                          " bytes, shape " + to_string(shape));
  }
  std::shared_ptr<void> owner(data, [](void* p) { ::operator delete(p, std::align_val_t{64}); });
  return {TensorView(data, dtype, shape), std::move(owner)};
}

std::size_t message_bytes(std::int64_t experts, int ranks) {
  const std::size_t counts =
      (static_cast<std::size_t>(ranks) + static_cast<std::size_t>(experts)) * sizeof(std::int32_t);
  return sizeof(StepMessage) + std::max(counts, fabric::kMaxHandleBytes);
}

std::size_t segment_bytes(std::size_t bytes) {
  constexpr std::size_t kHugePage = std::size_t{2} << 20;
  return round_up(bytes, kHugePage);
}

namespace {
constexpr auto kLook = std::chrono::milliseconds(40);  // between two looks at the caller's wishes
}

void HostEngine::check_waiting(const char* call) {
  channel_.check_usable(call);
  if (!config_.on_wait) return;
  try {
    config_.on_wait();
  } catch (const std::exception& thrown) {
    // This rank leaves its place in the order, and with it the agreement with the peers.
    channel_.fail(call, std::string("interrupted while an earlier call runs: ") + thrown.what());
    throw;
  }
}

void HostEngine::pass_turn() {
  running_ = false;
  ++serving_;
  while (given_up_.erase(serving_) > 0) ++serving_;
  turn_changed_.notify_all();
}

/// A call's turn in the group's order: the constructor waits for it, the destructor passes it on.
class HostEngine::Turn {
 public:
  Turn(HostEngine& engine, std::uint64_t ticket, const char* call) : engine_(engine) {
    using Clock = std::chrono::steady_clock;
    std::unique_lock lock(engine_.turn_mutex_);
    std::uint64_t served = engine_.serving_;
    auto idle_since = Clock::now();
    while (engine_.serving_ != ticket) {
      engine_.turn_changed_.wait_for(lock, kLook);
      if (engine_.serving_ == ticket) break;
      // A call that runs has deadlines of its own; what must not last is that none runs.
      if (engine_.running_ || engine_.serving_ != served) idle_since = Clock::now();
      served = engine_.serving_;
      lock.unlock();
      try {
        engine_.check_waiting(call);
        if (Clock::now() - idle_since >= engine_.config_.deadline) blocked(call);
      } catch (...) {
        lock.lock();
        if (engine_.serving_ == ticket) {
          engine_.pass_turn();
        } else {
          engine_.given_up_.insert(ticket);
        }
        throw;
      }
      lock.lock();
    }
    engine_.running_ = true;
  }
  ~Turn() {
    std::scoped_lock lock(engine_.turn_mutex_);
    engine_.pass_turn();
  }
  Turn(const Turn&) = delete;
  Turn& operator=(const Turn&) = delete;

 private:
  [[noreturn]] void blocked(const char* call) {
    const std::string text =
        "rank " + std::to_string(engine_.rank()) + ": " + call +
        ": an earlier call of this group, submitted to a stream, did not begin within the "
        "deadline; is other work blocking that stream?";
    engine_.channel_.fail(call, text, ErrorKind::deadline);
    throw Error(ErrorKind::deadline, text,
                {engine_.rank(), engine_.rank(), call, engine_.channel_.generation(), 0, 0});
  }

  HostEngine& engine_;
};

HostEngine::Call::Call(HostEngine& engine, const char* call) : engine_(engine) {
  engine_.channel_.check_usable(call);
  std::unique_lock lock(engine_.turn_mutex_);
  // The thread inside waits for nothing without a deadline.
  while (engine_.calling_) {
    engine_.turn_changed_.wait_for(lock, kLook);
    if (!engine_.calling_) break;
    lock.unlock();
    engine_.check_waiting(call);
    lock.lock();
  }
  engine_.calling_ = true;
}

void HostEngine::Call::end() {
  if (!std::exchange(inside_, false)) return;
  std::scoped_lock lock(engine_.turn_mutex_);
  engine_.calling_ = false;
  engine_.turn_changed_.notify_all();
}

HostEngine::HostEngine(std::shared_ptr<Memory> memory, const GroupConfig& config,
                       const fabric::Segment& control)
    : config_(config),
      memory_(std::move(memory)),
      placement_{config.experts, memory_->fabric->size()},
      channel_(memory_, config_, control,
               make_control_layout(memory_->fabric->size(),
                                   message_bytes(config.experts, memory_->fabric->size()))),
      control_bytes_(control.bytes) {}

HostEngine::~HostEngine() {
  destroy();
}

void HostEngine::destroy() {
  channel_.leave();
}

Event HostEngine::enter(const char* call, Stream* stream, std::function<void()> work, Call* inside,
                        const std::function<void()>& entered) {
  channel_.check_usable(call);
  std::unique_lock lock(turn_mutex_);
  auto run = [self = shared_from_this(), call, ticket = next_ticket_, work = std::move(work)] {
    const Turn turn(*self, ticket, call);
    self->channel_.check_usable(call);
    self->run_work(call, work);
  };
  // Under the lock, so that the order on the stream is the order of the tickets.
  if (entered) entered();
  Event event;
  if (stream != nullptr) event = stream->submit(std::move(run));
  ++next_ticket_;
  lock.unlock();
  if (inside != nullptr) inside->end();
  if (stream == nullptr) run();
  return event;
}

void HostEngine::run_work(const char* call, const std::function<void()>& work) {
  const auto start = std::chrono::steady_clock::now();
  const auto count = [&] {
    exchange_ns_.fetch_add(
        static_cast<std::uint64_t>((std::chrono::steady_clock::now() - start).count()),
        std::memory_order_relaxed);
  };
  all_throw_ = false;
  try {
    work();
  } catch (const Error& error) {
    count();
    if (!all_throw_) channel_.fail(call, error.what(), error.kind());
    throw;
  } catch (const std::exception& error) {
    count();
    if (!all_throw_) channel_.fail(call, error.what(), ErrorKind::system);
    throw;
  } catch (...) {
    count();
    if (!all_throw_) channel_.fail(call, "an exception of unknown type", ErrorKind::system);
    throw;
  }
  count();
}

void HostEngine::finish(const char* call, const Event& event) {
  constexpr auto kLong = std::chrono::hours(24);  // each wait of the work has its own deadline
  try {
    event.wait(kLong, config_.on_wait);
  } catch (const std::exception& thrown) {
    if (event.ready()) throw;
    channel_.fail(call, thrown.what());
    try {
      event.wait(kLong);
    } catch (const std::exception&) {  // what made us stop is the news
    }
    throw;
  }
}

void HostEngine::await_counts(const PlanState& plan) {
  try {
    plan.ready.wait(config_.deadline, config_.on_wait);
  } catch (...) {
    // A plan that failed without failing the group failed on all ranks.
    if (plan.ready.ready()) all_ranks_throw();
    throw;
  }
}

void HostEngine::check_same_call(const char* stage, const CallSignature& mine) {
  for (int peer = 0; peer < size(); ++peer) {
    const std::string differs = difference(channel_.head(peer).call, peer, mine);
    if (!differs.empty()) {
      all_ranks_throw();  // whoever differs from one rank is differed from by all others
      throw Error(ErrorKind::mismatch,
                  std::string(stage) + ": rank " + std::to_string(rank()) + " and rank " +
                      std::to_string(peer) + " made different calls: " + differs,
                  {rank(), peer, stage, channel_.generation(), 0, 0});
    }
  }
}

void HostEngine::agree(const char* stage, StepMessage& head, const std::function<bool()>& prepare) {
  while (true) {
    if (head.status != StepStatus::too_many) {
      head.status = prepare() ? StepStatus::ok : StepStatus::no_room;
    }
    channel_.swap(stage, head);
    check_same_call(stage, head.call);
    bool room = true;
    for (int peer = 0; peer < size(); ++peer) {
      const StepMessage theirs = channel_.head(peer);
      if (theirs.status == StepStatus::too_many) {
        all_ranks_throw();
        throw Error(ErrorKind::exhausted,
                    std::string(stage) + ": rank " + std::to_string(peer) + " would receive " +
                        std::to_string(theirs.need_bytes) + " rows but gave worst_case_rows = " +
                        std::to_string(theirs.rows) + "; nothing was sent",
                    {rank(), peer, stage, channel_.generation(), 0, 0});
      }
      room = room && theirs.status == StepStatus::ok;
    }
    if (room) return;
    // At least half of what there is, so that the number of segments stays small.
    const bool grow = head.status == StepStatus::no_room;
    const AddedSegments added =
        add_segments("grow", grow ? head.need_bytes : 0, memory_->arena.total_bytes() / 2);
    if (added.mine.bytes > 0) memory_->arena.add(added.mine);
  }
}

fabric::Segment HostEngine::try_register(std::size_t bytes, std::size_t wanted,
                                         std::string& reason) {
  if (wanted > bytes) {
    try {
      return memory_->fabric->register_memory(segment_bytes(wanted));
    } catch (const Error&) {  // then no more than what is needed
    }
  }
  try {
    return memory_->fabric->register_memory(segment_bytes(bytes));
  } catch (const Error& error) {
    reason = error.what();
  }
  return {};
}

AddedSegments HostEngine::add_segments(const char* stage, std::size_t bytes, std::size_t wanted) {
  StepMessage head;
  head.call.kind = CallKind::grow;
  AddedSegments added;
  std::string reason;
  if (bytes > 0) {
    added.mine = try_register(bytes, wanted, reason);
    head.status = added.mine.bytes > 0 ? StepStatus::ok : StepStatus::exhausted;
    head.segment = added.mine.id;
    head.need_bytes = added.mine.bytes > 0 ? added.mine.bytes : bytes;
    head.handle_bytes = static_cast<std::uint32_t>(added.mine.handle.size());
  }
  channel_.swap(stage, head, added.mine.handle);
  check_same_call(stage, head.call);
  int poor = -1;
  std::uint64_t missing = 0;
  for (int peer = 0; peer < size(); ++peer) {
    const StepMessage theirs = channel_.head(peer);
    added.ids.push_back(theirs.segment);
    added.bytes.push_back(theirs.handle_bytes == 0 ? 0 : theirs.need_bytes);
    if (theirs.status == StepStatus::exhausted && poor < 0) {
      poor = peer;
      missing = theirs.need_bytes;
    }
    if (peer == rank() || theirs.handle_bytes == 0) continue;
    if (theirs.handle_bytes > fabric::kMaxHandleBytes) {
      channel_.distrust(
          stage, peer,
          "sent a segment's handle of " + std::to_string(theirs.handle_bytes) + " bytes");
    }
    memory_->fabric->attach(peer, theirs.segment, theirs.need_bytes,
                            {channel_.body(peer), theirs.handle_bytes});
  }
  StepMessage attached;
  attached.call.kind = CallKind::grow;
  channel_.swap(stage, attached);
  check_same_call(stage, attached.call);
  if (added.mine.bytes > 0) memory_->fabric->seal(added.mine.id);
  if (poor < 0) return added;
  if (added.mine.bytes > 0) memory_->arena.add(added.mine);  // attached everywhere: not lost
  all_ranks_throw();
  throw Error(ErrorKind::exhausted,
              std::string(stage) + ": rank " + std::to_string(poor) + " could not register " +
                  std::to_string(missing) + " more bytes" +
                  (poor == rank() ? ": " + reason : std::string()) + "; nothing was sent",
              {rank(), poor, stage, channel_.generation(), 0, 0});
}

Tensor HostEngine::empty(const Extents& shape, Dtype dtype) {
  channel_.check_usable("empty");
  const std::size_t bytes = checked_bytes("empty", "shape", shape, dtype);
  const auto region = memory_->arena.allocate(bytes);
  if (!region) {
    throw Error(ErrorKind::exhausted,
                "empty: " + std::to_string(bytes) +
                    " bytes do not fit into the registered memory (" +
                    std::to_string(memory_->arena.used_bytes()) + " of " +
                    std::to_string(memory_->arena.total_bytes()) +
                    " bytes are used); give the group more with GroupConfig::memory_bytes",
                {rank(), rank(), "empty", channel_.generation(), 0, 0});
  }
  return {TensorView(region->data, dtype, shape), lease(memory_, *region)};
}

bool HostEngine::is_registered(const void* pointer) const {
  if (memory_->arena.find(pointer, 1)) return true;
  const auto* at = static_cast<const std::byte*>(pointer);
  std::scoped_lock lock(latency_mutex_);
  return std::any_of(latency_segments_.begin(), latency_segments_.end(), [&](const auto& segment) {
    return std::less_equal<>{}(segment.data, at) && std::less<>{}(at, segment.data + segment.bytes);
  });
}

void HostEngine::add_latency_memory(const fabric::Segment& segment) {
  std::scoped_lock lock(latency_mutex_);
  latency_segments_.push_back(segment);
}

void HostEngine::barrier() {
  enter("barrier", nullptr, [this] {
    StepMessage head;
    head.call.kind = CallKind::barrier;
    channel_.swap("barrier", head);
    check_same_call("barrier", head.call);
  });
}

void HostEngine::check_counts(std::span<const std::int32_t> counts) {
  constexpr const char* kStage = "plan: counts";
  const auto ranks = static_cast<std::size_t>(size());
  const auto experts = static_cast<std::size_t>(placement_.experts);
  for (int source = 0; source < size(); ++source) {
    const auto row = counts.subspan(static_cast<std::size_t>(source) * (ranks + experts));
    for (int target = 0; target < size(); ++target) {
      const std::int64_t tokens = row[static_cast<std::size_t>(target)];
      std::int64_t slots = 0;
      bool possible = tokens >= 0;
      for (std::int64_t e = placement_.first_expert(target);
           e < placement_.first_expert(target + 1); ++e) {
        const std::int32_t count = row[ranks + static_cast<std::size_t>(e)];
        possible = possible && count >= 0;
        slots += count;
      }
      if (!possible || slots < tokens || slots > tokens * kMaxTopk) {
        channel_.distrust(kStage, source,
                          "said that it sends " + std::to_string(tokens) + " tokens in " +
                              std::to_string(slots) + " slots to rank " + std::to_string(target));
      }
    }
  }
}

Plan HostEngine::plan(const ConstTensorView& topk_idx, const PlanOptions& options) {
  Call call(*this, "plan");
  std::vector<std::int32_t> routes = checked_routes("plan", topk_idx, config_.experts);
  auto state = std::make_shared<PlanState>();
  state->engine = weak_from_this();
  state->tokens = topk_idx.shape[0];
  state->topk = static_cast<int>(topk_idx.shape[1]);
  state->on_wait = config_.on_wait;
  state->ready = enter(
      "plan", options.stream,
      [this, state, ids = std::move(routes)]() mutable {
        RouteCounts own = count_routes(std::move(ids), state->tokens, state->topk, placement_);
        std::vector<std::int32_t> counts(own.tokens_per_rank);
        counts.insert(counts.end(), own.slots_per_expert.begin(), own.slots_per_expert.end());
        StepMessage head;
        head.call.kind = CallKind::plan;
        head.call.topk = static_cast<std::uint32_t>(state->topk);
        channel_.swap("plan: counts", head, std::as_bytes(std::span(counts)));
        check_same_call("plan: counts", head.call);
        const std::size_t each = counts.size();
        std::vector<std::int32_t> all(each * static_cast<std::size_t>(size()));
        for (int s = 0; s < size(); ++s) {
          std::memcpy(all.data() + static_cast<std::size_t>(s) * each, channel_.body(s),
                      each * sizeof(std::int32_t));
        }
        check_counts(all);
        state->exchange = make_plan(std::move(own), all, placement_, rank());
        state->number = ++plans_;  // only now: a plan that failed, failed on all ranks
      },
      &call);
  return Plan(state);
}

MemoryUse HostEngine::memory() const {
  std::size_t latency_bytes = 0;
  {
    std::scoped_lock lock(latency_mutex_);
    for (const fabric::Segment& segment : latency_segments_) latency_bytes += segment.bytes;
  }
  return {control_bytes_, memory_->arena.total_bytes(), memory_->arena.used_bytes(), latency_bytes};
}

TimeUse HostEngine::time() const {
  return {exchange_ns_.load(std::memory_order_relaxed), channel_.wait_ns()};
}

std::shared_ptr<LatencyEngine> HostEngine::make_latency(const LatencyConfig& config) {
  return make_host_latency(shared_from_this(), config);
}

}  // namespace ferry::host
