// Work that may hang, such as files on a network whose server is away: in a thread of its own,
// which is left behind then. What the work holds must outlive that.
#pragma once
#include <chrono>
#include <functional>
#include <future>
#include <thread>
#include <utility>

#include "ferry/error.hpp"
#include "platform/death_watch.hpp"

namespace ferry::engine {

/// When the result is there, the waits of this process wake.
template <class Result>
std::future<Result> aside(std::function<Result()> work) {
  std::packaged_task<Result()> task(std::move(work));
  std::future<Result> result = task.get_future();
  std::thread([task = std::move(task)]() mutable {
    task();
    DeathWatch::tell();
  }).detach();
  return result;
}

/// Waits for the result, but throws Error(system) with `late` when it is not there in time.
template <class Result>
Result at_most_for(std::chrono::nanoseconds deadline, const std::string& late,
                   std::function<Result()> work) {
  std::future<Result> result = aside<Result>(std::move(work));
  if (result.wait_for(deadline) == std::future_status::ready) return result.get();
  throw Error(ErrorKind::system, late, {});
}

}  // namespace ferry::engine
