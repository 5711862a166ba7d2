// What the library's own threads need of the system.
#pragma once
#include <array>
#include <cstddef>
#include <thread>

namespace ferry {

/// Blocks all signals of this thread, and of those that it starts meanwhile, until it ends. Threads
/// of the library are started so: signals belong to the program's own (Python's handlers run in its
/// main thread).
class SignalsBlocked {
 public:
  SignalsBlocked() noexcept;
  ~SignalsBlocked();
  SignalsBlocked(const SignalsBlocked&) = delete;
  SignalsBlocked& operator=(const SignalsBlocked&) = delete;

 private:
  [[maybe_unused]] alignas(std::max_align_t) std::array<std::byte, 128> before_{};  // a sigset_t
};

/// As debuggers and profilers show it; at most 15 bytes.
void name_thread(std::thread& thread, const char* name) noexcept;

}  // namespace ferry
