#include "cuda/domains/regroup.hpp"

#include <algorithm>
#include <chrono>
#include <cstring>
#include <exception>
#include <string>
#include <utility>
#include <vector>

#include "cuda/domains/engine.hpp"
#include "cuda/runtime/event.hpp"
#include "cuda/throughput/regroup.hpp"
#include "cuda/throughput/turn.hpp"
#include "engine/membership/arbiter_creation.hpp"
#include "platform/death_watch.hpp"

namespace ferry::cuda {

using std::to_string;

ferry::GroupView DomainEpochChange::run() {
  engine::Regroup::check_possible(kRegroup, *engine_.parts_.memory, engine_.carrier_ != nullptr,
                                  engine_.domains());
  const OnDevice here(engine_.device().index);
  const auto turn = take_turn();
  try {
    engine_.channel_.stop(is_done(engine_.last_) && is_done(engine_.buffer_used_));
    DeathWatch::tell();       // a wait of the proxy looks up at once
    engine_.proxy_->pause();  // or kernels that wait for it would not end
    engine_.inside().regroup_inside([this](engine::Generation used) { return agree(used); });
  } catch (const Error& error) {
    fail(error);
    throw inside_speaks_ ? engine_.outside(error) : error;
  } catch (const std::exception& thrown) {
    fail(Error(ErrorKind::system, thrown.what()));
    throw;
  }
  engine_.now_.begin(*next_, {});
  return engine_.now_.get();
}

/// If others have gone on with this rank, they learn that it has not.
void DomainEpochChange::fail(const Error& error) {
  if (next_) engine_.fail(kRegroup, error);
}

std::unique_lock<std::timed_mutex> DomainEpochChange::take_turn() {
  auto turn = cuda::take_turn(engine_.turn_, engine_.config_.on_wait, [this] {
    if (engine_.destroyed()) engine_.channel_.check_usable(kRegroup);
  });
  if (engine_.exchanges_ == 0) return turn;
  throw Error(ErrorKind::unsupported,
              "regroup: this group, of several domains with backend cuda, has had latency "
              "exchanges, whose memory belongs to its first epoch; make them in another group",
              {engine_.rank(), -1, kRegroup, 0, 0, 0});
}

/// No kernel of the engine inside runs any more.
engine::Epoch DomainEpochChange::agree(engine::Generation used) {
  inside_speaks_ = false;
  await_streams();
  engine_.channel_.count(std::max(engine_.channel_.generation(), used));
  next_ = membership().run(engine_.now_.step());
  begin_epoch();
  inside_speaks_ = true;
  return within();
}

/// Nothing that this group has launched outside of the engine inside runs any more.
void DomainEpochChange::await_streams() {
  const int rank = engine_.rank();
  const GpuEvent beside = engine_.inside().gpu().events()->take();
  check(cudaEventRecord(beside.get(), engine_.beside_), "cudaEventRecord");
  try {
    poll([&] { return is_done(beside) && is_done(engine_.last_) && is_done(engine_.buffer_used_); },
         engine_.config_.deadline, engine_.config_.on_wait);
  } catch (const Error& error) {
    if (error.kind() != ErrorKind::deadline) throw;
    throw Error(ErrorKind::deadline,
                "rank " + to_string(rank) +
                    ": regroup: work on cuda:" + to_string(engine_.device().index) +
                    " did not end within the deadline, so its calls may still run; call regroup "
                    "again",
                {rank, rank, kRegroup, engine_.channel_.generation(), 0, 0});
  }
}

engine::Regroup& DomainEpochChange::membership() {
  if (!engine_.regroup_) {
    engine_.regroup_ = std::make_unique<engine::Regroup>(
        engine_.parts_.memory, engine_.carrier_, engine_.channel_, engine_.config_,
        engine_.parts_.layout, engine::asked(engine_.arbiter_));
    engine_.regroup_->suspect_ending();
  }
  return *engine_.regroup_;
}

/// What this rank counts and grants begins anew. Ranks may have failed before and after they
/// counted.
void DomainEpochChange::begin_epoch() {
  const Domains& all = engine_.parts_.domains;
  const auto lost = [&](int peer) {
    return !all.together(peer, engine_.rank()) &&
           !std::binary_search(next_->ranks.begin(), next_->ranks.end(), peer);
  };
  const std::vector<int> before = engine_.now_.get().ranks;
  engine_.staging_.begin_epoch(std::any_of(before.begin(), before.end(), lost));
  engine_.topology_ = all.among(next_->ranks);
  std::memset(engine_.ring_memory_.get(), 0, kRingSlots * sizeof(protocol::CommandSlot));
  engine_.portions_ = engine_.commands_ = engine_.plans_ = 0;
  engine_.proxy_->resume();
}

/// The same epoch as the engine inside counts ranks.
engine::Epoch DomainEpochChange::within() const {
  const Domains& all = engine_.parts_.domains;
  engine::Epoch epoch = *next_;
  epoch.ranks.clear();
  for (const int peer : next_->ranks) {
    if (all.together(peer, engine_.rank())) epoch.ranks.push_back(all.index(peer));
  }
  return epoch;
}

}  // namespace ferry::cuda
