#include "cuda/stream_arena.hpp"

#include <algorithm>
#include <chrono>
#include <iterator>
#include <thread>
#include <utility>

namespace ferry::cuda {

void StreamArena::forget_done() {
  while (!pending_.empty() && is_done(pending_.front().event)) pending_.pop_front();
}

void StreamArena::retry_deferred() {
  std::vector<Deferred> again;
  again.swap(deferred_);
  for (const Deferred& one : again) release(one.region, one.streams);  // may defer it again
}

void StreamArena::release(const engine::Region& region, const std::set<cudaStream_t>& streams) {
  if (std::any_of(streams.begin(), streams.end(), is_capturing)) {
    deferred_.push_back({region, streams});
    return;
  }
  for (cudaStream_t stream : streams) {
    // Without an event the GPU is going away, and nobody will use the memory again.
    if (GpuEvent event = events_->record(stream)) {
      pending_.push_back(
          {region.data, region.data + region.bytes, id_of(stream), std::move(event)});
    }
  }
  arena_.release(region);
}

bool StreamArena::wait_for(const engine::Region& region, const User& user) {
  constexpr auto kMost = std::chrono::seconds(60);
  const auto start = std::chrono::steady_clock::now();
  const std::byte* begin = region.data;
  const std::byte* end = region.data + region.bytes;
  for (const Pending& earlier : pending_) {
    if (earlier.end <= begin || end <= earlier.begin) continue;
    if (!user.captured) {
      if (earlier.stream == user.id) continue;
      check(cudaStreamWaitEvent(user.stream, earlier.event.get(), 0), "cudaStreamWaitEvent");
      continue;
    }
    // A graph cannot wait for what happened outside of it.
    while (!is_done(earlier.event)) {
      if (std::chrono::steady_clock::now() - start > kMost) return false;
      std::this_thread::sleep_for(std::chrono::microseconds(50));
    }
  }
  return true;
}

std::optional<engine::Region> StreamArena::take(std::size_t bytes, const User& user) {
  std::scoped_lock lock(mutex_);
  forget_done();
  if (!deferred_.empty()) retry_deferred();
  const auto region = arena_.allocate(bytes);
  if (!region) return std::nullopt;
  if (!wait_for(*region, user)) {
    arena_.release(*region);
    return std::nullopt;
  }
  live_[region->data] = {region->bytes, user, {}, nullptr};
  return region;
}

void StreamArena::give_back(const engine::Region& region) noexcept {
  std::scoped_lock lock(mutex_);
  const auto at = live_.find(region.data);
  if (at == live_.end()) return;
  const Live live = std::move(at->second);
  live_.erase(at);
  // A graph has ended with the last of its pieces' owners, and may do so where no CUDA call is
  // allowed.
  if (live.user.captured) {
    arena_.release(region);
    return;
  }
  std::set<cudaStream_t> streams = live.others;
  if (live.settled) {
    pending_.push_back({region.data, region.data + region.bytes, live.user.id, live.settled});
  } else {
    streams.insert(live.user.stream);
  }
  try {
    const OnDevice here(events_->device());  // whose default stream is meant
    release(region, streams);
  } catch (...) {  // the GPU is going away, and nobody will use the memory again
  }
}

void StreamArena::settle(const engine::Region& region, const GpuEvent& event) {
  std::scoped_lock lock(mutex_);
  const auto at = live_.find(region.data);
  if (at != live_.end()) at->second.settled = event;
}

bool StreamArena::record_stream(const void* pointer, cudaStream_t stream) {
  const auto* at = static_cast<const std::byte*>(pointer);
  std::scoped_lock lock(mutex_);
  auto piece = live_.upper_bound(at);
  if (piece == live_.begin()) return false;
  piece = std::prev(piece);
  if (at >= piece->first + piece->second.bytes) return false;
  if (piece->second.user.stream != stream) piece->second.others.insert(stream);
  return true;
}

}  // namespace ferry::cuda
