#include "cuda/throughput/call.hpp"

#include <chrono>
#include <cstddef>
#include <utility>

#include "cuda/throughput/call_event.hpp"
#include "cuda/throughput/engine.hpp"
#include "cuda/throughput/turn.hpp"

namespace ferry::cuda {

void CallRecord::ends_at(GpuEvent marker) {
  std::scoped_lock lock(mutex_);
  if (!done_) done_ = std::move(marker);
}

void CallRecord::ends_untold(const std::uint64_t* word, cudaStream_t stream) {
  std::scoped_lock lock(mutex_);
  word_ = word;
  stream_ = stream;
}

bool CallRecord::has_told() const {
  if (word_ == nullptr) return false;
  auto* word = const_cast<std::uint64_t*>(word_);
  if (!told_) told_ = std::atomic_ref(*word).load(std::memory_order_acquire) != 0;
  return told_;
}

bool CallRecord::has_ended() const {
  std::scoped_lock lock(mutex_);
  return has_told() || (done_ && is_done(done_));
}

GpuEvent CallRecord::end(EventPool& events) {
  cudaStream_t stream = nullptr;
  {
    std::scoped_lock lock(mutex_);
    if (word_ == nullptr || done_) return done_;
    if (has_told()) return nullptr;  // its stream may be gone
    stream = stream_;
  }
  // Without the lock: where a stream's queue is full this waits, and the monitor, which ends such
  // waits, asks this record.
  const OnDevice here(events.device());
  if (!is_capturing(stream)) ends_at(events.record(stream));
  return marked();
}

Launch::Launch(CudaEngine& engine, const char* call, const Stream* stream, int transfer_with)
    : engine_(engine), record_(std::make_shared<CallRecord>()), blocking_(stream == nullptr) {
  record_->call = call;
  record_->transfer_with = transfer_with;
  engine_.check_usable(call);
  turn_ = take_turn(engine_.turn_, engine_.config_.on_wait, [&] { engine_.check_usable(call); });
  here_.emplace(engine_.device().index);
  stream_ = blocking_ ? engine_.gpu().own().stream : static_cast<cudaStream_t>(stream->native());
  if (!blocking_) capture_ = capture_of(stream_);
  // A stream that is captured cannot be asked, and keeps its handle for as long as that matters.
  stream_id_ = capture_.active ? reinterpret_cast<std::uintptr_t>(stream_) : id_of(stream_);
  engine_.throw_untold(call);
  record_->slot = engine_.failures_->take();
  record_->failure = &record_->pinned().failure;
  record_->epoch = engine_.epoch_end_;
  if (!is_beside()) order_after_last();
  if (!capture_.active) engine_.take_times();
}

Launch::Launch(Launch& before, const char* call)
    : engine_(before.engine_),
      before_(&before),
      turn_(std::move(before.turn_)),
      record_(std::make_shared<CallRecord>()),
      stream_(before.stream_),
      stream_id_(before.stream_id_),
      blocking_(before.blocking_),
      capture_(before.capture_) {
  record_->call = call;
  record_->slot = engine_.failures_->take();
  record_->failure = &record_->pinned().failure;
  record_->epoch = engine_.epoch_end_;
}

/// If it is not another call's by now.
void Launch::end_turn() {
  if (turn_.owns_lock()) turn_.unlock();
}

void Launch::order_after_last() {
  if (capture_.active) {
    // A graph knows nothing of what ran before it: whoever launches it orders that.
    const bool same = engine_.captured_last_ && engine_.capture_id_ == capture_.id;
    if (same && engine_.captured_stream_ != stream_id_) {
      check(cudaStreamWaitEvent(stream_, engine_.captured_last_.get(), 0), "cudaStreamWaitEvent");
    }
  } else if (engine_.last_ && engine_.last_stream_ != stream_id_) {
    CallRecord& last = *engine_.last_;
    if (const GpuEvent end = last.end(*engine_.gpu().events())) {
      check(cudaStreamWaitEvent(stream_, end.get(), 0), "cudaStreamWaitEvent");
    } else {
      const auto ended = [&] { return last.has_ended() || engine_.words_.failed(); };
      poll(ended, kUntilItEnds, engine_.config_.on_wait);
    }
  }
}

User Launch::user() const {
  return {stream_, stream_id_, capture_.active, &engine_.config_.on_wait, name(), engine_.rank()};
}

std::byte* Launch::temporary(Held held) {
  std::byte* data = held.data();
  temporaries_.push_back(std::move(held));
  return data;
}

void Launch::outlives(const std::shared_ptr<void>& owner) {
  if (capture_.active) graph_.push_back(owner);
}

void Launch::use(const void* data, const std::shared_ptr<void>& owner) {
  if (data == nullptr) return;
  if (capture_.active) {
    // Not by their owner: the graph may go after the streams that were to be asked then.
    std::shared_ptr<void> held = engine_.gpu().hold(data);
    if (held || owner) graph_.push_back(held ? std::move(held) : owner);
  } else {
    engine_.gpu().record_use(data, stream_id_, record_);
  }
}

void Launch::grant(std::initializer_list<Held> pieces) {
  for (const Held& held : pieces) {
    if (held) record_->granted.push_back(held.region);
  }
}

bool Launch::follows_in_graph(const std::shared_ptr<CallRecord>& before) const {
  return capture_.active && engine_.captured_last_ && engine_.capture_id_ == capture_.id &&
         !engine_.captured_.empty() && engine_.captured_.back().lock() == before;
}

/// A captured call runs when its graph does, of which the CPU knows nothing; and a process that
/// joins captures its own when the calls of the others have other numbers.
std::uint64_t Launch::next_number() {
  if (!capture_.active) return ++engine_.calls_;
  if (engine_.counted_capture_ != capture_.id) engine_.captured_calls_ = 0;
  engine_.counted_capture_ = capture_.id;
  return kInGraph | ++engine_.captured_calls_;
}

std::uint64_t Launch::enter(const CallSignature& signature) {
  record_->signature = signature;
  entered_ = true;
  number_ = next_number();
  if (capture_.active) return number_;
  engine_.channel_.count(number_);
  // As long as no graph runs calls, each call has one generation.
  if (!engine_.has_graphs_) record_->generation = number_;
  return number_;
}

void Launch::enter_apart(const CallSignature& signature) {
  record_->signature = signature;
  entered_ = true;
  apart_ = true;
}

/// Beside calls of graphs the CPU cannot number the generations, so the GPU says how a call ended.
void Launch::watch_end() {
  if (capture_.active || apart_ || record_->generation != 0) return;
  std::uint64_t* word = &record_->pinned().dead_then;
  const DeviceControlLayout& layout = engine_.parts_.layout;
  run(cudaMemcpyAsync(word,
                      engine_.parts_.control.data + layout.local + offsetof(LocalWords, failed),
                      sizeof(*word), cudaMemcpyDeviceToHost, stream_),
      "cudaMemcpyAsync");
  record_->dead_then = word;
}

void Launch::begin_timing() {
  if (timing_ && !timing_->begin) timing_->begin = engine_.clock_.mark(stream_);
}

void Launch::end_timing() {
  if (timing_ && timing_->begin && !timing_->end) timing_->end = engine_.clock_.mark(stream_);
}

void Launch::capture_end(GpuEvent event) {
  engine_.has_graphs_ = true;
  engine_.captured_last_ = std::move(event);
  engine_.captured_stream_ = stream_id_;
  engine_.capture_id_ = capture_.id;
  for (const Held& held : temporaries_) graph_.push_back(held.owner);
  graph_.insert(graph_.end(), kept_.begin(), kept_.end());
  graph_.push_back(record_);
  graph_.push_back(engine_.words_.slot);
  engine_.captured_.push_back(record_);
  keep_with_graph(capture_.graph, std::move(graph_));
}

void Launch::run(cudaError_t result, const char* kernel) {
  if (result == cudaSuccess) return;
  try {
    check(result, kernel);
  } catch (const Error& error) {
    // The peers are in this call, or will be.
    engine_.channel_.fail(name(), error.what(), error.kind());
    engine_.words_.raise_abort();
    throw;
  }
}

bool Launch::ends_untold() const {
  return told_ != nullptr && !capture_.active && !blocking_ && temporaries_.empty() &&
         record_->generation != 0;
}

GpuEvent Launch::mark_end() {
  GpuEvent event = engine_.gpu().events()->take();
  run(cudaEventRecord(event.get(), stream_), "cudaEventRecord");
  record_->ends_at(event);
  // Of a call before it that has no event of its own.
  const bool same = !capture_.active && engine_.last_stream_ == stream_id_;
  if (engine_.last_ && same) engine_.last_->ends_at(event);
  return event;
}

Event Launch::finish() {
  GpuEvent event;
  end_timing();
  if (ends_untold()) {
    record_->ends_untold(told_, stream_);
  } else {
    watch_end();
    event = mark_end();
  }
  ended_ = true;
  if (capture_.active) {
    capture_end(std::move(event));
    end_turn();
    return {};
  }
  if (!is_beside()) {
    engine_.last_ = record_;
    engine_.last_stream_ = stream_id_;
  }
  if (timing_ && timing_->end) {
    timing_->record = record_;
    engine_.clock_.add(std::move(*timing_));
    timing_.reset();
  }
  auto state = std::make_shared<CallEvent>(engine_.weak_from_this(), record_, engine_.words_,
                                           engine_.device().index);
  if (record_->asker.expired()) record_->asker = state;  // a plan's is the plan
  for (const Held& held : temporaries_) {
    if (held.owner.use_count() == 1) engine_.gpu().settle(held, event);  // else a result's
  }
  temporaries_.clear();
  {
    std::scoped_lock lock(engine_.flight_mutex_);
    engine_.channel_.enter_call({call_named(name()), 0});
    engine_.stays_ = false;
    engine_.in_flight_.push_back({record_, std::move(kept_)});
  }
  end_turn();
  return Event(std::move(state));
}

Launch::~Launch() {
  if (timing_) engine_.tuner_.lost(timing_->number);
  give_up_end();
  if (before_ != nullptr && turn_.owns_lock()) before_->turn_ = std::move(turn_);
}

void Launch::give_up_end() {
  if (ended_) return;
  try {
    if (!entered_) {  // what used memory so far ends here
      if (!capture_.active && record_.use_count() > 1) {
        record_->ends_at(engine_.gpu().events()->record(stream_));
      }
      return;
    }
    // Something failed after the first kernel: later calls still come after it, and its pinned
    // memory stays until it has ended.
    if (capture_.active) {
      capture_end(nullptr);
      return;
    }
    const GpuEvent event = engine_.gpu().events()->record(stream_);
    if (!event) return;  // the GPU is going away
    record_->ends_at(event);
    if (!is_beside()) {
      engine_.last_ = record_;
      engine_.last_stream_ = stream_id_;
    }
    std::scoped_lock lock(engine_.flight_mutex_);
    engine_.in_flight_.push_back({record_, std::move(kept_)});
  } catch (...) {  // no memory is left
  }
}

}  // namespace ferry::cuda
