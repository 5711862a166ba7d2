#include "platform/process.hpp"

#include "platform/windows/system.hpp"

namespace ferry {
namespace {

constexpr DWORD kMayAsk = PROCESS_QUERY_LIMITED_INFORMATION | SYNCHRONIZE;

UniqueDescriptor open_process(std::int64_t pid) {
  return UniqueDescriptor(windows::number_of(OpenProcess(kMayAsk, FALSE, static_cast<DWORD>(pid))));
}

std::optional<std::uint64_t> start_time_by(HANDLE process) {
  FILETIME start{}, end{}, kernel{}, user{};
  if (!GetProcessTimes(process, &start, &end, &kernel, &user)) return std::nullopt;
  return std::uint64_t{start.dwHighDateTime} << 32 | start.dwLowDateTime;
}

bool has_ended(const UniqueDescriptor& process) {
  return WaitForSingleObject(windows::handle_of(process.get()), 0) == WAIT_OBJECT_0;
}

}  // namespace

std::int64_t process_id() noexcept {
  return static_cast<std::int64_t>(GetCurrentProcessId());
}

std::optional<std::uint64_t> start_time_of(std::int64_t pid) {
  if (pid == process_id()) return start_time_by(GetCurrentProcess());
  const UniqueDescriptor process = open_process(pid);
  return process ? start_time_by(windows::handle_of(process.get())) : std::nullopt;
}

ProcessName this_process() {
  ProcessName name;
  name.pid_namespace = 1;  // there is one
  name.pid = process_id();
  name.start_time = start_time_of(name.pid).value_or(0);
  return name;
}

bool runs_no_more(const ProcessName& process) {
  const UniqueDescriptor handle = open_process(process.pid);
  if (!handle) return GetLastError() == ERROR_INVALID_PARAMETER;  // no such number
  return has_ended(handle) || start_time_by(windows::handle_of(handle.get())) != process.start_time;
}

ProcessWatch::ProcessWatch(const ProcessName& process) : process_(process) {
  const ProcessName self = this_process();
  if (self == process) return;  // rank and peer are threads of one process
  if (process.pid_namespace != self.pid_namespace || process.start_time == 0) {
    fixed_ = PeerState::unknown;  // a number alone could be anybody's
    return;
  }
  handle_ = open_process(process.pid);
  if (!handle_) {
    fixed_ = GetLastError() == ERROR_INVALID_PARAMETER ? PeerState::dead : PeerState::unknown;
    return;
  }
  if (start_time_by(windows::handle_of(handle_.get())) != process.start_time) {
    fixed_ = PeerState::dead;
    return;
  }
  death_watch_ = DeathWatch::shared();
  if (death_watch_) death_watch_->add(handle_.get());
}

PeerState ProcessWatch::state() noexcept {
  // relaxed: a fact by itself, no data goes with it
  const PeerState state = fixed_.load(std::memory_order_relaxed);
  if (state != PeerState::alive || !handle_ || !has_ended(handle_)) return state;
  fixed_.store(PeerState::dead, std::memory_order_relaxed);
  return PeerState::dead;
}

bool ProcessWatch::ends() noexcept {
  return state() == PeerState::dead;
}

}  // namespace ferry
