// `ferry run` on Windows. The ranks are in a job object that ends with this process, and so are the
// processes that they start.
#include <fcntl.h>
#include <fmt/format.h>
#include <fmt/ranges.h>
#include <io.h>

#include <algorithm>
#include <array>
#include <atomic>
#include <cstdio>
#include <cstdlib>
#include <deque>
#include <mutex>
#include <optional>
#include <thread>

#include "run/environment.hpp"
#include "run/job_options.hpp"
#include "run/ports.hpp"
#include "run/prefix.hpp"
#include "windows/system.hpp"

namespace ferry::cli {

char** own_environment() {
  return _environ;
}

namespace {

using JobClock = std::chrono::steady_clock;
constexpr UINT kTerminated = 143;  // as a shell says of SIGTERM
constexpr UINT kInterrupted = 130;
constexpr DWORD kJobPollMs = 20;

std::atomic<int>& interrupts() {
  static std::atomic<int> count{0};
  return count;
}

BOOL WINAPI on_interrupt(DWORD /*kind*/) {
  ++interrupts();  // the ranks of this console hear of it themselves
  return TRUE;
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

std::string block_of(const std::vector<std::string>& environment) {
  std::string block;
  for (const std::string& entry : environment) block += entry + '\0';
  return block + '\0';
}

struct Pipe {
  Handle read{};
  Handle write{};  // for a rank
};

Pipe make_pipe() {
  SECURITY_ATTRIBUTES inherited{sizeof inherited, nullptr, TRUE};
  HANDLE read = nullptr, write = nullptr;
  if (!CreatePipe(&read, &write, &inherited, 0)) raise_last("cannot make a pipe");
  SetHandleInformation(read, HANDLE_FLAG_INHERIT, 0);
  return {Handle(read), Handle(write)};
}

/// The processes of one job, from start to end.
class WindowsJob {
 public:
  explicit WindowsJob(const JobOptions& options)
      : options_(options),
        job_(make_job()),
        out_(1, options.ranks, options.prefix, terminal_),
        err_(2, options.ranks, options.prefix, terminal_) {}

  int run() {
    SetConsoleCtrlHandler(on_interrupt, TRUE);
    const ReservedPort master = options_.port != 0 ? ReservedPort(options_.port) : ReservedPort();
    const ReservedPort ferry;
    const JobEnvironment environment{
        .ranks = options_.ranks, .master_port = master.number(), .ferry_port = ferry.number()};
    const char* const given = std::getenv("FERRY_SECRET");
    const std::string secret = given != nullptr && *given != '\0' ? given : random_secret();
    for (int r = 0; r < options_.ranks; ++r) {
      start(r, environment_of_rank(environment, secret, r));
    }
    while (!see_who_ended()) end_group_in_time();
    TerminateJobObject(job_.get(), kTerminated);  // what ranks left behind
    for (std::thread& reader : readers_) reader.join();
    for (PrefixedOutput* output : {&out_, &err_}) {
      output->end_bar();
      output->flush();
    }
    return first_failure_ ? static_cast<int>(*ranks_[*first_failure_].code) : 0;
  }

 private:
  struct Started {
    Handle process{};
    DWORD pid = 0;
    std::optional<DWORD> code{};
  };

  void start(int rank, const std::vector<std::string>& environment) {
    std::string command;
    for (const std::string& word : options_.command) {
      command += (command.empty() ? "" : " ") + quoted(word);
    }
    std::string block = block_of(environment);
    SECURITY_ATTRIBUTES inherited{sizeof inherited, nullptr, TRUE};
    const Handle nul(CreateFileA("NUL", GENERIC_READ, FILE_SHARE_READ | FILE_SHARE_WRITE,
                                 &inherited, OPEN_EXISTING, 0, nullptr));
    Pipe out, err;
    STARTUPINFOA start{};
    start.cb = sizeof start;
    start.dwFlags = STARTF_USESTDHANDLES;
    start.hStdInput = nul.get();
    start.hStdOutput = GetStdHandle(STD_OUTPUT_HANDLE);
    start.hStdError = GetStdHandle(STD_ERROR_HANDLE);
    if (rank != options_.tty_rank) {
      out = make_pipe();
      err = make_pipe();
      start.hStdOutput = out.write.get();
      start.hStdError = err.write.get();
    }
    PROCESS_INFORMATION made{};
    if (!CreateProcessA(nullptr, command.data(), nullptr, nullptr, TRUE, CREATE_SUSPENDED,
                        block.data(), nullptr, &start, &made)) {
      throw CannotStart(
          fmt::format("cannot start '{}': {}", options_.command.front(),
                      std::system_category().message(static_cast<int>(GetLastError()))));
    }
    AssignProcessToJobObject(job_.get(), made.hProcess);  // before it can start others
    ResumeThread(made.hThread);
    CloseHandle(made.hThread);
    ranks_.push_back({Handle(made.hProcess), made.dwProcessId});
    if (rank == options_.tty_rank) return;
    readers_.emplace_back([this, rank, pipe = std::move(out.read)] { read(rank, pipe, out_); });
    readers_.emplace_back([this, rank, pipe = std::move(err.read)] { read(rank, pipe, err_); });
  }

  void read(int rank, const Handle& pipe, PrefixedOutput& to) {
    LineSplitter lines;
    PrefixedOutput::Source source{rank, {}};
    const auto sink = [&](std::string_view line, LineEnd end) { to.add(source, line, end); };
    std::vector<char> bytes(std::size_t{1} << 16);
    DWORD got = 0;
    while (ReadFile(pipe.get(), bytes.data(), static_cast<DWORD>(bytes.size()), &got, nullptr) &&
           got > 0) {
      const std::lock_guard lock(mutex_);
      lines.feed({bytes.data(), got}, sink);
      to.flush();
    }
    const std::lock_guard lock(mutex_);
    lines.finish(sink);
    to.flush();
  }

  void say(const std::string& text) {
    const std::lock_guard lock(mutex_);
    err_.add_message("ferry run: " + text);
    err_.flush();
  }

  /// Waits a moment. True when all have ended.
  bool see_who_ended() {
    std::vector<HANDLE> running;
    for (const Started& rank : ranks_) {
      if (!rank.code && running.size() < MAXIMUM_WAIT_OBJECTS) {
        running.push_back(rank.process.get());
      }
    }
    if (running.empty()) return true;
    WaitForMultipleObjects(static_cast<DWORD>(running.size()), running.data(), FALSE, kJobPollMs);
    for (std::size_t r = 0; r < ranks_.size(); ++r) {
      DWORD code = 0;
      if (ranks_[r].code || WaitForSingleObject(ranks_[r].process.get(), 0) != WAIT_OBJECT_0) {
        continue;
      }
      GetExitCodeProcess(ranks_[r].process.get(), &code);
      ranks_[r].code = code;
      if (code != 0) on_failure(r);
    }
    return false;
  }

  void on_failure(std::size_t rank) {
    if (first_failure_ && !options_.keep_going) return;  // a consequence
    const Started& it = ranks_[rank];
    const bool alone = std::all_of(ranks_.begin(), ranks_.end(),
                                   [](const Started& each) { return each.code.has_value(); });
    say(fmt::format("rank {} (pid {}) exited with code {}{}", rank, it.pid,
                    static_cast<int>(*it.code),
                    alone                 ? std::string()
                    : options_.keep_going ? "; the other ranks go on (--keep-going)"
                                          : fmt::format("; the other ranks are ended after the "
                                                        "grace of {} s",
                                                        options_.grace.count() / 1000.0)));
    if (first_failure_) return;
    first_failure_ = rank;
    failed_at_ = JobClock::now();
  }

  void end_group_in_time() {
    if (interrupts() >= 2) TerminateJobObject(job_.get(), kInterrupted);
    if (!first_failure_ || options_.keep_going || forced_ ||
        JobClock::now() < failed_at_ + options_.grace) {
      return;
    }
    std::vector<std::size_t> left;
    for (std::size_t r = 0; r < ranks_.size(); ++r) {
      if (!ranks_[r].code) left.push_back(r);
    }
    if (left.empty()) return;
    say(fmt::format("ending rank{} {}, still running {} s after rank {} failed",
                    left.size() == 1 ? "" : "s", fmt::join(left, ", "),
                    options_.grace.count() / 1000.0, *first_failure_));
    TerminateJobObject(job_.get(), kTerminated);
    forced_ = true;
  }

  const JobOptions& options_;
  Handle job_;
  PrefixedOutput::Terminal terminal_{};
  std::mutex mutex_{};  // of the outputs
  PrefixedOutput out_;
  PrefixedOutput err_;
  std::deque<Started> ranks_{};
  std::vector<std::thread> readers_{};
  std::optional<std::size_t> first_failure_{};
  JobClock::time_point failed_at_{};
  bool forced_ = false;
};

}  // namespace

int run_job(const JobOptions& options) {
  if (!options.hosts.empty()) {
    throw std::runtime_error("--hosts: on Windows the ranks are of one host");
  }
  if (options.least > 0) {
    throw std::runtime_error("--elastic: there are no elastic groups on Windows yet");
  }
  for (const int output : {1, 2}) _setmode(output, _O_BINARY);
  return WindowsJob(options).run();
}

}  // namespace ferry::cli
