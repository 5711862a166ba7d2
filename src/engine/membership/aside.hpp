// Work that may hang, such as files on a network whose server is away: in a thread of its own,
// which is left behind then. What the work holds must outlive that.
#pragma once
#include <chrono>
#include <functional>
#include <future>
#include <thread>
#include <type_traits>
#include <utility>
#include <variant>

#include "ferry/error.hpp"
#include "platform/death_watch.hpp"

namespace ferry::engine {

/// When the result is there, the waits of this process wake.
template <class Result>
class Aside {
 public:
  Aside() = default;
  explicit Aside(std::function<Result()> work) {
    std::packaged_task<Outcome()> task([work = std::move(work)] { return outcome_of(work); });
    outcome_ = task.get_future();
    std::thread([task = std::move(task)]() mutable {
      task();
      DeathWatch::tell();
    }).detach();
  }

  bool valid() const { return outcome_.valid(); }
  bool ready_in(std::chrono::nanoseconds time) const {
    return outcome_.wait_for(time) == std::future_status::ready;
  }
  /// Once it is ready; throws what the work threw.
  Result get() {
    Outcome outcome = outcome_.get();
    if (Error* error = std::get_if<Error>(&outcome)) throw Error(std::move(*error));
    if constexpr (!std::is_void_v<Result>) return std::get<Result>(std::move(outcome));
  }

 private:
  using Value = std::conditional_t<std::is_void_v<Result>, std::monostate, Result>;
  /// An error is moved to its reader. The two threads would share an exception_ptr, and
  /// ThreadSanitizer does not see which of them frees it.
  using Outcome = std::variant<Value, Error>;

  static Outcome outcome_of(const std::function<Result()>& work) {
    try {
      if constexpr (std::is_void_v<Result>) {
        work();
        return Value{};
      } else {
        return work();
      }
    } catch (const Error& error) {
      return error;
    }
  }

  std::future<Outcome> outcome_{};
};

/// Waits for the result, but throws Error(system) with `late` when it is not there in time.
template <class Result>
Result at_most_for(std::chrono::nanoseconds deadline, const std::string& late,
                   std::function<Result()> work) {
  Aside<Result> aside(std::move(work));
  if (aside.ready_in(deadline)) return aside.get();
  throw Error(ErrorKind::system, late, {});
}

}  // namespace ferry::engine
