// What the CPU does beside the calls: it maps what peers offer, sees who has died or left, and then
// tells the kernels to stop.
#include <algorithm>
#include <array>
#include <chrono>
#include <cstddef>
#include <cstring>
#include <thread>
#include <utility>

#include "cuda/kernels/base/group_view.hpp"
#include "cuda/runtime/event.hpp"
#include "cuda/throughput/create.hpp"
#include "cuda/throughput/engine.hpp"
#include "engine/growth.hpp"
#include "platform/futex.hpp"

namespace ferry::cuda {

using namespace std::chrono_literals;

static_assert(offsetof(DeviceHead, call) == 0 && offsetof(CallSignature, kind) == 0,
              "the first word of a message says which call it is");

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
  const PeerSegment entry{data, bytes};
  const std::size_t at =
      (static_cast<std::size_t>(peer) * kMaxSegments + segment) * sizeof(PeerSegment);
  write_control(&entry, parts_.layout.bytes + at, sizeof(entry));
}

/// Of all that is attached of the peer.
void CudaEngine::write_table(int peer) {
  std::array<PeerSegment, kMaxSegments> row{};
  for (fabric::SegmentId segment = 0; segment < row.size(); ++segment) {
    row[segment] = {gpu().wire().pointer(peer, segment), gpu().wire().bytes(peer, segment)};
  }
  write_control(row.data(), parts_.layout.bytes + static_cast<std::size_t>(peer) * sizeof(row),
                sizeof(row));
}

void CudaEngine::write_control(const void* from, std::size_t offset, std::size_t bytes) {
  const OnDevice here(device().index);
  std::scoped_lock lock(wire_mutex_);
  std::memcpy(staging_.get(), from, bytes);
  check(cudaMemcpyAsync(parts_.control.data + offset, staging_.get(), bytes, cudaMemcpyHostToDevice,
                        aux_),
        "cudaMemcpyAsync");
  wait_aux(config_.deadline);
}

std::byte* CudaEngine::nowhere() const {
  return parts_.control.data + parts_.layout.bytes + table_bytes(size());
}

void CudaEngine::read_control(std::byte* to, std::size_t offset, std::size_t bytes) {
  check(cudaMemcpyAsync(to, parts_.control.data + offset, bytes, cudaMemcpyDeviceToHost, aux_),
        "cudaMemcpyAsync");
}

std::uint64_t CudaEngine::ended_calls() {
  const OnDevice here(device().index);
  std::scoped_lock lock(wire_mutex_);
  std::byte* line = staging_.get() + kWriteBytes;
  std::uint64_t generation = 0;
  read_control(line, parts_.layout.local + offsetof(LocalWords, generation), sizeof(generation));
  wait_aux(1s);
  std::memcpy(&generation, line, sizeof(generation));
  return generation;
}

bool CudaEngine::awaits(int peer) {
  const DeviceControlLayout& at = parts_.layout;
  const OnDevice here(device().index);
  std::scoped_lock lock(wire_mutex_);
  std::byte* staged = staging_.get() + kWriteBytes;
  const auto read = [&](std::size_t field, std::size_t offset, std::size_t bytes) {
    read_control(staged + field, offset, bytes);
  };
  read(offsetof(PeerWords, last), at.local + offsetof(LocalWords, generation), 8);
  wait_aux(1s);
  PeerWords words;
  std::memcpy(&words.last, staged + offsetof(PeerWords, last), sizeof(words.last));
  const std::uint64_t running = words.last + 1;
  const auto message = [&](int source) {
    const auto slot = static_cast<std::size_t>(running % kMailboxDepth);
    return at.mailbox +
           (slot * static_cast<std::size_t>(size()) + static_cast<std::size_t>(source)) *
               at.message_bytes;
  };
  const auto source = static_cast<std::size_t>(peer);
  read(offsetof(PeerWords, own), message(rank()), 8);
  read(offsetof(PeerWords, theirs), message(peer), 8);
  read(offsetof(PeerWords, blocks), message(peer) + 2 * offsetof(DeviceHead, blocks), 8);
  read(offsetof(PeerWords, delivered), at.delivered + source * sizeof(words.delivered),
       sizeof(words.delivered));
  read(offsetof(PeerWords, done), at.done + source * kLineBytes, 8);
  wait_aux(1s);
  std::memcpy(&words, staged, sizeof(words));
  // Each word of a message stands below the low 32 bits of its generation.
  const auto is_of_running = [&](std::uint64_t word) {
    return static_cast<std::uint32_t>(word >> 32) == static_cast<std::uint32_t>(running);
  };
  if (!is_of_running(words.own)) return false;  // no call runs
  if (!is_of_running(words.theirs)) return true;
  const auto kind = static_cast<CallKind>(static_cast<std::uint32_t>(words.own));
  if (kind == CallKind::combine) return words.done < running;
  if (kind >= CallKind::all_reduce) return true;  // until it has ended
  if (kind != CallKind::dispatch) return false;
  const auto blocks = std::min<std::size_t>(static_cast<std::uint32_t>(words.blocks), kMaxBlocks);
  return std::any_of(words.delivered, words.delivered + blocks,
                     [&](std::uint64_t flag) { return flag < running; });
}

bool CudaEngine::has_transfer(int peer) {
  const OnDevice here(device().index);
  const std::scoped_lock lock(flight_mutex_);
  return std::any_of(in_flight_.begin(), in_flight_.end(), [&](const Flight& flight) {
    const int with = flight.record->transfer_with;
    return with >= 0 && (peer < 0 || with == peer) && !flight.record->has_ended();
  });
}

/// Whether a send or a recv needs this peer, which is gone. What it did before comes first.
bool CudaEngine::transfers_with(int peer) {
  constexpr auto kGrace = 2ms;  // of a kernel that sees an answer
  if (!has_transfer(peer)) return false;
  std::this_thread::sleep_for(kGrace);
  return has_transfer(peer);
}

fabric::Segment CudaEngine::add_segment(const char* call, std::size_t bytes) {
  const auto fits = std::find_if(offered_.begin(), offered_.end(), [&](const auto& one) {
    return one.bytes >= bytes && one.bytes / 2 <= bytes;  // not much too large
  });
  if (fits != offered_.end()) {
    std::swap(*fits, offered_.back());
  } else {
    fabric::Segment made;
    try {
      // Not under wire_mutex_: meanwhile the monitor maps what peers offer, who may wait, too.
      made = gpu().wire().register_memory(bytes);
    } catch (const Error& error) {
      if (error.kind() != ErrorKind::exhausted) throw;
      return {};
    }
    write_table(rank(), made.id, made.data, made.bytes);
    // Before the offer: who does not hear that finds it here.
    if (GpuPage* page = page_in(config_, parts_.cpu_control.data, size())) page->add(made);
    offered_.push_back(made);
  }
  segments_.offer(call, offered_.back());
  const fabric::Segment segment = offered_.back();
  offered_.pop_back();
  if (!elastic()) gpu().wire().seal(segment.id);
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

/// Of an elastic group: maps what the peer shows and this rank has not mapped yet; another process
/// than before takes the place of its memory. Kernels do not see it before `write_table`. False: it
/// shows nothing.
bool CudaEngine::map(int peer, const GpuPage& page) {
  const std::vector<std::byte> card = page.card();
  if (card.empty()) return false;
  fabric::DeviceMemory& wire = gpu().wire();
  wire.seat(peer, card);
  for (const engine::Card& segment : page.segments()) {
    if (wire.pointer(peer, segment.id) != nullptr) continue;
    if (segment.id == parts_.control.id && segment.bytes != parts_.control.bytes) {
      channel_.throw_violation("regroup", peer,
                               "has " + std::to_string(segment.bytes) +
                                   " bytes of flags on its GPU, expected " +
                                   std::to_string(parts_.control.bytes));
    }
    wire.attach(peer, segment.id, segment.bytes, {segment.handle, segment.handle_bytes});
  }
  return true;
}

/// Whether what the peer offers is mapped. Not that of one that is being ended, which may show that
/// later: its death is found as everywhere. Throws what the driver says once it has had time for
/// that.
bool CudaEngine::map_offer(const SegmentExchange::Offer& offer) {
  fabric::DeviceMemory& wire = gpu().wire();
  // A process that has joined may have found it on the page.
  if (wire.pointer(offer.peer, offer.segment) != nullptr) return true;
  const auto now = std::chrono::steady_clock::now();
  try {
    wire.attach(offer.peer, offer.segment, offer.bytes, offer.handle);
  } catch (const Error&) {
    const auto first = refused_since_.try_emplace(offer.peer, now).first->second;
    if (!parts_.cpu->fabric->peer_ends(offer.peer) && now - first > kUntilAnEndShows) throw;
    return false;
  }
  refused_since_.erase(offer.peer);
  return true;
}

void CudaEngine::serve_offers() {
  int after = -1;
  while (const auto offer = segments_.next(after)) {
    after = offer->peer;
    if (!map_offer(*offer)) continue;
    write_table(offer->peer, offer->segment, gpu().wire().pointer(offer->peer, offer->segment),
                gpu().wire().bytes(offer->peer, offer->segment));
    segments_.taken(*offer);
  }
}

/// False: the GPU is busy, so it may have been told or not; it can be told again.
bool CudaEngine::tell_of_death(std::byte* word) {
  const OnDevice here(device().index);
  std::scoped_lock lock(wire_mutex_);
  // Nobody else's line: a copy that comes late must find it unchanged.
  std::byte* line = staging_.get() + kWriteBytes + sizeof(PeerWords);
  constexpr auto kDead = static_cast<std::uint32_t>(Gone::dead);
  static_assert(sizeof(kDead) == 4);
  std::memcpy(line, &kDead, sizeof(kDead));
  check(cudaMemcpyAsync(word, line, sizeof(kDead), cudaMemcpyHostToDevice, aux_),
        "cudaMemcpyAsync");
  try {
    wait_aux(1s);
  } catch (const Error& error) {
    if (error.kind() != ErrorKind::deadline) throw;
    return false;
  }
  return true;
}

void CudaEngine::tell_of_gone() {
  std::scoped_lock lock(latency_mutex_);
  for (LatencySegment& segment : latency_segments_) {
    for (std::size_t peer = 0; peer < segment.told.size(); ++peer) {
      const int rank_of = static_cast<int>(peer);
      if (segment.told[peer] || rank_of == rank() || !channel_.has(rank_of)) continue;
      if (!channel_.gone(rank_of)) continue;
      segment.told[peer] =
          tell_of_death(segment.memory.data + segment.gone +
                        static_cast<std::size_t>(group_rank(rank_of)) * sizeof(std::uint32_t));
    }
  }
}

/// Of a call that has ended.
void CudaEngine::note_end(CallRecord& record) {
  if (record.was_lost(words_)) {
    quarantine_.add(record.granted);
  } else if (!record.refused()) {
    channel_.check_evicted(record.call);
    record.ended_well.store(true, std::memory_order_release);
  }
}

void CudaEngine::look_after_peers() {
  const bool failed = words_.failed();
  bool flying = false;
  std::vector<Flight> ended;  // dropped without the lock
  {
    std::scoped_lock lock(flight_mutex_);
    while (!in_flight_.empty() && in_flight_.front().record->has_ended()) {
      const std::shared_ptr<CallRecord> record = in_flight_.front().record;
      ended.push_back(std::move(in_flight_.front()));
      in_flight_.pop_front();
      if (record->refused()) untold_.push_back(record);
      note_end(*record);
    }
    flying = !in_flight_.empty();
    if (!flying && !stays_) channel_.enter_call({});
  }
  channel_.beat(flying);
  if (failed) (void)fatal_error();
  if (!channel_.dead() && !channel_.left()) {
    const auto ended_here = [this]() -> std::uint64_t {
      // Numbers of calls say nothing of a transfer.
      if (has_transfer()) return engine::Channel::kUnknownEnd;
      try {
        return ended_calls();
      } catch (const Error&) {  // the GPU is busy: ask again at the next poll
        return 0;
      }
    };
    channel_.poll("exchange", ended_here, [this](int peer) {
      try {
        return transfers_with(peer) || awaits(peer);
      } catch (const Error&) {
        return false;
      }
    });
  }
  if (channel_.dead()) words_.raise_abort();
}

bool CudaEngine::lost_may_write() {
  if (regroup_) return regroup_->lost_may_write();
  for (int peer = 0; peer < size(); ++peer) {
    if (channel_.has(peer) || channel_.at_rest(peer)) continue;
    if (parts_.cpu->fabric->peer_state(peer) != fabric::PeerState::dead) return true;
  }
  return false;
}

/// Asked by the monitor: whether the processes of the lost ranks have ended by now.
void CudaEngine::free_held() {
  // After a further failure the next epoch says what is held.
  if (!held_ || words_.failed() || channel_.dead() || lost_may_write()) return;
  const std::uint64_t none = 0;
  write_control(&none, parts_.layout.local + offsetof(LocalWords, held), sizeof(none));
  held_ = false;
  quarantine_.end();
}

void CudaEngine::monitor() {
  constexpr std::uint64_t kTickNs = 20'000'000;
  // A death ends the sleep early, and a peer that calls regroup.
  auto* bell = reinterpret_cast<std::uint64_t*>(parts_.cpu_control.data + cpu_layout(size()).bell);
  std::uint64_t rung = 0;
  while (!stopping_.load(std::memory_order_acquire)) {
    futex_wait(bell, rung, kTickNs);
    // Acquire: what the peer said before it rang is seen below.
    rung = std::atomic_ref(*bell).load(std::memory_order_acquire);
    try {
      const OnDevice here(device().index);
      const std::scoped_lock looking(watching_);
      look_after_peers();
      if (!channel_.dead()) serve_offers();
      if (!channel_.dead()) tell_of_gone();
      free_held();
    } catch (const std::exception& error) {
      channel_.fail("exchange", error.what(), ErrorKind::system);
      words_.raise_abort();
    }
  }
}

}  // namespace ferry::cuda
