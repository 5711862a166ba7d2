#include "cuda/throughput/regroup.hpp"

#include <algorithm>
#include <chrono>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "base/log.hpp"
#include "base/text.hpp"
#include "cuda/runtime/event.hpp"
#include "cuda/throughput/create.hpp"
#include "cuda/throughput/engine.hpp"
#include "cuda/throughput/gpu_page.hpp"
#include "cuda/throughput/turn.hpp"
#include "fabric/lobby.hpp"
#include "protocol/device_epoch.hpp"

namespace ferry::cuda {

static_assert(protocol::DeviceEpochTraits::kUnderWay == kMailboxDepth);

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
/// before long. Nor can that of one that stands still, without which the others may have gone on.
void EpochChange::find_ranks() {
  constexpr std::chrono::nanoseconds kMost = std::chrono::seconds(5);
  const auto end = std::chrono::steady_clock::now() + std::min(kMost, engine_.config_.deadline);
  engine::Seating seating(*engine_.parts_.cpu->fabric, cpu_layout(engine_.size()));
  for (;;) {
    const std::optional<Error> failed = map_all(seating);
    if (!failed) return;
    if (std::chrono::steady_clock::now() >= end) throw *failed;
    if (engine_.config_.on_wait) engine_.config_.on_wait();
    std::this_thread::sleep_for(std::chrono::milliseconds(20));
  }
}

/// Why a rank of the newest epoch, if one is known, could not be mapped.
std::optional<Error> EpochChange::map_all(engine::Seating& there) {
  try {
    there.update();
  } catch (const Error& error) {
    return error;
  }
  const engine::Member::Said* newest = there.newest();
  std::optional<Error> failed;
  for (const engine::Seating::Guest& guest : there.guests()) {
    const int rank = guest.visitor.rank;
    if (rank == engine_.rank()) continue;  // waits for the same place, or has just had it
    try {
      engine_.map(rank, *page_in(engine_.config_, guest.visitor.control, engine_.size()));
    } catch (const Error& error) {
      const bool unsaid = newest->epoch == 0;
      if (unsaid || newest->view.live.has(rank)) failed = error;
    }
  }
  return failed;
}

/// No kernel of this group runs any more, and none begins.
void EpochChange::end_calls() {
  engine::Channel& channel = engine_.channel_;
  // What has ended calls, before all that the channel knows is that this rank has stopped.
  if (engine_.words_.failed()) (void)engine_.fatal_error();
  engine_.fatal_.cut_off(engine_);
  channel.stop(false);
  engine_.words_.raise_abort();
  engine_.await_calls(kRegroup);
  // Of replays of graphs the group knows nothing.
  if (engine_.has_graphs_) {
    engine_.await_device(engine_.config_.deadline, kRegroup);
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
    const auto record = weak.lock();
    if (!record) continue;
    engine_.quarantine_.add(record->granted);
    record->told_replay = record->failure->written;  // of this epoch nobody is told in the next
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
  engine_.refused_since_.clear();
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

/// Whether the memory of the peer is mapped now. Of one that is being ended it cannot be, which may
/// show later, and where that of one which runs cannot be, the log says why. Throws where the peer
/// shows what cannot be.
bool EpochChange::try_map(int peer) {
  fabric::Fabric& wire = *engine_.parts_.cpu->fabric;
  const GpuPage& page =
      *page_in(engine_.config_, wire.pointer(peer, engine::Channel::kControl), engine_.size());
  const auto end = std::chrono::steady_clock::now() + kUntilAnEndShows;
  for (;;) {
    try {
      return engine_.map(peer, page);
    } catch (const Error& error) {
      if (error.kind() != ErrorKind::system) throw;
      if (wire.peer_ends(peer)) return false;
      if (std::chrono::steady_clock::now() >= end) {
        log(LogLevel::warn, engine_.rank(), "unreachable", {{"peer", peer}, {"why", error.what()}});
        return false;
      }
    }
    if (engine_.config_.on_wait) engine_.config_.on_wait();
    std::this_thread::sleep_for(std::chrono::milliseconds(20));
  }
}

/// The table is written in any case: in the epoch before, the seat of a rank that was mapped while
/// it waited to join was a hole. One that cannot be mapped, as it has ended since or stands still,
/// gets memory that nobody reads: it is awaited, as everywhere, until its death is known or it is
/// late.
void EpochChange::map_member(int peer) {
  const bool mapped = try_map(peer);
  engine_.write_table(peer);
  if (!mapped) engine_.write_table(peer, 0, engine_.nowhere(), engine_.parts_.layout.bytes);
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
