// Processes of this host: who one is, and whether it still runs.
#pragma once
#include <atomic>
#include <cstdint>
#include <memory>
#include <optional>

#include "platform/death_watch.hpp"
#include "platform/unique_descriptor.hpp"

namespace ferry {

std::int64_t process_id() noexcept;

/// A process of this host, told apart from a later one with the same number.
struct ProcessName {
  std::uint64_t pid_namespace = 0;   ///< inode of /proc/self/ns/pid; Windows: 1; 0: unknown
  std::uint64_t time_namespace = 0;  ///< inode of /proc/self/ns/time; 0: none
  std::uint64_t start_time = 0;      ///< /proc/<pid>/stat; Windows: a FILETIME; 0: unknown
  std::int64_t pid = 0;

  friend bool operator==(const ProcessName&, const ProcessName&) = default;
};

/// This process.
ProcessName this_process();

/// The start time of the process that has this number now; nothing if there is none or the system
/// does not tell.
std::optional<std::uint64_t> start_time_of(std::int64_t pid);

/// Whether it has ended and its parent knows: who has not been waited for may still be looked at.
bool runs_no_more(const ProcessName& process);

/// unknown: nobody can tell; of a network: the peer has not been heard for a second.
enum class PeerState : std::uint8_t { alive, dead, unknown };

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

  /// Whether it is being ended: it calls nothing more, but its memory, and what it started on a
  /// GPU, may still be there. A driver may take hundreds of milliseconds from here to `dead`. Reads
  /// /proc (some 10 µs); where the system does not tell, true when it is dead. Thread-safe.
  bool ends() noexcept;

 private:
  ProcessName process_{};
  UniqueDescriptor handle_{};
  std::shared_ptr<DeathWatch> death_watch_{};
  std::atomic<PeerState> fixed_ = PeerState::alive;  // dead or unknown: no need to look
};

}  // namespace ferry
