// Starting one process of a job, and saying how it ended.
#pragma once
#include <sys/types.h>

#include <string>
#include <vector>

#include "posix/unique_fd.hpp"
#include "run/job_options.hpp"

namespace ferry::cli {

/// How a process ended.
struct ProcessEnd {
  int code = 0;    ///< exit code; meaningless when `signal` is not 0
  int signal = 0;  ///< the signal that killed it
  bool failed() const { return signal != 0 || code != 0; }
  /// As a shell gives it: the code, or 128 + signal.
  int exit_code() const { return signal != 0 ? 128 + signal : code; }
};

/// "exited with code 3", "was killed by signal 9 (SIGKILL)".
std::string describe(const ProcessEnd& end);

enum class Output { piped, inherited };

struct ProcessSpec {
  std::vector<std::string> command;      ///< program (looked up in PATH) and its arguments
  std::vector<std::string> environment;  ///< "NAME=value"
  bool inherit_stdin = false;            ///< false: /dev/null
  Output output = Output::piped;
};

/// A process that leads its own process group. When the thread that started it ends, for whatever
/// reason, the kernel kills it.
struct Process {
  pid_t pid = -1;
  UniqueFd out{};  ///< read end, non-blocking, of its stdout (when piped)
  UniqueFd err{};  ///< the same of its stderr
};

/// Throws CannotStart with the reason, std::system_error when the system has no room.
Process start_process(const ProcessSpec& spec);

/// True once the process has ended; fills `end`. The process stays a zombie, so that its number,
/// which is also that of its group, cannot be given to a stranger before `reap`.
bool has_ended(pid_t pid, ProcessEnd& end);
void reap(pid_t pid);

/// Sends a signal to all of a group. No error when it is gone.
void signal_group(pid_t group, int signal);
/// True while any process of the group remains. Reaps those that were handed to this process.
bool group_remains(pid_t group);

}  // namespace ferry::cli
