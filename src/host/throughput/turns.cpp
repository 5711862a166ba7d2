// The order of calls: one after another, in the order in which they were made, whatever thread or
// stream each runs on.
#include <chrono>
#include <exception>
#include <mutex>
#include <string>
#include <utility>

#include "base/log.hpp"
#include "base/process_limits.hpp"
#include "host/throughput/engine.hpp"

namespace ferry::host {

namespace {
using Clock = std::chrono::steady_clock;
constexpr auto kTurnPollPeriod = std::chrono::milliseconds(40);  // of the caller's wishes
}  // namespace

void HostEngine::check_group(const char* call, Asks asks) const {
  if (asks == Asks::no_failure) {
    channel_.check_usable(call);
  } else if (channel_.left()) {
    throw Error(ErrorKind::destroyed, std::string(call) + ": the group is destroyed");
  }
}

void HostEngine::check_waiting(const char* call, Asks asks) {
  check_group(call, asks);
  if (!config_.on_wait) return;
  try {
    config_.on_wait();
  } catch (const std::exception& thrown) {
    if (asks == Asks::existence) throw;
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
  Turn(HostEngine& engine, std::uint64_t ticket, const char* call, Asks asks) : engine_(engine) {
    std::unique_lock lock(engine_.turn_mutex_);
    std::uint64_t served = engine_.serving_;
    auto idle_since = Clock::now();
    while (engine_.serving_ != ticket) {
      engine_.turn_changed_.wait_for(lock, kTurnPollPeriod);
      if (engine_.serving_ == ticket) break;
      // A call that runs has deadlines of its own; what must not last is that none runs.
      if (engine_.running_ || engine_.serving_ != served) idle_since = Clock::now();
      served = engine_.serving_;
      lock.unlock();
      try {
        engine_.check_waiting(call, asks);
        if (Clock::now() - idle_since >= engine_.config_.deadline) blocked(call, asks);
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
  [[noreturn]] void blocked(const char* call, Asks asks) {
    const std::string text =
        "rank " + std::to_string(engine_.rank()) + ": " + call +
        ": an earlier call of this group, submitted to a stream, did not begin within the "
        "deadline; is other work blocking that stream?";
    if (asks == Asks::no_failure) engine_.channel_.fail(call, text, ErrorKind::deadline);
    throw Error(ErrorKind::deadline, text,
                {engine_.rank(), engine_.rank(), call, engine_.channel_.generation(), 0, 0});
  }

  HostEngine& engine_;
};

HostEngine::Call::Call(HostEngine& engine, const char* call, Asks asks) : engine_(engine) {
  engine_.check_group(call, asks);
  std::unique_lock lock(engine_.turn_mutex_);
  // The thread inside waits for nothing without a deadline.
  while (engine_.calling_) {
    engine_.turn_changed_.wait_for(lock, kTurnPollPeriod);
    if (!engine_.calling_) break;
    lock.unlock();
    engine_.check_waiting(call, asks);
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

Event HostEngine::enter(const char* call, Stream* stream, std::function<void()> work, Call* inside,
                        const std::function<void()>& entered, Asks asks) {
  check_group(call, asks);
  std::unique_lock lock(turn_mutex_);
  auto run = [self = shared_from_this(), call, asks, ticket = next_ticket_,
              work = std::move(work)] {
    const Turn turn(*self, ticket, call, asks);
    self->check_group(call, asks);
    self->run_work(call, work, asks);
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

void HostEngine::run_work(const char* call, const std::function<void()>& work, Asks asks) {
  const CallKind kind = call_named(call);
  const auto start = std::chrono::steady_clock::now();
  const auto count = [&](bool threw) {
    const auto time = std::chrono::steady_clock::now() - start;
    exchange_ns_.fetch_add(static_cast<std::uint64_t>(time.count()), std::memory_order_relaxed);
    channel_.record().called(kind, call, threw, start, time, channel_.generation());
    if (logs(LogLevel::debug)) {
      log(LogLevel::debug, rank(), "call",
          {{"call", call},
           {"generation", channel_.generation()},
           {"seconds", log_seconds(time.count())},
           {"threw", threw ? "true" : "false"}});
    }
  };
  const auto failed = [&](const char* reason, ErrorKind why) {
    count(true);
    if (channel_.all_ranks_threw() || asks == Asks::existence) {
      channel_.enter_call({});
    } else {
      channel_.fail(call, reason, why);
    }
  };
  channel_.all_ranks_threw();
  channel_.enter_call({kind, 0});
  try {
    in_words(rank(), call, work);
    // What peers had sent before they went on without this rank may have sufficed for the call; but
    // they may have changed rows that it read in place.
    if (asks == Asks::no_failure) channel_.check_evicted(call);
    channel_.enter_call({});
  } catch (const Error& error) {
    failed(error.what(), error.kind());
    throw;
  } catch (const std::exception& error) {
    failed(error.what(), ErrorKind::system);
    throw;
  } catch (...) {
    failed("an exception of unknown type", ErrorKind::system);
    throw;
  }
  count(false);
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

}  // namespace ferry::host
