// Events and streams forward to whatever runs the work.
#include "ferry/stream.hpp"

#include <utility>

#include "core/stream_state.hpp"

namespace ferry {

bool Event::ready() const {
  return !state_ || state_->ready();
}

void Event::wait(std::chrono::nanoseconds deadline, const OnWait& on_wait) const {
  if (state_) state_->wait(deadline, on_wait);
}

Event Stream::submit(std::function<void()> work) {
  return queue_->submit(std::move(work));
}

Event Stream::record() {
  return queue_->record();
}

void Stream::wait(const Event& event) {
  queue_->wait(event);
}

void Stream::synchronize() {
  queue_->synchronize();
}

Device Stream::device() const {
  return queue_->device();
}

void* Stream::native() const {
  return queue_->native();
}

}  // namespace ferry
