#include "platform/process.hpp"

#include <fcntl.h>
#include <poll.h>
#include <signal.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <array>
#include <cerrno>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <filesystem>
#include <new>
#include <string>
#include <system_error>

namespace ferry {
namespace {

#if !defined(SYS_pidfd_open)
constexpr long kPidfdOpen = 434;  // the same on every architecture
#else
constexpr long kPidfdOpen = SYS_pidfd_open;
#endif

std::uint64_t inode_of(const char* path) {
  struct stat info{};
  return stat(path, &info) == 0 ? static_cast<std::uint64_t>(info.st_ino) : 0;
}

struct ProcessStat {
  char state = '?';  // 'R', 'S', ..., 'Z': ended, its parent has not waited for it
  bool exiting = false;
  std::uint64_t start_time = 0;
};

/// Of one thread: reads /proc/<pid>/task/<tid>/stat (proc(5): field 3 is the state, field 9 holds
/// PF_EXITING of linux/sched.h, field 22 is the start time).
std::optional<ProcessStat> stat_at(const char* path) noexcept {
  constexpr unsigned long kExiting = 0x4;
  const int fd = open(path, O_RDONLY | O_CLOEXEC);
  if (fd < 0) return std::nullopt;
  std::array<char, 1024> text{};
  const ssize_t got = read(fd, text.data(), text.size() - 1);
  close(fd);
  if (got <= 0) return std::nullopt;
  // The name in field 2 may hold anything, also ')': fields are counted from the last one.
  const char* at = std::strrchr(text.data(), ')');
  if (at == nullptr || at[1] != ' ') return std::nullopt;
  ProcessStat result;
  result.state = at[2];
  for (int field = 3; field <= 22; ++field) {
    at = std::strchr(at + 1, ' ');
    if (at == nullptr) return std::nullopt;
    if (field == 9) result.exiting = (std::strtoul(at + 1, nullptr, 10) & kExiting) != 0;
  }
  result.start_time = std::strtoull(at + 1, nullptr, 10);
  return result;
}

/// Of its first thread, which has the process's start time. Not /proc/<pid>/stat: qemu-user writes
/// that file itself for its own process alone, with a start time that others do not see.
std::optional<ProcessStat> stat_of(std::int64_t pid) noexcept {
  std::array<char, 64> path{};
  const auto number = static_cast<long long>(pid);
  std::snprintf(path.data(), path.size(), "/proc/%lld/task/%lld/stat", number, number);
  return stat_at(path.data());
}

/// Whether every thread that /proc lists of the process is on its way out. One that cannot be read
/// runs, unless it is gone.
bool all_listed_exit(std::int64_t pid) noexcept try {
  std::error_code error;
  const std::string folder = "/proc/" + std::to_string(pid) + "/task";
  std::filesystem::directory_iterator at(folder, error);
  for (; !error && at != std::filesystem::directory_iterator(); at.increment(error)) {
    const auto thread = stat_at((at->path() / "stat").c_str());
    if (thread ? !thread->exiting : errno != ENOENT && errno != ESRCH) return false;
  }
  return !error || error == std::errc::no_such_file_or_directory ||
         error == std::errc::no_such_process;
} catch (const std::bad_alloc&) {
  return false;
}

/// Whether every thread of the process is on its way out. The first one alone may end before the
/// others (pthread_exit of main). Twice: one that ends may have started another behind the list.
bool all_threads_exit(std::int64_t pid) noexcept {
  const auto first = stat_of(pid);
  return first && first->exiting && all_listed_exit(pid) && all_listed_exit(pid);
}

PeerState state_without_pidfd(const ProcessName& process) noexcept {
  if (kill(static_cast<pid_t>(process.pid), 0) != 0 && errno == ESRCH) return PeerState::dead;
  const auto found = stat_of(process.pid);
  if (!found) return PeerState::alive;  // it exists, /proc does not say more
  if (found->start_time != process.start_time) return PeerState::dead;
  const bool ended = found->state == 'Z' || found->state == 'X' || found->state == 'x';
  // A zombie may be its first thread alone.
  return ended && all_listed_exit(process.pid) ? PeerState::dead : PeerState::alive;
}

}  // namespace

std::int64_t process_id() noexcept {
  return getpid();
}

bool runs_no_more(const ProcessName& process) {
  if (kill(static_cast<pid_t>(process.pid), 0) != 0 && errno == ESRCH) return true;
  const auto start_time = start_time_of(process.pid);
  return start_time && *start_time != process.start_time;
}

std::optional<std::uint64_t> start_time_of(std::int64_t pid) {
  const auto found = stat_of(pid);
  if (!found) return std::nullopt;
  return found->start_time;
}

ProcessName this_process() {
  ProcessName name;
  name.pid_namespace = inode_of("/proc/self/ns/pid");
  name.time_namespace = inode_of("/proc/self/ns/time");
  name.pid = getpid();
  name.start_time = start_time_of(name.pid).value_or(0);
  return name;
}

ProcessWatch::ProcessWatch(const ProcessName& process) : process_(process) {
  const ProcessName self = this_process();
  if (self == process) return;  // rank and peer are threads of one process
  if (process.pid_namespace == 0 || process.pid_namespace != self.pid_namespace ||
      process.time_namespace != self.time_namespace || process.start_time == 0) {
    fixed_ = PeerState::unknown;  // a number alone could be anybody's
    return;
  }
  // close-on-exec by definition of the call
  handle_ =
      UniqueDescriptor(static_cast<int>(syscall(kPidfdOpen, static_cast<pid_t>(process.pid), 0u)));
  if (!handle_ && errno == ESRCH) fixed_ = PeerState::dead;
  // Looked at after the descriptor was made: if the number belongs to our process still, then so
  // does the descriptor.
  const auto start_time = start_time_of(process.pid);
  if (start_time && *start_time != process.start_time) fixed_ = PeerState::dead;
  if (!handle_ || fixed_ == PeerState::dead) return;
  death_watch_ = DeathWatch::shared();
  if (death_watch_) death_watch_->add(handle_.get());
}

PeerState ProcessWatch::state() noexcept {
  // relaxed: a fact by itself, no data goes with it
  PeerState state = fixed_.load(std::memory_order_relaxed);
  if (state != PeerState::alive || process_.pid == getpid()) return state;
  if (handle_) {
    pollfd ended{.fd = handle_.get(), .events = POLLIN, .revents = 0};
    if (poll(&ended, 1, 0) == 1) state = PeerState::dead;
  } else {
    state = state_without_pidfd(process_);
  }
  if (state == PeerState::dead) fixed_.store(state, std::memory_order_relaxed);
  return state;
}

bool ProcessWatch::ends() noexcept {
  const PeerState now = state();
  if (now != PeerState::alive || process_.pid == getpid()) return now == PeerState::dead;
  return all_threads_exit(process_.pid);
}

}  // namespace ferry
