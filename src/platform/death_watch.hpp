// Deaths of processes as the kernel tells them, so that a wait need not look for them.
#pragma once
#include <atomic>
#include <cstdint>
#include <memory>

#include "platform/futex.hpp"

namespace ferry {

/// A thread that sleeps until a watched process ends, then wakes all threads of this process that
/// sleep on a flag: their watches look after their peers. One for the process, while somebody
/// watches.
class DeathWatch {
 public:
  /// Null where the thread or its descriptors cannot be had: then deaths are seen when a wait
  /// looks.
  static std::shared_ptr<DeathWatch> shared() noexcept;
  /// How many watched processes have ended: grows, never falls. A watch that remembers it knows
  /// whether there is reason to look.
  static std::uint64_t count() noexcept { return count_.load(std::memory_order_acquire); }

  /// The same for news that the kernel does not tell, of ranks on other hosts: counts and wakes.
  static void tell() noexcept {
    // Release: who sees it finds what there is to see.
    count_.fetch_add(1, std::memory_order_release);
    wake_sleepers();
  }

  ~DeathWatch();
  DeathWatch(const DeathWatch&) = delete;
  DeathWatch& operator=(const DeathWatch&) = delete;

  /// What a ProcessWatch holds, until `remove`: a descriptor from pidfd_open, or a handle.
  void add(int process) noexcept;
  void remove(int process) noexcept;

 private:
  struct Parts;
  DeathWatch();
  bool in_forked_child() const noexcept;

  static inline std::atomic<std::uint64_t> count_{0};
  const std::unique_ptr<Parts> parts_;
};

}  // namespace ferry
