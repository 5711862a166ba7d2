#include "cuda/throughput/regroup.hpp"

#include <algorithm>
#include <chrono>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "base/text.hpp"
#include "cuda/runtime/event.hpp"
#include "cuda/throughput/create.hpp"
#include "cuda/throughput/engine.hpp"
#include "cuda/throughput/gpu_page.hpp"
#include "cuda/throughput/turn.hpp"
#include "engine/membership/aside.hpp"
#include "fabric/lobby.hpp"
#include "protocol/device_epoch.hpp"

namespace ferry::cuda {

static_assert(protocol::DeviceEpochTraits::kUnderWay == kMailboxDepth);

namespace {

/// Until all that this process has launched on the GPU has ended.
void await_device(int device, std::chrono::nanoseconds most, const std::string& late) {
  engine::at_most_for<void>(most, late, [device] {
    const OnDevice here(device);
    // Or a capture of any thread would be broken off.
    cudaStreamCaptureMode mode = cudaStreamCaptureModeRelaxed;
    check(cudaThreadExchangeStreamCaptureMode(&mode), "cudaThreadExchangeStreamCaptureMode");
    check(cudaDeviceSynchronize(), "cudaDeviceSynchronize");
  });
}

}  // namespace

ferry::GroupView EpochChange::run() {
  engine_.check_can_regroup(kRegroup);
  return change([this] { return membership().run(engine_.now_.step()); });
}

void EpochChange::run_inside(const Agree& agree) {
  (void)change([&] {
    const engine::Epoch next = agree(engine_.channel_.generation());
    leave_behind(next);
    engine_.channel_.begin_epoch(next);
    return next;
  });
}

/// `agree`: on the next epoch, when no call of this one runs.
template <class AgreeOnNext>
ferry::GroupView EpochChange::change(const AgreeOnNext& agree) {
  const OnDevice here(engine_.device().index);
  const auto turn = take_turn(engine_.turn_, engine_.config_.on_wait, [this] {
    if (engine_.destroyed()) engine_.channel_.check_usable(kRegroup);
  });
  end_calls();
  const std::scoped_lock paused(engine_.watching_);
  end_flights();
  go_on(agree());
  return engine_.now_.get();
}

/// What engine::Regroup does where it is asked: those that are not there may still run.
void EpochChange::leave_behind(const engine::Epoch& next) {
  fabric::Fabric& wire = *engine_.parts_.cpu->fabric;
  for (int peer = 0; peer < engine_.size(); ++peer) {
    if (std::binary_search(next.ranks.begin(), next.ranks.end(), peer)) continue;
    wire.forget(peer);
    engine::evict(wire.pointer(peer, engine::Channel::kControl), cpu_layout(engine_.size()),
                  next.number);
  }
}

void EpochChange::enter(std::uint64_t ticket) {
  const OnDevice here(engine_.device().index);
  const std::scoped_lock turn(engine_.turn_);  // nobody else knows this engine
  if (ticket == 0) return go_on(membership().begin_alone());
  find_ranks();
  go_on(membership(ticket).join());
}

void EpochChange::go_on(const engine::Epoch& next) {
  try {
    begin_epoch(next);
  } catch (const std::exception& thrown) {
    engine_.give_up(kRegroup, thrown);
    throw;
  }
  engine_.now_.begin(next, engine_.regroup_ ? engine_.regroup_->joined(next) : std::vector<int>());
}

/// Maps the memory of all ranks that there are, before this process asks for a place: if it cannot,
/// the others are not disturbed. That of one that is being ended cannot be mapped; then it is gone
/// before long.
void EpochChange::find_ranks() {
  constexpr std::chrono::nanoseconds kMost = std::chrono::seconds(5);
  const auto end = std::chrono::steady_clock::now() + std::min(kMost, engine_.config_.deadline);
  for (;;) {
    try {
      for (const auto& there : engine_.parts_.cpu->fabric->lobby()->visitors()) {
        if (there.rank == engine_.rank()) continue;  // waits for the same place, or has just had it
        engine_.map(there.rank, *page_in(engine_.config_, there.control, engine_.size()));
      }
      return;
    } catch (const Error&) {
      if (std::chrono::steady_clock::now() >= end) throw;
    }
    if (engine_.config_.on_wait) engine_.config_.on_wait();
    std::this_thread::sleep_for(std::chrono::milliseconds(20));
  }
}

/// No kernel of this group runs any more, and none begins.
void EpochChange::end_calls() {
  engine::Channel& channel = engine_.channel_;
  channel.stop();
  engine_.words_.raise_abort();
  engine_.await_calls(kRegroup);
  // Of replays of graphs the group knows nothing.
  if (engine_.has_graphs_) {
    await_device(engine_.device().index, engine_.config_.deadline, engine_.still_runs(kRegroup));
  }
  if (engine_.words_.failed()) (void)engine_.fatal_error();
  std::uint64_t newest =
      protocol::DeviceEpoch<>::newest_used(engine_.ended_calls(), engine_.calls_);
  for (const auto& exchange : engine_.exchanges()) {
    newest = std::max(newest, exchange->newest_used());
  }
  channel.count(newest);
}

/// Learns how the calls of the epoch have ended, all of which have.
void EpochChange::end_flights() {
  std::deque<CudaEngine::Flight> ended;  // dropped without the lock
  {
    std::scoped_lock lock(engine_.flight_mutex_);
    ended.swap(engine_.in_flight_);
    engine_.untold_.clear();
    engine_.stays_ = false;
  }
  for (const CudaEngine::Flight& flight : ended) engine_.note_end(*flight.record);
  for (const auto& weak : engine_.captured_) {  // any replay may have been the last
    if (const auto record = weak.lock()) engine_.quarantine_.add(record->granted);
  }
}

engine::Regroup& EpochChange::membership(std::uint64_t ticket) {
  if (!engine_.regroup_) {
    engine_.regroup_ = std::make_unique<engine::Regroup>(
        engine_.parts_.cpu, nullptr, engine_.channel_, engine_.config_, cpu_layout(engine_.size()),
        std::nullopt, ticket);
    engine_.regroup_->suspect_ending();
  }
  return *engine_.regroup_;
}

/// Nothing that is left in this GPU's memory, or comes late, is of the next epoch: every word says
/// its generation, and those of the next epoch are beyond all that were used. Only what this GPU
/// alone writes is made anew.
void EpochChange::begin_epoch(const engine::Epoch& next) {
  for (int peer = 0; peer < engine_.size(); ++peer) {
    if (!engine_.channel_.has(peer)) {
      engine_.write_table(peer, 0, engine_.nowhere(), 0);
    } else if (engine_.elastic()) {
      map_member(peer);
    }
  }
  if (engine_.elastic()) count_sharers();
  engine_.segments_.begin_epoch(next.number);
  engine_.held_ = engine_.lost_may_write();
  LocalWords words{};
  words.generation = words.before = next.first - 1;
  words.held = engine_.held_ ? 1 : 0;
  engine_.write_control(&words, engine_.parts_.layout.local, sizeof(words));
  EpochEnd& end = *engine_.epoch_end_;
  end.fatal = *engine_.words_.fatal;
  if (engine_.words_.failed()) end.error = engine_.fatal_error();
  end.over.store(true, std::memory_order_release);
  engine_.epoch_end_ = std::make_shared<EpochEnd>();
  engine_.fatal_.begin_epoch(engine_.words_);
  if (!engine_.held_) engine_.quarantine_.end();
  engine_.calls_ = next.first - 1;
  engine_.last_.reset();
  engine_.row_guess_ = {};
  engine_.clock_.forget();
  engine_.tuner_.forget();
  if (engine_.times_) engine_.times_->begin_epoch(next.number);
  engine_.channel_.enter_call({});
  for (const auto& exchange : engine_.exchanges()) exchange->begin_epoch(next);
}

/// The table is written in any case: in the epoch before, the seat of a rank that was mapped while
/// it waited to join was a hole. One that has ended since gets memory that nobody reads: it is
/// awaited, as everywhere, until its death is known.
void EpochChange::map_member(int peer) {
  fabric::Fabric& wire = *engine_.parts_.cpu->fabric;
  const GpuPage& page =
      *page_in(engine_.config_, wire.pointer(peer, engine::Channel::kControl), engine_.size());
  try {
    if (engine_.map(peer, page)) return engine_.write_table(peer);
  } catch (const Error&) {
    if (!wire.peer_ends(peer)) throw;
  }
  engine_.write_table(peer);
  engine_.write_table(peer, 0, engine_.nowhere(), engine_.parts_.layout.bytes);
}

/// Who takes a place may have another GPU than the former process had.
void EpochChange::count_sharers() {
  int sharers = 0;
  for (int peer = 0; peer < engine_.size(); ++peer) {
    sharers += engine_.channel_.has(peer) && engine_.gpu().wire().shares_gpu(peer) ? 1 : 0;
  }
  engine_.parts_.sharing = std::max(engine_.parts_.sharing, sharers);
}

}  // namespace ferry::cuda
