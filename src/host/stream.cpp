// Streams of the host: a queue and one worker thread.
#include "ferry/stream.hpp"

#include <algorithm>
#include <condition_variable>
#include <deque>
#include <exception>
#include <mutex>
#include <thread>
#include <utility>

#include "ferry/error.hpp"

namespace ferry {

struct Event::State {
  std::mutex mutex;
  std::condition_variable changed;
  bool done = false;
  std::exception_ptr error;

  void complete(std::exception_ptr thrown) {
    {
      std::scoped_lock lock(mutex);
      done = true;
      error = std::move(thrown);
    }
    changed.notify_all();
  }
};

bool Event::ready() const {
  if (!state_) return true;
  std::scoped_lock lock(state_->mutex);
  return state_->done;
}

void Event::wait(std::chrono::nanoseconds deadline, const OnWait& on_wait) const {
  if (!state_) return;
  using Clock = std::chrono::steady_clock;
  const auto start = Clock::now();
  std::unique_lock lock(state_->mutex);
  while (!state_->done) {
    const auto left = deadline - (Clock::now() - start);
    if (left <= std::chrono::nanoseconds(0)) {
      throw Error(ErrorKind::deadline, "event: work on the stream did not end within " +
                                           std::to_string(deadline.count() / 1000000) + " ms");
    }
    state_->changed.wait_for(
        lock, std::min<std::chrono::nanoseconds>(left, std::chrono::milliseconds(40)));
    if (!state_->done && on_wait) {
      lock.unlock();
      on_wait();
      lock.lock();
    }
  }
  if (state_->error) std::rethrow_exception(state_->error);
}

struct Stream::Worker {
  struct Item {
    std::function<void()> work;
    std::shared_ptr<Event::State> event;
  };
  // Shared with the thread, so that dropping the last stream from its own worker is safe.
  struct Queue {
    std::mutex mutex;
    std::condition_variable changed;
    std::deque<Item> items;
    bool stopping = false;
    std::exception_ptr first_error;
  };
  std::shared_ptr<Queue> queue = std::make_shared<Queue>();
  std::thread thread{[shared = queue] { run(*shared); }};

  ~Worker() {
    {
      std::scoped_lock lock(queue->mutex);
      queue->stopping = true;
    }
    queue->changed.notify_all();
    if (thread.get_id() == std::this_thread::get_id()) {
      thread.detach();
    } else {
      thread.join();
    }
  }

  Event push(std::function<void()> work) {
    auto event = std::make_shared<Event::State>();
    {
      std::scoped_lock lock(queue->mutex);
      queue->items.push_back({std::move(work), event});
    }
    queue->changed.notify_all();
    return Event(event);
  }

  static void run(Queue& queue) {
    std::unique_lock lock(queue.mutex);
    while (true) {
      queue.changed.wait(lock, [&] { return queue.stopping || !queue.items.empty(); });
      if (queue.items.empty()) return;  // stopping, and drained
      Item item = std::move(queue.items.front());
      queue.items.pop_front();
      lock.unlock();
      std::exception_ptr error;
      try {
        if (item.work) item.work();
      } catch (...) {
        error = std::current_exception();
      }
      item.work = nullptr;  // what the work held is dropped before the event says so
      item.event->complete(error);
      lock.lock();
      if (error && !queue.first_error) queue.first_error = error;
    }
  }
};

Stream::Stream() : worker_(std::make_shared<Worker>()) {}

Event Stream::submit(std::function<void()> work) {
  return worker_->push(std::move(work));
}

Event Stream::record() {
  return worker_->push({});
}

void Stream::wait(const Event& event) {
  // An event whose work failed does not stop this stream: whoever needs the result sees the error.
  worker_->push([event] {
    try {
      event.wait();
    } catch (...) {
    }
  });
}

void Stream::synchronize() {
  record().wait();
  std::scoped_lock lock(worker_->queue->mutex);
  if (auto error = std::exchange(worker_->queue->first_error, nullptr)) {
    std::rethrow_exception(error);
  }
}

}  // namespace ferry
