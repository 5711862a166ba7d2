// Processes of this host: who one is, and whether it still runs.
#pragma once
#include <atomic>
#include <cstdint>
#include <memory>
#include <optional>

#include "fabric/death_watch.hpp"
#include "fabric/fabric.hpp"

namespace ferry::fabric {

/// A process of this host, told apart from a later one with the same number.
struct ProcessName {
  std::uint64_t pid_namespace = 0;   ///< inode of /proc/self/ns/pid; 0: unknown
  std::uint64_t time_namespace = 0;  ///< inode of /proc/self/ns/time; 0: none
  std::uint64_t start_time = 0;      ///< clock ticks since boot, /proc/<pid>/stat; 0: unknown
  std::int64_t pid = 0;

  friend bool operator==(const ProcessName&, const ProcessName&) = default;
};

/// This process.
ProcessName this_process();

/// The start time of the process that has this number now; nothing if there is none or /proc does
/// not tell.
std::optional<std::uint64_t> start_time_of(std::int64_t pid);

/// Tells whether a process still runs. A process that was killed is dead at once, whether or not
/// its parent has waited for it.
class ProcessWatch {
 public:
  explicit ProcessWatch(const ProcessName& process);
  /// Of one that has ended.
  ProcessWatch() : fixed_(PeerState::dead) {}
  ~ProcessWatch();
  ProcessWatch(ProcessWatch&& other) noexcept;
  ProcessWatch& operator=(ProcessWatch&&) = delete;

  /// One system call (a few where the kernel has no pidfd), never blocks. Unknown: the process
  /// counts its pids in another namespace than this one. Dead stays dead. Thread-safe.
  PeerState state() noexcept;

 private:
  PeerState state_without_pidfd() const noexcept;

  ProcessName process_{};
  int pidfd_ = -1;
  std::shared_ptr<DeathWatch> death_watch_{};
  std::atomic<PeerState> fixed_ = PeerState::alive;  // dead or unknown: no need to look
};

/// What an errno says; where descriptors are short, with the limit and what to do.
std::string error_text(int error);

}  // namespace ferry::fabric
