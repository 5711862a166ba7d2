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
  const auto bytes = static_cast<std::size_t>(shape.product()) * size_of(dtype);
  constexpr std::align_val_t kAlign{64};
  void* data = ::operator new(std::max<std::size_t>(bytes, 1), kAlign);
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

/// A call's place in the group's order: the constructor waits for it, the destructor passes it on.
class HostEngine::Turn {
 public:
  Turn(HostEngine& engine, std::uint64_t ticket) : engine_(engine) {
    std::unique_lock lock(engine_.turn_mutex_);
    while (engine_.serving_ != ticket) {
      engine_.turn_changed_.wait_for(lock, std::chrono::milliseconds(40));
      if (engine_.serving_ != ticket && engine_.config_.on_wait) {
        lock.unlock();
        try {
          engine_.config_.on_wait();
        } catch (...) {
          // The place in the order is lost, and with it the agreement with the peers.
          engine_.channel_.fail("waiting for an earlier call", "interrupted");
          lock.lock();
          engine_.turn_changed_.wait(lock, [&] { return engine_.serving_ == ticket; });
          ++engine_.serving_;
          lock.unlock();
          engine_.turn_changed_.notify_all();
          throw;
        }
        lock.lock();
      }
    }
  }
  ~Turn() {
    {
      std::scoped_lock lock(engine_.turn_mutex_);
      ++engine_.serving_;
    }
    engine_.turn_changed_.notify_all();
  }
  Turn(const Turn&) = delete;
  Turn& operator=(const Turn&) = delete;

 private:
  HostEngine& engine_;
};

HostEngine::HostEngine(std::shared_ptr<Memory> memory, const GroupConfig& config,
                       const fabric::Segment& control)
    : config_(config),
      memory_(std::move(memory)),
      placement_{config.experts, memory_->fabric->size()},
      channel_(memory_, config_, control,
               make_control_layout(memory_->fabric->size(),
                                   message_bytes(config.experts, memory_->fabric->size()))),
      control_bytes_(control.bytes) {}

HostEngine::~HostEngine() { destroy(); }

void HostEngine::destroy() { channel_.leave(); }

Event HostEngine::enter(const char* call, Stream* stream, std::function<void()> work) {
  channel_.check_usable(call);
  std::uint64_t ticket;
  {
    std::scoped_lock lock(turn_mutex_);
    ticket = next_ticket_++;
  }
  auto run = [self = shared_from_this(), call, ticket, work = std::move(work)] {
    const Turn turn(*self, ticket);
    self->channel_.check_usable(call);
    const auto start = std::chrono::steady_clock::now();
    const auto count = [&] {
      self->exchange_ns_.fetch_add(
          static_cast<std::uint64_t>((std::chrono::steady_clock::now() - start).count()),
          std::memory_order_relaxed);
    };
    try {
      work();
    } catch (...) {
      count();
      throw;
    }
    count();
  };
  if (stream != nullptr) return stream->submit(std::move(run));
  run();
  return {};
}

void HostEngine::check_same_call(const char* stage, const CallSignature& mine) {
  for (int peer = 0; peer < size(); ++peer) {
    const std::string differs = difference(channel_.head(peer).call, peer, mine);
    if (!differs.empty()) {
      throw Error(ErrorKind::mismatch,
                  std::string(stage) + ": rank " + std::to_string(rank()) + " and rank " +
                      std::to_string(peer) + " made different calls: " + differs,
                  {rank(), peer, stage, channel_.generation(), 0, 0});
    }
  }
}

void HostEngine::agree(const char* stage, StepMessage& head,
                       const std::function<bool()>& prepare) {
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
        throw Error(ErrorKind::exhausted,
                    std::string(stage) + ": rank " + std::to_string(peer) + " would receive " +
                        std::to_string(theirs.need_bytes) + " rows but gave worst_case_rows = " +
                        std::to_string(theirs.rows) + "; nothing was sent",
                    {rank(), peer, stage, channel_.generation(), 0, 0});
      }
      room = room && theirs.status == StepStatus::ok;
    }
    if (room) return;
    const fabric::Segment added =
        add_segments("grow", head.status == StepStatus::no_room ? head.need_bytes : 0);
    if (added.bytes > 0) memory_->arena.add(added);
  }
}

fabric::Segment HostEngine::add_segments(const char* stage, std::size_t bytes) {
  StepMessage head;
  head.call.kind = CallKind::grow;
  fabric::Segment added;
  std::string reason;
  if (bytes > 0) {
    try {
      added = memory_->fabric->register_memory(segment_bytes(bytes));
      head.segment = added.id;
      head.need_bytes = added.bytes;
      head.handle_bytes = static_cast<std::uint32_t>(added.handle.size());
    } catch (const Error& error) {
      head.status = StepStatus::exhausted;
      head.need_bytes = bytes;
      reason = error.what();
    }
  }
  channel_.swap(stage, head, added.handle);
  check_same_call(stage, head.call);
  for (int peer = 0; peer < size(); ++peer) {
    const StepMessage theirs = channel_.head(peer);
    if (theirs.status == StepStatus::exhausted) {
      throw Error(ErrorKind::exhausted,
                  std::string(stage) + ": rank " + std::to_string(peer) + " could not register " +
                      std::to_string(theirs.need_bytes) + " more bytes" +
                      (peer == rank() ? ": " + reason : std::string()),
                  {rank(), peer, stage, channel_.generation(), 0, 0});
    }
    if (peer == rank() || theirs.handle_bytes == 0) continue;
    try {
      if (theirs.handle_bytes > fabric::kMaxHandleBytes) {
        throw Error(ErrorKind::mismatch, "rank " + std::to_string(peer) +
                                             " sent a handle of impossible size");
      }
      memory_->fabric->attach(peer, theirs.segment, theirs.need_bytes,
                              {channel_.body(peer), theirs.handle_bytes});
    } catch (const std::exception& thrown) {
      channel_.fail(stage, thrown.what());
      throw;
    }
  }
  StepMessage attached;
  attached.call.kind = CallKind::grow;
  channel_.swap(stage, attached);
  if (added.bytes > 0) memory_->fabric->seal(added.id);
  return added;
}

Tensor HostEngine::empty(const Extents& shape, Dtype dtype) {
  channel_.check_usable("empty");
  for (std::int64_t extent : shape) {
    if (extent < 0) refuse("empty", "shape", to_string(shape), "no negative extent");
  }
  const auto bytes = static_cast<std::size_t>(shape.product()) * size_of(dtype);
  const auto region = memory_->arena.allocate(bytes);
  if (!region) {
    throw Error(ErrorKind::exhausted,
                "empty: " + std::to_string(bytes) + " bytes do not fit into the registered memory (" +
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

Plan HostEngine::plan(const ConstTensorView& topk_idx, const PlanOptions& options) {
  channel_.check_usable("plan");
  std::vector<std::int32_t> routes = checked_routes("plan", topk_idx, config_.experts);
  auto state = std::make_shared<PlanState>();
  state->engine = weak_from_this();
  state->tokens = topk_idx.shape[0];
  state->topk = static_cast<int>(topk_idx.shape[1]);
  state->on_wait = config_.on_wait;
  state->number = ++plans_;
  state->ready = enter("plan", options.stream, [this, state, ids = std::move(routes)]() mutable {
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
    state->exchange = make_plan(std::move(own), all, placement_, rank());
  });
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
