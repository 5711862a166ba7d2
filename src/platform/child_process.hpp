// Programs that this process starts, what they write and how they end.
#pragma once
#include <cstddef>
#include <cstdint>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include "platform/socket.hpp"
#include "platform/unique_descriptor.hpp"

namespace ferry {

/// How a process ended.
struct ProcessEnd {
  int code = 0;    ///< exit code; meaningless when `signal` is not 0
  int signal = 0;  ///< the signal that killed it
  bool failed() const { return signal != 0 || code != 0; }
  /// As a shell gives it: the code, or 128 + signal.
  int exit_code() const { return signal != 0 ? 128 + signal : code; }
};

enum class Output { piped, inherited };

struct ProcessSpec {
  std::vector<std::string> command;      ///< program (looked up in PATH) and its arguments
  std::vector<std::string> environment;  ///< "NAME=value"
  bool inherit_stdin = false;            ///< false: nothing to read
  Output output = Output::piped;
};

/// A started process. POSIX: it leads a process group of its own, and the kernel kills it when the
/// thread that started it ends. Windows: it ends with this process, and so does what it starts.
struct Process {
  std::int64_t pid = -1;
  UniqueDescriptor handle{};  ///< Windows
  UniqueDescriptor out{};     ///< read end of its stdout (when piped)
  UniqueDescriptor err{};     ///< the same of its stderr
};

/// "NAME=value" strings of this process.
std::vector<std::string> own_environment();

/// `error`: 0, or why the program cannot be run (errno; Windows: a code of the system). Throws
/// std::system_error when the system has no room for another process.
Process start_process(const ProcessSpec& spec, int& error);

/// Of a pipe of a started process: what is there (Windows: waits until something is).
Transfer read_from(const UniqueDescriptor& pipe, std::span<std::byte> into);

/// How it ended; nothing: it runs. POSIX: it stays a zombie, so that its number, which is also that
/// of its group, cannot be given to a stranger before `reap`.
std::optional<ProcessEnd> end_of(const Process& process);

}  // namespace ferry
