// Threads of the library are started with all signals blocked: signals belong to the program's own
// threads (Python's handlers run in its main thread).
#pragma once
#include <csignal>

namespace ferry {

/// Blocks all signals of this thread, and of those that it starts meanwhile, until it ends.
class SignalsBlocked {
 public:
  SignalsBlocked() {
    sigset_t all;
    sigfillset(&all);
    ::pthread_sigmask(SIG_SETMASK, &all, &before_);
  }
  ~SignalsBlocked() { ::pthread_sigmask(SIG_SETMASK, &before_, nullptr); }
  SignalsBlocked(const SignalsBlocked&) = delete;
  SignalsBlocked& operator=(const SignalsBlocked&) = delete;

 private:
  sigset_t before_;
};

}  // namespace ferry
