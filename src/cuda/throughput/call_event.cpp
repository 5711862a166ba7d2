#include "cuda/throughput/call_event.hpp"

#include <cstdint>
#include <utility>

#include "cuda/throughput/engine.hpp"

namespace ferry::cuda {

namespace {

[[noreturn]] void throw_gone() {
  throw Error(ErrorKind::destroyed,
              "event: the call did not end well, and its group, which knows why, is gone");
}

}  // namespace

CallEvent::CallEvent(std::weak_ptr<CudaEngine> engine, std::shared_ptr<CallRecord> record,
                     GroupWords words, int device)
    : engine_(std::move(engine)),
      record_(std::move(record)),
      words_(std::move(words)),
      device_(device) {}

bool CallEvent::ready() {
  const OnDevice here(device_);
  return record_->has_ended();
}

void CallEvent::wait(std::chrono::nanoseconds deadline, const OnWait& on_wait) {
  const OnDevice here(device_);
  poll([&] { return record_->has_ended(); }, deadline, on_wait);
  if (record_->on_wait) record_->on_wait();
  if (record_->ended_well.load(std::memory_order_acquire)) return;
  if (const auto engine = engine_.lock()) {
    try {
      check_ended(*engine, *record_);
    } catch (const Error& error) {
      if (!record_->told_outside) throw;
      throw record_->told_outside(error);
    }
  } else if (record_->was_lost(words_) || record_->refused()) {
    throw_gone();
  }
}

CountsEvent::CountsEvent(std::weak_ptr<CudaEngine> engine, std::weak_ptr<CudaPlan> plan,
                         GroupWords words, int device)
    : engine_(std::move(engine)),
      plan_(std::move(plan)),
      words_(std::move(words)),
      device_(device) {}

bool CountsEvent::ready() {
  const auto plan = plan_.lock();
  return !plan || plan->captured || plan->told() || words_.failed() || plan->made->is_over();
}

void CountsEvent::wait(std::chrono::nanoseconds deadline, const OnWait& on_wait) {
  const auto plan = plan_.lock();
  if (!plan) return;
  if (plan->captured) {
    throw Error(ErrorKind::unsupported,
                "plan: it was captured into a CUDA graph, so the CPU does not know its counts; "
                "give max_recv_rows");
  }
  const OnDevice here(device_);
  constexpr std::uint32_t kPollsPerQuery = 64;  // which costs the driver's lock
  std::uint32_t polls = 0;
  poll(
      [&] {
        return plan->told() || words_.failed() || plan->made->is_over() ||
               (++polls % kPollsPerQuery == 0 && plan->made->has_ended());
      },
      deadline, on_wait);
  if (plan->counts_known()) return;
  // Until then it does not say whether it had ended before the group failed. A kernel that was
  // stopped tells nothing, so there must be an event.
  (void)plan->made->end(*plan->events);
  poll([&] { return plan->made->has_ended(); }, deadline, on_wait);
  if (const auto engine = engine_.lock()) {
    check_ended(*engine, *plan->made);
    throw refusal(*engine, *plan->made, plan->counts->failure);
  }
  throw_gone();
}

}  // namespace ferry::cuda
