#include "platform/death_watch.hpp"

#include <map>
#include <mutex>
#include <new>

#include "platform/futex.hpp"
#include "platform/windows/system.hpp"

namespace ferry {

/// The system's thread pool waits for the handles.
struct DeathWatch::Parts {
  std::mutex mutex{};
  std::map<int, HANDLE> waits{};  // by process

  static void CALLBACK ended(void* /*context*/, BOOLEAN /*timed_out*/) {
    tell();
    // A thread that has looked and is about to sleep misses the wake. Its slice ends the sleep at
    // the latest.
    for (const DWORD again : {1, 2, 4}) {
      Sleep(again);
      wake_sleepers();
    }
  }
};

DeathWatch::DeathWatch() : parts_(std::make_unique<Parts>()) {}

DeathWatch::~DeathWatch() = default;  // each watch has removed its process

std::shared_ptr<DeathWatch> DeathWatch::shared() noexcept {
  static std::mutex mutex;
  static std::weak_ptr<DeathWatch> current;
  try {
    std::scoped_lock lock(mutex);
    std::shared_ptr<DeathWatch> shared = current.lock();
    if (shared) return shared;
    shared.reset(new DeathWatch());
    current = shared;
    return shared;
  } catch (const std::bad_alloc&) {
    return nullptr;
  }
}

void DeathWatch::add(int process) noexcept {
  HANDLE wait = nullptr;
  if (!RegisterWaitForSingleObject(&wait, windows::handle_of(process), Parts::ended, nullptr,
                                   INFINITE, WT_EXECUTEONLYONCE | WT_EXECUTELONGFUNCTION)) {
    return;  // then the death is seen when a wait looks
  }
  std::scoped_lock lock(parts_->mutex);
  try {
    parts_->waits[process] = wait;
  } catch (const std::bad_alloc&) {
    UnregisterWaitEx(wait, INVALID_HANDLE_VALUE);
  }
}

void DeathWatch::remove(int process) noexcept {
  HANDLE wait = nullptr;
  {
    std::scoped_lock lock(parts_->mutex);
    const auto found = parts_->waits.find(process);
    if (found == parts_->waits.end()) return;
    wait = found->second;
    parts_->waits.erase(found);
  }
  UnregisterWaitEx(wait, INVALID_HANDLE_VALUE);  // after the last call of `ended`
}

}  // namespace ferry
