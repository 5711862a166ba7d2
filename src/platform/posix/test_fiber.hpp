// A fiber: a stack of its own on the same OS thread. Built on ucontext; address sanitizer is told
// of every switch. Thread sanitizer cannot follow: the explorer is not built with it.
#pragma once

#include <ucontext.h>

#include <cstddef>
#include <memory>

#if defined(__SANITIZE_ADDRESS__)
#define FERRY_MODEL_ASAN 1
#elif defined(__has_feature)
#if __has_feature(address_sanitizer)
#define FERRY_MODEL_ASAN 1
#endif
#endif
#if defined(FERRY_MODEL_ASAN)
#include <sanitizer/asan_interface.h>
#include <sanitizer/common_interface_defs.h>
#endif

namespace ferry::test {

class Fiber {
 public:
  /// Prepares to run `entry` from its beginning; what ran here before is dropped.
  void start(void (*entry)()) {
    if (!stack_) {
      stack_ = std::make_unique<std::byte[]>(kStackBytes);
      getcontext(&fresh_);
    }
#if defined(FERRY_MODEL_ASAN)
    // The fake stack of the dropped run stays for the next: there is no way to free it from here.
    ASAN_UNPOISON_MEMORY_REGION(stack_.get(), kStackBytes);
#endif
    context_ = fresh_;
    context_.uc_stack.ss_sp = stack_.get();
    context_.uc_stack.ss_size = kStackBytes;
    context_.uc_link = nullptr;
    makecontext(&context_, entry, 0);
  }

  /// Leaves this fiber (where it runs now) for `next`.
  void switch_to(Fiber& next) {
#if defined(FERRY_MODEL_ASAN)
    const void* bottom = next.stack_ ? next.stack_.get() : next.bottom_;
    const std::size_t bytes = next.stack_ ? kStackBytes : next.bytes_;
    __sanitizer_start_switch_fiber(&fake_, bottom, bytes);
    swapcontext(&context_, &next.context_);
    arrived(this);
#else
    swapcontext(&context_, &next.context_);
#endif
  }

  /// To be called first on a fresh fiber, `here`. The first fiber of all is entered from `origin`,
  /// the thread's own stack.
  static void entered([[maybe_unused]] Fiber& origin, [[maybe_unused]] Fiber& here) {
#if defined(FERRY_MODEL_ASAN)
    const void* bottom = nullptr;
    std::size_t bytes = 0;
    __sanitizer_finish_switch_fiber(here.fake_, &bottom, &bytes);
    if (origin.bottom_ == nullptr) {
      origin.bottom_ = bottom;
      origin.bytes_ = bytes;
    }
#endif
  }

 private:
  static constexpr std::size_t kStackBytes = 128 << 10;

#if defined(FERRY_MODEL_ASAN)
  static void arrived(Fiber* here) {
    __sanitizer_finish_switch_fiber(here->fake_, nullptr, nullptr);
  }
  void* fake_ = nullptr;
  const void* bottom_ = nullptr;  // the thread's own stack, learned at the first switch away
  std::size_t bytes_ = 0;
#endif
  std::unique_ptr<std::byte[]> stack_;
  ucontext_t fresh_{};
  ucontext_t context_{};
};

}  // namespace ferry::test
