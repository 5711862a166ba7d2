// For tests: what happens to a thread.
#pragma once
#include <signal.h>
#include <sys/syscall.h>
#include <sys/time.h>
#include <unistd.h>

#include <chrono>
#include <cstdlib>

namespace ferry::test {

/// This thread alone, be it the first one.
[[noreturn]] inline void end_this_thread() {
  syscall(SYS_exit, 0);
  std::abort();
}

/// A signal interrupts what this process waits for, once.
class InterruptedSoon {
 public:
  explicit InterruptedSoon(std::chrono::microseconds after) {
    struct sigaction act{};
    act.sa_handler = [](int) {};  // no SA_RESTART: what waits is interrupted
    const itimerval soon{{0, 0}, {0, static_cast<suseconds_t>(after.count())}};
    if (sigaction(SIGALRM, &act, &before_) != 0 || setitimer(ITIMER_REAL, &soon, nullptr) != 0) {
      std::abort();
    }
  }
  ~InterruptedSoon() { sigaction(SIGALRM, &before_, nullptr); }
  InterruptedSoon(const InterruptedSoon&) = delete;
  InterruptedSoon& operator=(const InterruptedSoon&) = delete;

 private:
  struct sigaction before_{};
};

}  // namespace ferry::test
