// Streams of the host: a queue and one worker thread.
#include "ferry/stream.hpp"

#include <algorithm>
#include <condition_variable>
#include <deque>
#include <mutex>
#include <system_error>
#include <thread>
#include <utility>
#include <vector>

#include "base/kept_error.hpp"
#include "base/process_limits.hpp"
#include "core/stream_state.hpp"
#include "ferry/error.hpp"

namespace ferry {

namespace {

struct WorkEvent final : Event::State {
  std::mutex mutex;
  std::condition_variable changed;
  bool done = false;
  KeptError error;

  void complete(KeptError thrown) {
    {
      std::scoped_lock lock(mutex);
      done = true;
      error = std::move(thrown);
    }
    changed.notify_all();
  }

  bool ready() override {
    std::scoped_lock lock(mutex);
    return done;
  }

  void wait(std::chrono::nanoseconds deadline, const OnWait& on_wait) override {
    using Clock = std::chrono::steady_clock;
    const auto start = Clock::now();
    std::unique_lock lock(mutex);
    while (!done) {
      const auto left = deadline - (Clock::now() - start);
      if (left <= std::chrono::nanoseconds(0)) {
        throw Error(ErrorKind::deadline, "event: work on the stream did not end within " +
                                             std::to_string(deadline.count() / 1000000) + " ms");
      }
      changed.wait_for(lock,
                       std::min<std::chrono::nanoseconds>(left, std::chrono::milliseconds(40)));
      if (!done && on_wait) {
        lock.unlock();
        on_wait();
        lock.lock();
      }
    }
    if (error) error.raise();
  }
};

class Worker final : public Stream::Queue {
 public:
  struct Item {
    std::function<void()> work;
    std::shared_ptr<WorkEvent> event;  // null: it ends with `end`
    Event end{};
  };
  // Shared with the thread, so that dropping the last stream from its own worker is safe.
  struct Items {
    std::mutex mutex;
    std::condition_variable changed;
    std::deque<Item> items;
    bool stopping = false;
    KeptError first_error;
  };
  std::shared_ptr<Items> queue = std::make_shared<Items>();
  std::thread thread{[shared = queue] { run(*shared); }};

  ~Worker() override {
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
    auto event = std::make_shared<WorkEvent>();
    {
      std::scoped_lock lock(queue->mutex);
      queue->items.push_back({std::move(work), event, {}});
    }
    queue->changed.notify_all();
    return Event(event);
  }

  static void run(Items& queue) {
    std::vector<Event> started;
    std::unique_lock lock(queue.mutex);
    while (true) {
      queue.changed.wait(lock, [&] { return queue.stopping || !queue.items.empty(); });
      const bool drained = queue.items.empty();
      Item item;
      if (!drained) {
        item = std::move(queue.items.front());
        queue.items.pop_front();
      }
      lock.unlock();
      KeptError error;
      if (!item.end.state()) error = ended(std::exchange(started, {}));
      if (drained) return;  // and stopping
      const KeptError of_work = done(item.work);
      if (item.event) {
        item.event->complete(of_work);
      } else {
        started.push_back(std::move(item.end));
      }
      if (!error) error = of_work;
      lock.lock();
      if (error && !queue.first_error) queue.first_error = error;
    }
  }

  /// Runs it, and drops what it holds: before its event says that it has ended.
  static KeptError done(std::function<void()>& work) {
    KeptError error;
    try {
      if (work) work();
    } catch (...) {
      error = KeptError::current();
    }
    work = nullptr;
    return error;
  }

  /// Waits for all of them; the first error.
  static KeptError ended(const std::vector<Event>& started) {
    KeptError first;
    for (const Event& event : started) {
      KeptError error = done_waiting(event);
      if (!first) first = std::move(error);
    }
    return first;
  }

  static KeptError done_waiting(const Event& event) {
    std::function<void()> wait = [&] { event.wait(); };
    return done(wait);
  }

  void start(std::function<void()> start, const Event& end) override {
    {
      std::scoped_lock lock(queue->mutex);
      queue->items.push_back({std::move(start), nullptr, end});
    }
    queue->changed.notify_all();
  }

  Event submit(std::function<void()> work) override { return push(std::move(work)); }
  Event record() override { return push({}); }
  void wait(const Event& event) override {
    // An event whose work failed does not stop this stream: whoever needs the result sees the
    // error.
    push([event] {
      try {
        event.wait();
      } catch (...) {
      }
    });
  }
  void synchronize() override {
    record().wait();
    std::scoped_lock lock(queue->mutex);
    if (const KeptError error = std::exchange(queue->first_error, {})) error.raise();
  }
};

}  // namespace

Stream::Stream() {
  try {
    queue_ = std::make_shared<Worker>();
  } catch (const std::system_error& error) {
    throw Error(ErrorKind::exhausted, "Stream: " + thread_limit_text(error.code().value()));
  }
}

}  // namespace ferry
