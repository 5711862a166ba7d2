#include "platform/threads.hpp"

#include <pthread.h>

#include <csignal>
#include <new>

namespace ferry {

SignalsBlocked::SignalsBlocked() noexcept {
  static_assert(sizeof(sigset_t) <= sizeof before_);
  sigset_t all;
  sigfillset(&all);
  ::pthread_sigmask(SIG_SETMASK, &all, new (before_.data()) sigset_t);
}

SignalsBlocked::~SignalsBlocked() {
  const auto* before = std::launder(reinterpret_cast<const sigset_t*>(before_.data()));
  ::pthread_sigmask(SIG_SETMASK, before, nullptr);
}

void name_thread(std::thread& thread, const char* name) noexcept {
  ::pthread_setname_np(thread.native_handle(), name);
}

}  // namespace ferry
