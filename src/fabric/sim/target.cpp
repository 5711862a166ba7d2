#include "fabric/sim/target.hpp"

#include <algorithm>
#include <cstring>
#include <utility>

#include "platform/process.hpp"
#include "protocol/reach.hpp"

namespace ferry::fabric {
namespace {

/// For a heap whose front is due first.
bool later(const SimParcel& a, const SimParcel& b) {
  return a.due != b.due ? a.due > b.due : a.order > b.order;
}

}  // namespace

SimTarget::SimTarget(int ranks, std::size_t queue_bytes)
    : queue_bytes_(queue_bytes),
      owner_pid_(process_id()),
      signals_(ranks),
      thread_([this] { run(); }) {}

SimTarget::~SimTarget() {
  if (process_id() != owner_pid_) {  // a forked child has no such thread
    thread_.detach();
    return;
  }
  {
    const std::lock_guard lock(mutex_);
    stop_ = true;
  }
  changed_.notify_all();
  thread_.join();
}

void SimTarget::send(std::vector<SimParcel> parcels) {
  std::size_t bytes = 0;
  for (const SimParcel& parcel : parcels) bytes += parcel.bytes;
  {
    std::unique_lock lock(mutex_);
    // A put larger than the queue goes when nothing else is under way.
    room_.wait(lock, [&] { return under_way_ == 0 || bytes + under_way_ <= queue_bytes_; });
    under_way_ += bytes;
    for (SimParcel& parcel : parcels) {
      parcel.order = next_order_++;
      heap_.push_back(std::move(parcel));
      std::push_heap(heap_.begin(), heap_.end(), later);
    }
  }
  changed_.notify_one();
}

SimClock::time_point SimTarget::occupy(std::chrono::nanoseconds takes) {
  const std::lock_guard lock(mutex_);
  link_free_ = std::max(link_free_, SimClock::now()) + takes;
  return link_free_;
}

void SimTarget::run() {
  std::unique_lock lock(mutex_);
  while (!stop_) {
    if (heap_.empty()) {
      changed_.wait(lock);
      continue;
    }
    const SimClock::time_point due = heap_.front().due;
    if (SimClock::now() < due) {
      changed_.wait_until(lock, due);
      continue;
    }
    std::pop_heap(heap_.begin(), heap_.end(), later);
    const SimParcel parcel = std::move(heap_.back());
    heap_.pop_back();
    lock.unlock();
    deliver(parcel);
    lock.lock();
    under_way_ -= parcel.bytes;
    room_.notify_all();
  }
}

void SimTarget::deliver(const SimParcel& parcel) {
  const auto release = [](int /*source*/, const SimSignal& signal) {
    // Release store by the thread that copied the pieces: who sees the flag sees them.
    auto* word = reinterpret_cast<std::uint64_t*>(signal.flag.memory->data() + signal.flag.offset);
    protocol::publish_in_memory(protocol::Flag{word}, signal.value);
  };
  if (parcel.data) {
    std::memcpy(parcel.memory->data() + parcel.offset, parcel.data->data() + parcel.from,
                parcel.bytes);
    signals_.piece(parcel.source, parcel.tag, parcel.bytes, release);
  } else {
    signals_.signal(parcel.source, parcel.signal, release);
  }
}

}  // namespace ferry::fabric
