#include "engine/proxy.hpp"

#include <stdexcept>
#include <string>
#include <utility>

#include "core/crossing_layout.hpp"
#include "engine/growth.hpp"
#include "platform/threads.hpp"

namespace ferry::engine {
namespace {

using namespace std::chrono_literals;
using Clock = std::chrono::steady_clock;
using protocol::Command;
using protocol::Status;

/// Kernels write without waking anybody, so the thread polls again and again, `meanwhile`, too.
template <class Poll>
class RingWatch {
 public:
  RingWatch(Channel& channel, const std::atomic<bool>& stopping,
            std::optional<Clock::time_point> end, const Poll& meanwhile)
      : channel_(channel), stopping_(stopping), end_(end), meanwhile_(meanwhile) {}
  std::uint64_t spin_ns() const { return 20'000; }
  std::uint64_t slice_ns() const { return 50'000; }
  bool progress() { return channel_.progress(); }
  void hand_over() { channel_.hand_over(); }
  Status check() const {
    meanwhile_();
    Status status;
    if (stopping_.load(std::memory_order_acquire) || channel_.left()) {
      status.code = Status::Code::kInterrupted;
    } else if (end_ && Clock::now() >= *end_) {
      status.code = Status::Code::kDeadline;
    }
    return status;
  }

 private:
  Channel& channel_;
  const std::atomic<bool>& stopping_;
  std::optional<Clock::time_point> end_;
  const Poll& meanwhile_;
};

}  // namespace

/// What of a call has come, and what the stream has been told of it.
class Proxy::Arrivals {
 public:
  Arrivals(Proxy& proxy, CrossingCall& call)
      : proxy_(proxy), call_(call), taken_(call.sources.size()) {}

  /// Without waiting: tells of every portion that is there, but for the last.
  void poll() {
    for (std::size_t s = 0; s < taken_.size(); ++s) {
      const CrossingFrom& from = call_.sources[s];
      while (taken_[s] < from.chunks && proxy_.channel_.take_chunk(from.peer)) ++taken_[s];
    }
    while (portion_ + 1 < call_.portions && is_here()) tell();
  }
  /// All puts are posted.
  void await_rest() {
    while (portion_ < call_.portions) {
      for (std::size_t s = 0; s < taken_.size(); ++s) {
        while (taken_[s] < needed(s)) {
          proxy_.channel_.await_chunk(call_.stage, call_.sources[s].peer);
          ++taken_[s];
        }
      }
      if (portion_ + 1 == call_.portions) {
        meet();
        call_.crossed.store(true, std::memory_order_release);
      }
      tell();
    }
  }

 private:
  std::int64_t needed(std::size_t s) const {
    return chunks_after(call_.sources[s].chunks, portion_, call_.portions);
  }
  bool is_here() const {
    for (std::size_t s = 0; s < taken_.size(); ++s) {
      if (taken_[s] < needed(s)) return false;
    }
    return true;
  }
  void meet() {
    for (const int rank : call_.together) proxy_.channel_.deliver(rank, 0);
    for (const int rank : call_.together) proxy_.channel_.await_delivered(call_.stage, rank);
  }
  void tell() {
    ++portion_;
    proxy_.arrive(call_.number - static_cast<std::uint64_t>(call_.portions - portion_));
  }

  Proxy& proxy_;
  CrossingCall& call_;
  std::vector<std::int64_t> taken_;
  int portion_ = 0;  // the next
};

Proxy::Proxy(Channel& channel, const protocol::CommandRing<>& ring, const ProxyWords& words,
             std::chrono::nanoseconds deadline, std::function<void(const Error&)> on_failure)
    : channel_(channel),
      ring_(ring),
      words_(words),
      deadline_(deadline),
      on_failure_(std::move(on_failure)),
      thread_([this] { serve(); }) {
  name_thread(thread_, "ferry-proxy");
}

Proxy::~Proxy() {
  stop();
}

void Proxy::stop() {
  {
    std::scoped_lock lock(mutex_);
    stopped_ = true;
  }
  pause();
}

void Proxy::pause() {
  {
    std::scoped_lock lock(mutex_);
    stopping_.store(true, std::memory_order_release);
  }
  changed_.notify_all();
  std::scoped_lock lock(thread_mutex_);
  if (thread_.joinable()) thread_.join();
}

void Proxy::resume() {
  std::scoped_lock lock(thread_mutex_, mutex_);
  if (stopped_) return;
  {
    std::scoped_lock words(words_mutex_);
    for (std::uint64_t* word : {words_.arrived, words_.taken}) {
      protocol::Flag{word}.store(0, protocol::order::relaxed);  // before what is launched next
    }
    gone_ = false;
  }
  failed_ = false;
  stopping_.store(false, std::memory_order_release);
  thread_ = std::thread([this] { serve(); });
  name_thread(thread_, "ferry-proxy");
}

void Proxy::serve() {
  while (true) {
    std::function<void()> task;
    {
      std::unique_lock lock(mutex_);
      changed_.wait(lock, [&] { return stopping_.load() || !tasks_.empty(); });
      if (tasks_.empty()) break;  // what was handed in is answered first, if only by "no"
      task = std::move(tasks_.front());
      tasks_.pop_front();
    }
    task();
    channel_.rest();
  }
  let_go();
}

/// Far beyond what any stream waits for.
void Proxy::let_go() {
  std::scoped_lock lock(words_mutex_);
  if (gone_) return;
  gone_ = true;
  for (std::uint64_t* word : {words_.arrived, words_.taken}) {
    const protocol::Flag flag{word};
    // relaxed: `arrived` changes under this lock; of `taken` any recent value will do.
    flag.store(flag.load(protocol::order::relaxed) + kLetGo, protocol::order::release);
    flag.wake();
  }
}

void Proxy::arrive(std::uint64_t number) {
  std::scoped_lock lock(words_mutex_);
  if (gone_) return;
  const protocol::Flag arrived{words_.arrived};
  arrived.store(number, protocol::order::release);
  arrived.wake();
}

void Proxy::submit(std::shared_ptr<CrossingCall> call) {
  {
    std::scoped_lock lock(mutex_);
    if (stopping_.load()) {  // nobody serves any more
      call->ended.store(true, std::memory_order_release);
      return;
    }
    tasks_.push_back([this, call = std::move(call)] {
      if (!failed_ && !stopping_.load()) {
        try {
          carry(*call);
        } catch (const Error& error) {
          failed_ = true;
          let_go();
          on_failure_(error);
        } catch (const std::exception& error) {
          failed_ = true;
          channel_.fail(call->stage, error.what(), ErrorKind::system);
          let_go();
          on_failure_(Error(ErrorKind::system, error.what()));
        }
      }
      call->ended.store(true, std::memory_order_release);
    });
  }
  changed_.notify_all();
}

void Proxy::run(std::function<void()> step, const OnWait& on_wait) {
  constexpr auto kPollPeriod = 20ms;
  auto state = std::make_shared<Step>();
  state->work = std::move(step);
  std::unique_lock lock(mutex_);
  if (stopping_.load()) throw Error(ErrorKind::destroyed, "the group is destroyed");
  tasks_.push_back([this, state] {
    try {
      state->work();
    } catch (...) {
      state->error = KeptError::current();
    }
    if (!failed_ && channel_.dead()) {
      failed_ = true;
      let_go();
      on_failure_(*channel_.dead());
    }
    {
      std::scoped_lock done(mutex_);
      state->done = true;
      state->work = {};
    }
    changed_.notify_all();
  });
  changed_.notify_all();
  while (!changed_.wait_for(lock, kPollPeriod, [&] { return state->done; })) {
    if (!on_wait) continue;
    lock.unlock();
    try {
      on_wait();
    } catch (const std::exception& thrown) {  // Ctrl-C; the step goes on without its caller
      channel_.fail("crossing", thrown.what());
      throw;
    }
    lock.lock();
  }
  if (state->error) state->error.raise();
}

void Proxy::await_command(CrossingCall& call, std::uint64_t number, Command& command, bool bounded,
                          Arrivals* meanwhile) {
  std::optional<Clock::time_point> end;
  if (bounded) end = Clock::now() + deadline_;
  const auto poll = [meanwhile] {
    if (meanwhile != nullptr) meanwhile->poll();
  };
  RingWatch watch(channel_, stopping_, end, poll);
  const Status status = ring_.await(number, command, watch);
  if (status.ok()) return;
  if (status.code == Status::Code::kDeadline) {
    channel_.fail(call.stage, "the GPU did not bring the rows that cross within the deadline",
                  ErrorKind::deadline);
    throw *channel_.dead();
  }
  throw Error(ErrorKind::destroyed,
              std::string(call.stage) + ": the group was destroyed during the exchange",
              {channel_.rank(), -1, call.stage, channel_.generation(), 0, 0});
}

void Proxy::put(CrossingCall& call, const Command& command) {
  const CrossingWindow& window = call.windows.at(command.window);
  if (command.kind != Command::Kind::put || command.to > window.bytes ||
      command.bytes > window.bytes - command.to) {
    throw std::runtime_error("a kernel made a command that cannot be");
  }
  const StepMessage theirs = channel_.head(window.peer);
  const fabric::Address to{theirs.staging_segment, theirs.staging_offset + window.to + command.to};
  channel_.reach().write(window.peer, {to.segment, to.offset}, call.from + command.from,
                         command.bytes, channel_.chunk_tag(window.peer));
  channel_.send_chunk(window.peer, command.bytes);
}

void Proxy::carry(CrossingCall& call) {
  Command command;
  await_command(call, call.first, command, false, nullptr);
  channel_.swap(call.stage, call.head);
  (void)channel_.all_ranks_threw();  // what a step before this call said
  try {
    check_same_call(channel_, call.stage, call.head.call);
    if (call.agree) call.agree(channel_);
  } catch (const Error& error) {
    if (!channel_.all_ranks_threw()) throw;
    call.refused.emplace(error.kind(), error.what(),
                         error.context());  // its own text, as KeptError
  }
  if (!call.refused) {
    for (const CrossingWindow& window : call.windows) {
      const StepMessage theirs = channel_.head(window.peer);
      channel_.checked(call.stage, window.peer, {theirs.staging_segment, theirs.staging_offset},
                       window.to + window.bytes);
    }
  }
  Arrivals arrivals(*this, call);
  for (std::uint64_t i = 0; i < call.puts; ++i) {
    await_command(call, call.first + 1 + i, command, true, call.refused ? nullptr : &arrivals);
    if (call.refused) continue;
    put(call, command);
    arrivals.poll();
  }
  if (!call.refused) {
    arrivals.await_rest();
    return;
  }
  call.crossed.store(true, std::memory_order_release);
  arrive(call.number);
}

}  // namespace ferry::engine
