// What the CPU does beside the calls: it maps what peers offer, sees who has died or left, and then
// tells the kernels to stop.
#include <algorithm>
#include <chrono>
#include <cstddef>
#include <cstring>
#include <thread>
#include <utility>

#include "cuda/cuda_engine.hpp"
#include "cuda/event.hpp"
#include "engine/growth.hpp"

namespace ferry::cuda {

using namespace std::chrono_literals;

void CudaEngine::wait_aux(std::chrono::nanoseconds most) {
  poll(
      [this] {
        const cudaError_t result = cudaStreamQuery(aux_);
        if (result == cudaErrorNotReady) {
          (void)cudaGetLastError();  // or the next launch of this thread would find it
          return false;
        }
        check(result, "cudaStreamQuery");
        return true;
      },
      most, {});
}

void CudaEngine::write_table(int peer, fabric::SegmentId segment, std::byte* data,
                             std::size_t bytes) {
  if (segment >= kMaxSegments) return;  // its number was checked where it was attached
  const OnDevice here(device().index);
  std::scoped_lock lock(wire_mutex_);
  const PeerSegment entry{data, bytes};
  std::memcpy(staging_.get(), &entry, sizeof(entry));
  const std::size_t at =
      (static_cast<std::size_t>(peer) * kMaxSegments + segment) * sizeof(PeerSegment);
  check(cudaMemcpyAsync(parts_.control.data + parts_.layout.bytes + at, staging_.get(),
                        sizeof(entry), cudaMemcpyHostToDevice, aux_),
        "cudaMemcpyAsync");
  wait_aux(config_.deadline);
}

void CudaEngine::read_control(std::byte* to, std::size_t offset, std::size_t bytes) {
  check(cudaMemcpyAsync(to, parts_.control.data + offset, bytes, cudaMemcpyDeviceToHost, aux_),
        "cudaMemcpyAsync");
}

std::uint64_t CudaEngine::ended_calls() {
  const OnDevice here(device().index);
  std::scoped_lock lock(wire_mutex_);
  std::byte* line = staging_.get() + kLineBytes;
  std::uint64_t generation = 0;
  read_control(line, parts_.layout.local + offsetof(LocalWords, generation), sizeof(generation));
  wait_aux(1s);
  std::memcpy(&generation, line, sizeof(generation));
  return generation;
}

bool CudaEngine::awaits(int peer) {
  const DeviceControlLayout& at = parts_.layout;
  struct Words {
    std::uint64_t last, entered_here, entered, delivered, done;
    CallKind kind[2];  // of this rank's last two calls, by their generation
  } words{};
  static_assert(sizeof(Words) <= kLineBytes && sizeof(CallKind) == 4);
  const OnDevice here(device().index);
  std::scoped_lock lock(wire_mutex_);
  std::byte* line = staging_.get() + kLineBytes;
  const auto read = [&](std::size_t field, std::size_t offset, std::size_t bytes) {
    read_control(line + field, offset, bytes);
  };
  const auto flag = [](std::size_t flags, int rank) {
    return flags + static_cast<std::size_t>(rank) * kLineBytes;
  };
  // In this order: what comes later may be newer.
  read(offsetof(Words, last), at.local + offsetof(LocalWords, generation), 8);
  read(offsetof(Words, entered_here), flag(at.entered, rank()), 8);
  for (int parity = 0; parity < 2; ++parity) {
    const auto slot = static_cast<std::size_t>(parity * size() + rank());
    read(offsetof(Words, kind) + static_cast<std::size_t>(parity) * sizeof(CallKind),
         at.mailbox + slot * at.message_bytes + offsetof(DeviceHead, call) +
             offsetof(CallSignature, kind),
         sizeof(CallKind));
  }
  read(offsetof(Words, entered), flag(at.entered, peer), 8);
  read(offsetof(Words, delivered), flag(at.delivered, peer), 8);
  read(offsetof(Words, done), flag(at.done, peer), 8);
  wait_aux(1s);
  std::memcpy(&words, line, sizeof(words));
  const std::uint64_t running = words.last + 1;
  if (words.entered_here != running) return false;  // no call runs
  const CallKind kind = words.kind[running % 2];
  return words.entered < running || (kind == CallKind::dispatch && words.delivered < running) ||
         (kind == CallKind::combine && words.done < running);
}

fabric::Segment CudaEngine::add_segment(const char* call, std::size_t bytes) {
  fabric::Segment segment;
  try {
    std::scoped_lock lock(wire_mutex_);
    segment = gpu().wire().register_memory(bytes);
  } catch (const Error& error) {
    if (error.kind() != ErrorKind::exhausted) throw;
    return {};
  }
  write_table(rank(), segment.id, segment.data, segment.bytes);
  segments_.offer(call, segment);
  {
    std::scoped_lock lock(wire_mutex_);
    gpu().wire().seal(segment.id);
  }
  return segment;
}

bool CudaEngine::grow(const char* call, std::size_t bytes) {
  // At least half of what there is, so that the number of segments stays small.
  const std::size_t wanted = engine::grown_by(gpu().registered().total_bytes());
  for (const std::size_t size : {std::max(bytes, wanted), bytes}) {
    const fabric::Segment segment = add_segment(call, size);
    if (segment.bytes == 0) continue;
    gpu().registered().add(segment);
    return true;
  }
  return false;
}

void CudaEngine::serve_offers() {
  while (const auto offer = segments_.next()) {
    {
      std::scoped_lock lock(wire_mutex_);
      gpu().wire().attach(offer->peer, offer->segment, offer->bytes, offer->handle);
    }
    write_table(offer->peer, offer->segment, gpu().wire().pointer(offer->peer, offer->segment),
                gpu().wire().bytes(offer->peer, offer->segment));
    segments_.taken(*offer);
  }
}

void CudaEngine::look_after_peers() {
  const bool failed = words_.failed();
  bool flying = false;
  std::vector<Flight> ended;  // dropped without the lock
  {
    std::scoped_lock lock(flight_mutex_);
    while (!in_flight_.empty() && is_done(in_flight_.front().record->done)) {
      const std::shared_ptr<CallRecord> record = in_flight_.front().record;
      ended.push_back(std::move(in_flight_.front()));
      in_flight_.pop_front();
      if (record->refused()) {
        untold_.push_back(record);
      } else if (!failed || record->ended_before(*words_.fatal)) {
        record->ended_well.store(true, std::memory_order_release);
      }
    }
    flying = !in_flight_.empty();
    if (!flying) channel_.enter_call({});
  }
  channel_.beat(flying);
  if (failed) (void)fatal_error();
  if (!channel_.dead() && !channel_.left()) {
    const auto ended_here = [this]() -> std::uint64_t {
      try {
        return ended_calls();
      } catch (const Error&) {  // the GPU is busy: ask again at the next look
        return 0;
      }
    };
    channel_.look("exchange", ended_here, [this](int peer) {
      try {
        return awaits(peer);
      } catch (const Error&) {
        return false;
      }
    });
  }
  if (channel_.dead()) words_.raise_abort();
}

void CudaEngine::monitor() {
  constexpr auto kTick = 20ms;
  while (!stopping_.load(std::memory_order_acquire)) {
    std::this_thread::sleep_for(kTick);
    try {
      const OnDevice here(device().index);
      look_after_peers();
      if (!channel_.dead()) serve_offers();
    } catch (const std::exception& error) {
      channel_.fail("exchange", error.what(), ErrorKind::system);
      words_.raise_abort();
    }
  }
}

}  // namespace ferry::cuda
