#include "platform/windows/child_process.hpp"

#include <fcntl.h>
#include <io.h>

#include <atomic>
#include <cstdlib>
#include <system_error>
#include <utility>

#include "platform/windows/system.hpp"

namespace ferry {
namespace {

[[noreturn]] void fail(const char* what) {
  throw std::system_error(static_cast<int>(GetLastError()), std::system_category(), what);
}

/// Its processes end with this one: nobody else has a handle to it.
HANDLE job() {
  static HANDLE made = [] {
    HANDLE job = CreateJobObjectA(nullptr, nullptr);
    JOBOBJECT_EXTENDED_LIMIT_INFORMATION limits{};
    limits.BasicLimitInformation.LimitFlags = JOB_OBJECT_LIMIT_KILL_ON_JOB_CLOSE;
    if (job == nullptr ||
        !SetInformationJobObject(job, JobObjectExtendedLimitInformation, &limits, sizeof limits)) {
      fail("cannot make a job object");
    }
    return job;
  }();
  return made;
}

/// As the C library of the program takes it apart again (CommandLineToArgvW).
std::string quoted(const std::string& word) {
  if (!word.empty() && word.find_first_of(" \t\n\v\"") == std::string::npos) return word;
  std::string text = "\"";
  std::size_t slashes = 0;
  for (const char c : word) {
    if (c == '"') text.append(slashes + 1, '\\');
    slashes = c == '\\' ? slashes + 1 : 0;
    text += c;
  }
  text.append(slashes, '\\');
  return text + '"';
}

struct Pipe {
  UniqueDescriptor read{};
  UniqueDescriptor write{};  // for a child
};

SECURITY_ATTRIBUTES inherited() {
  return {sizeof(SECURITY_ATTRIBUTES), nullptr, TRUE};
}

Pipe make_pipe() {
  SECURITY_ATTRIBUTES attributes = inherited();
  HANDLE read = nullptr, write = nullptr;
  if (!CreatePipe(&read, &write, &attributes, 0)) fail("cannot make a pipe");
  SetHandleInformation(read, HANDLE_FLAG_INHERIT, 0);
  return {UniqueDescriptor(windows::number_of(read)), UniqueDescriptor(windows::number_of(write))};
}

UniqueDescriptor open_nul() {
  SECURITY_ATTRIBUTES attributes = inherited();
  return UniqueDescriptor(windows::number_of(CreateFileA("NUL", GENERIC_READ | GENERIC_WRITE,
                                                         FILE_SHARE_READ | FILE_SHARE_WRITE,
                                                         &attributes, OPEN_EXISTING, 0, nullptr)));
}

/// False: GetLastError says why.
bool create(std::string command_line, char* environment, STARTUPINFOA start, Process& process) {
  start.cb = sizeof start;
  start.dwFlags = STARTF_USESTDHANDLES;
  PROCESS_INFORMATION made{};
  if (!CreateProcessA(nullptr, command_line.data(), nullptr, nullptr, TRUE, CREATE_SUSPENDED,
                      environment, nullptr, &start, &made)) {
    return false;
  }
  AssignProcessToJobObject(job(), made.hProcess);  // before it can start others
  ResumeThread(made.hThread);
  CloseHandle(made.hThread);
  process.pid = made.dwProcessId;
  process.handle = UniqueDescriptor(windows::number_of(made.hProcess));
  return true;
}

STARTUPINFOA own_outputs() {
  STARTUPINFOA start{};
  start.hStdOutput = GetStdHandle(STD_OUTPUT_HANDLE);
  start.hStdError = GetStdHandle(STD_ERROR_HANDLE);
  return start;
}

std::atomic<int>& interrupt_count() {
  static std::atomic<int> count{0};
  return count;
}

BOOL WINAPI on_interrupt(DWORD /*kind*/) {
  ++interrupt_count();
  return TRUE;
}

}  // namespace

std::vector<std::string> own_environment() {
  std::vector<std::string> all;
  for (char** entry = _environ; *entry != nullptr; ++entry) all.emplace_back(*entry);
  return all;
}

Process start_process(const ProcessSpec& spec, int& error) {
  std::string command, block;
  for (const std::string& word : spec.command)
    command += (command.empty() ? "" : " ") + quoted(word);
  for (const std::string& entry : spec.environment) block += entry + '\0';
  block += '\0';
  const UniqueDescriptor nul = open_nul();
  Process process;
  Pipe out, err;
  STARTUPINFOA start = own_outputs();
  start.hStdInput = windows::handle_of(nul.get());
  if (spec.output == Output::piped) {
    out = make_pipe();
    err = make_pipe();
    start.hStdOutput = windows::handle_of(out.write.get());
    start.hStdError = windows::handle_of(err.write.get());
  }
  error = create(command, block.data(), start, process) ? 0 : static_cast<int>(GetLastError());
  if (error == 0) {
    process.out = std::move(out.read);
    process.err = std::move(err.read);
  }
  return process;
}

Transfer read_from(const UniqueDescriptor& pipe, std::span<std::byte> into) {
  DWORD got = 0;
  const bool ok = ReadFile(windows::handle_of(pipe.get()), into.data(),
                           static_cast<DWORD>(into.size()), &got, nullptr) &&
                  got > 0;
  return {.bytes = got, .ended = !ok};
}

std::optional<ProcessEnd> end_of(const Process& process) {
  HANDLE const handle = windows::handle_of(process.handle.get());
  DWORD code = 0;
  if (WaitForSingleObject(handle, 0) != WAIT_OBJECT_0) return std::nullopt;
  GetExitCodeProcess(handle, &code);
  return ProcessEnd{.code = static_cast<int>(code)};
}

namespace windows {

Process start_again(const std::string& command_line, const std::string& variable,
                    const std::string& value, bool silent) {
  const UniqueDescriptor nul = silent ? open_nul() : UniqueDescriptor();
  STARTUPINFOA start = own_outputs();
  start.hStdInput = GetStdHandle(STD_INPUT_HANDLE);
  if (silent) start.hStdInput = start.hStdOutput = start.hStdError = handle_of(nul.get());
  SetEnvironmentVariableA(variable.c_str(), value.c_str());
  Process process;
  const bool ok =
      create(command_line.empty() ? GetCommandLineA() : command_line, nullptr, start, process);
  const DWORD error = GetLastError();
  SetEnvironmentVariableA(variable.c_str(), nullptr);
  SetLastError(error);
  if (!ok) fail("cannot start this program anew");
  return process;
}

void end_process(const Process& process, unsigned code) {
  TerminateProcess(handle_of(process.handle.get()), code);
}

void end_started(unsigned code) {
  TerminateJobObject(job(), code);
}

void end_this_process(int code) {
  TerminateProcess(GetCurrentProcess(), static_cast<UINT>(code));
  std::abort();
}

void take_console() {
  for (const int output : {1, 2}) _setmode(output, _O_BINARY);
  SetConsoleCtrlHandler(on_interrupt, TRUE);
}

int interrupts() {
  return interrupt_count();
}

}  // namespace windows
}  // namespace ferry
