#include "cuda/runtime/stream_arena.hpp"

#include <algorithm>
#include <chrono>
#include <iterator>
#include <thread>
#include <utility>

#include "core/layout.hpp"

namespace ferry::cuda {
namespace {

bool overlap(const engine::Region& region, const std::byte* begin, const std::byte* end) {
  return begin < region.data + region.bytes && region.data < end;
}

}  // namespace

void StreamArena::forget_done() {
  while (!pending_.empty() && is_done(pending_.front().event)) pending_.pop_front();
}

void StreamArena::retry_deferred() {
  std::vector<Deferred> again;
  again.swap(deferred_);
  for (Deferred& one : again) {
    release(one.region, std::move(one.others), one.held);  // may defer it again
  }
}

bool StreamArena::can_be_asked(const Others& others) const {
  if (std::any_of(others.streams.begin(), others.streams.end(), is_capturing)) return false;
  return std::all_of(others.uses.begin(), others.uses.end(), [&](const auto& one) {
    return one.second->end(*events_) != nullptr || one.second->has_ended();
  });
}

void StreamArena::await_on_gpu(const engine::Region& region, unsigned long long stream,
                               GpuEvent event) {
  // Without an event the work has ended, or the GPU is going away and nobody will use the memory.
  if (!event) return;
  pending_.push_back({region.data, region.data + region.bytes, stream, std::move(event)});
}

/// `held`: by graphs, which let go of it later.
void StreamArena::release(const engine::Region& region, Others others, bool held) {
  if (!can_be_asked(others)) {
    deferred_.push_back({region, std::move(others), held});
    return;
  }
  for (cudaStream_t stream : others.streams) {
    if (GpuEvent event = events_->record(stream)) {
      await_on_gpu(region, id_of(stream), std::move(event));
    }
  }
  for (const auto& [stream, use] : others.uses) await_on_gpu(region, stream, use->end(*events_));
  if (!held) arena_.release(region);
}

/// Lets the user's stream wait for the earlier users of a piece. A graph cannot wait for what
/// happened outside of it: for a capture, the events that the CPU has to wait for.
std::vector<GpuEvent> StreamArena::follow(const engine::Region& region, const User& user) const {
  std::vector<GpuEvent> awaited;
  for (const Pending& earlier : pending_) {
    if (!overlap(region, earlier.begin, earlier.end)) continue;
    if (user.captured) {
      awaited.push_back(earlier.event);
    } else if (earlier.stream != user.id) {
      check(cudaStreamWaitEvent(user.stream, earlier.event.get(), 0), "cudaStreamWaitEvent");
    }
  }
  return awaited;
}

/// Without the lock: `on_wait` may drop tensors.
bool StreamArena::await(const std::vector<GpuEvent>& events, const OnWait* on_wait) const {
  constexpr auto kPollPeriod = std::chrono::milliseconds(40);
  const auto start = std::chrono::steady_clock::now();
  auto polled = start;
  for (const GpuEvent& event : events) {
    while (!is_done(event)) {
      const auto now = std::chrono::steady_clock::now();
      if (now - start > deadline_) return false;
      if (on_wait != nullptr && *on_wait && now - polled > kPollPeriod) {
        polled = now;
        (*on_wait)();
      }
      std::this_thread::sleep_for(std::chrono::microseconds(50));
    }
  }
  return true;
}

std::optional<engine::Region> StreamArena::take(std::size_t bytes, const User& user) {
  std::optional<engine::Region> region;
  const auto put_back = [&] {
    std::scoped_lock lock(mutex_);
    live_.erase(region->data);
    arena_.release(*region);
  };
  std::vector<GpuEvent> awaited;
  {
    std::scoped_lock lock(mutex_);
    forget_done();
    if (!deferred_.empty()) retry_deferred();
    region = arena_.allocate(bytes);
    if (!region) return std::nullopt;
    hand_out(*region, user);
    awaited = follow(*region, user);
  }
  try {
    if (await(awaited, user.on_wait)) return region;
  } catch (...) {
    put_back();
    throw;
  }
  put_back();
  return std::nullopt;
}

void StreamArena::hand_out(const engine::Region& region, const User& user) {
  live_[region.data] = {region.bytes, {user.stream, user.id, user.captured}, {}, nullptr};
}

bool StreamArena::is_idle(const engine::Region& region) const {
  return std::none_of(pending_.begin(), pending_.end(), [&](const Pending& earlier) {
    return overlap(region, earlier.begin, earlier.end) && !is_done(earlier.event);
  });
}

std::optional<engine::Region> StreamArena::take_idle(std::size_t bytes, const User& user) {
  std::scoped_lock lock(mutex_);
  std::vector<engine::Region> busy;
  auto region = arena_.allocate(bytes);
  for (; region && !is_idle(*region); region = arena_.allocate(bytes)) busy.push_back(*region);
  for (const engine::Region& other : busy) arena_.release(other);
  if (region) hand_out(*region, user);
  return region;
}

void StreamArena::shrink(const engine::Region& region, std::size_t bytes) {
  const std::size_t kept = round_up(std::max<std::size_t>(bytes, 1), engine::kRegionAlignment);
  std::scoped_lock lock(mutex_);
  const auto at = live_.find(region.data);
  if (at == live_.end() || kept >= at->second.bytes) return;
  const std::size_t rest = std::exchange(at->second.bytes, kept) - kept;
  arena_.release(
      {{region.address.segment, region.address.offset + kept}, region.data + kept, rest});
}

bool StreamArena::at_rest() {
  std::scoped_lock lock(mutex_);
  if (!deferred_.empty()) retry_deferred();
  std::erase_if(pending_, [](const Pending& earlier) { return is_done(earlier.event); });
  return pending_.empty() && deferred_.empty();
}

void StreamArena::give_back(const engine::Region& taken) noexcept {
  std::scoped_lock lock(mutex_);
  const auto at = live_.find(taken.data);
  if (at == live_.end()) return;
  Live& live = at->second;
  engine::Region region = taken;
  region.bytes = live.bytes;  // less than was taken, after shrink
  Others others = std::move(live.others);
  if (live.user.captured) {
    // The graph has ended with the last of its pieces' owners, and its stream may be gone.
  } else if (live.settled) {
    pending_.push_back({region.data, region.data + region.bytes, live.user.id, live.settled});
  } else {
    others.streams.insert(live.user.stream);
  }
  const bool held = live.graphs > 0;
  if (held) {
    live.dropped = region;
  } else {
    live_.erase(at);
  }
  try {
    const OnDevice here(events_->device());  // whose default stream is meant
    release(region, std::move(others), held);
  } catch (...) {  // the GPU is going away, and nobody will use the memory again
  }
}

bool StreamArena::hold(const void* pointer) {
  std::scoped_lock lock(mutex_);
  const auto piece = live_at(pointer);
  if (piece == live_.end()) return false;
  ++piece->second.graphs;
  return true;
}

void StreamArena::let_go(const void* pointer) noexcept {
  std::scoped_lock lock(mutex_);
  const auto piece = live_at(pointer);
  if (piece == live_.end() || --piece->second.graphs > 0 || !piece->second.dropped) return;
  const engine::Region region = *piece->second.dropped;
  live_.erase(piece);
  for (Deferred& one : deferred_) {
    if (one.region.data != region.data) continue;
    one.held = false;
    return;
  }
  arena_.release(region);
}

void StreamArena::settle(const engine::Region& region, const GpuEvent& event) {
  std::scoped_lock lock(mutex_);
  const auto at = live_.find(region.data);
  if (at != live_.end()) at->second.settled = event;
}

std::map<const std::byte*, StreamArena::Live>::iterator StreamArena::live_at(const void* pointer) {
  const auto* at = static_cast<const std::byte*>(pointer);
  auto piece = live_.upper_bound(at);
  if (piece == live_.begin()) return live_.end();
  piece = std::prev(piece);
  return at < piece->first + piece->second.bytes ? piece : live_.end();
}

bool StreamArena::record_stream(const void* pointer, cudaStream_t stream) {
  std::scoped_lock lock(mutex_);
  const auto piece = live_at(pointer);
  if (piece == live_.end()) return false;
  Live& live = piece->second;
  if (live.user.captured || live.user.stream != stream) live.others.streams.insert(stream);
  return true;
}

void StreamArena::record_use(const void* pointer, unsigned long long stream,
                             std::shared_ptr<Use> use) {
  std::scoped_lock lock(mutex_);
  const auto piece = live_at(pointer);
  if (piece == live_.end()) return;
  Live& live = piece->second;
  if (live.user.captured || live.user.id != stream) live.others.uses[stream] = std::move(use);
}

}  // namespace ferry::cuda
