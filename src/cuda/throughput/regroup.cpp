// A change of the membership, in place (engine/regroup.hpp): the calls of the epoch end, the ranks
// that are left agree, then this GPU's words are those of the next epoch. Its memory, and graphs
// that were captured, stay.
#include <chrono>
#include <cstring>
#include <string>
#include <thread>
#include <utility>

#include "base/text.hpp"
#include "cuda/kernels/base/barrier.hpp"
#include "cuda/runtime/event.hpp"
#include "cuda/throughput/engine.hpp"
#include "engine/aside.hpp"
#include "protocol/device_epoch.hpp"

namespace ferry::cuda {

using namespace std::chrono_literals;

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

ferry::GroupView CudaEngine::regroup() {
  check_may_regroup();
  const OnDevice here(device().index);
  const auto turn = take_turn("regroup");
  end_calls();
  const std::scoped_lock paused(watching_);
  end_flights();
  const engine::Epoch next = membership().run(now_.step());
  try {
    begin_epoch(next);
  } catch (const std::exception& thrown) {
    give_up("regroup", thrown);
    throw;
  }
  now_.begin(next, regroup_->joined(next));
  return now_.get();
}

void CudaEngine::check_may_regroup() const {
  const auto refuse = [this](const std::string& why) {
    throw Error(ErrorKind::unsupported, "regroup: " + why, {rank(), -1, "regroup", 0, 0, 0});
  };
  if (!engine::Regroup::possible(*parts_.cpu, false)) {
    refuse("at most " + std::to_string(engine::Regroup::Traits::kSeats) +
           " ranks on one host can; this group has " + std::to_string(size()) + " over " +
           fabric_name() + "; make a new group");
  }
  std::scoped_lock lock(latency_mutex_);
  if (!latency_segments_.empty()) {
    refuse(
        "this group, with backend cuda, has had latency exchanges, whose memory belongs to its "
        "first epoch; make them in another group");
  }
}

std::unique_lock<std::timed_mutex> CudaEngine::take_turn(const char* call) {
  constexpr auto kPollPeriod = 40ms;
  std::unique_lock turn(turn_, std::defer_lock);
  while (!turn.try_lock_for(kPollPeriod)) {
    if (channel_.left()) channel_.check_usable(call);
    if (config_.on_wait) config_.on_wait();
  }
  return turn;
}

/// No kernel of this group runs any more, and none begins.
void CudaEngine::end_calls() {
  if (channel_.left()) channel_.check_usable("regroup");
  channel_.stop();
  words_.raise_abort();
  const std::string late = "rank " + std::to_string(rank()) +
                           ": regroup: work on cuda:" + std::to_string(device().index) +
                           " did not end within the deadline, so its calls may still run; call "
                           "regroup again";
  if (!drain(config_.deadline)) {
    throw Error(ErrorKind::deadline, late,
                {rank(), rank(), "regroup", channel_.generation(), 0, 0});
  }
  // Of replays of graphs the group knows nothing.
  if (has_graphs_) await_device(device().index, config_.deadline, late);
  if (words_.failed()) (void)fatal_error();
  channel_.count(protocol::DeviceEpoch<>::newest_used(ended_calls(), calls_));
}

/// Learns how the calls of the epoch have ended, all of which have.
void CudaEngine::end_flights() {
  std::deque<Flight> ended;  // dropped without the lock
  {
    std::scoped_lock lock(flight_mutex_);
    ended.swap(in_flight_);
    untold_.clear();
    stays_ = false;
  }
  for (const Flight& flight : ended) note_end(*flight.record);
  for (const auto& weak : captured_) {  // any replay may have been the last
    if (const auto record = weak.lock()) quarantine_.add(record->granted);
  }
}

engine::Regroup& CudaEngine::membership() {
  if (!regroup_) {
    regroup_ = std::make_unique<engine::Regroup>(parts_.cpu, nullptr, channel_, config_,
                                                 cpu_layout(size()));
    regroup_->suspect_ending();
  }
  return *regroup_;
}

/// Nothing that is left in this GPU's memory, or comes late, is of the next epoch: every word says
/// its generation, and those of the next epoch are beyond all that were used. Only what this GPU
/// alone writes is made anew.
void CudaEngine::begin_epoch(const engine::Epoch& next) {
  for (int peer = 0; peer < size(); ++peer) {
    if (!channel_.has(peer)) write_table(peer, 0, nowhere(), 0);
  }
  held_ = regroup_->lost_may_write();
  LocalWords words{};
  words.generation = words.before = next.first - 1;
  words.held = held_ ? 1 : 0;
  write_control(&words, parts_.layout.local, sizeof(words));
  epoch_end_->fatal = *words_.fatal;
  if (words_.failed()) epoch_end_->error = fatal_error();
  epoch_end_->over.store(true, std::memory_order_release);
  epoch_end_ = std::make_shared<EpochEnd>();
  fatal_.begin_epoch(words_);
  if (!held_) quarantine_.end();
  calls_ = next.first - 1;
  last_.reset();
  row_guess_ = {};
  channel_.enter_call({});
}

/// Asked by the monitor: whether the processes of the lost ranks have ended by now.
void CudaEngine::free_held() {
  // After a further failure the next epoch says what is held.
  if (!held_ || words_.failed() || channel_.dead() || regroup_->lost_may_write()) return;
  const std::uint64_t none = 0;
  write_control(&none, parts_.layout.local + offsetof(LocalWords, held), sizeof(none));
  held_ = false;
  quarantine_.end();
}

/// A piece of registered memory to which no lost rank writes; nothing: there is none.
Held CudaEngine::take_unwritten(std::size_t bytes, const User& user, Pieces pieces) {
  constexpr auto kMost = 1s;  // after so long the lost process is no killed one: it may run on
  const auto until = std::chrono::steady_clock::now() + kMost;
  for (;;) {
    Held held =
        pieces == Pieces::idle ? gpu().take_idle(bytes, user) : gpu().take_registered(bytes, user);
    if (held && quarantine_.keeps(held)) {
      // It goes back by another thread, when the stream may be gone.
      gpu().settle(held, gpu().events()->record(gpu().own().stream));
      continue;
    }
    if (held || quarantine_.empty() || std::chrono::steady_clock::now() >= until) return held;
    std::this_thread::sleep_for(1ms);
    if (config_.on_wait) config_.on_wait();
  }
}

bool CudaEngine::commit(std::uint64_t step) {
  const std::optional<Error> refusal = now_.refusal_of(step);
  Launch launch(*this, "commit", nullptr);
  BarrierParameters parameters;
  parameters.group = view_;
  parameters.call.kind = CallKind::commit;
  parameters.call.commit.step = step;
  parameters.failure = launch.record()->failure;
  launch.enter(parameters.call);
  launch.run(launch_barrier(parameters, launch.stream()), "launch_barrier");
  try {
    finish("commit", launch.finish());
  } catch (const Error& error) {
    if (refusal && error.kind() == ErrorKind::mismatch) throw *refusal;
    throw;
  }
  if (refusal) throw *refusal;  // on all ranks alike: they have the same step
  now_.commit(step);
  return false;  // no process can take the place of a lost rank
}

}  // namespace ferry::cuda
