#include "platform/child_process.hpp"

#include <fcntl.h>
#include <sys/prctl.h>
#include <sys/wait.h>
#include <unistd.h>

#include <cerrno>
#include <csignal>
#include <system_error>

#include "platform/posix/process_group.hpp"

extern char** environ;

namespace ferry {
namespace {

struct Pipe {
  UniqueDescriptor read{};
  UniqueDescriptor write{};
};

Pipe make_pipe() {
  int ends[2];
  if (pipe2(ends, O_CLOEXEC) != 0) {
    throw std::system_error(errno, std::generic_category(), "cannot make a pipe (pipe2)");
  }
  return {UniqueDescriptor(ends[0]), UniqueDescriptor(ends[1])};
}

std::vector<char*> pointers(const std::vector<std::string>& strings) {
  std::vector<char*> result;
  for (const std::string& text : strings) result.push_back(const_cast<char*>(text.c_str()));
  result.push_back(nullptr);
  return result;
}

// Everything that the child needs, made before the fork: between fork and exec only
// async-signal-safe calls are allowed.
struct ChildArgs {
  pid_t parent = 0;
  char* const* argv = nullptr;
  char** environment = nullptr;
  bool inherit_stdin = false;
  int out = -1;  // -1: inherited
  int err = -1;
  int failure = -1;  // takes errno when exec fails
};

void default_signals() {
  for (const int signal : {SIGPIPE, SIGINT, SIGTERM, SIGHUP, SIGQUIT, SIGTSTP}) {
    ::signal(signal, SIG_DFL);
  }
  // A process that owns the terminal is in the background of it and may still set it up.
  ::signal(SIGTTOU, SIG_IGN);
  sigset_t none;
  sigemptyset(&none);
  sigprocmask(SIG_SETMASK, &none, nullptr);
}

[[noreturn]] void run_child(const ChildArgs& args) {
  setpgid(0, 0);
  prctl(PR_SET_PDEATHSIG, SIGKILL);
  if (getppid() != args.parent) _exit(127);  // the parent died before the line above
  if (!args.inherit_stdin) {
    const int null = open("/dev/null", O_RDONLY);
    if (null >= 0) {
      dup2(null, STDIN_FILENO);
      if (null != STDIN_FILENO) close(null);
    }
  }
  if (args.out >= 0) dup2(args.out, STDOUT_FILENO);
  if (args.err >= 0) dup2(args.err, STDERR_FILENO);
  default_signals();
  environ = args.environment;
  execvp(args.argv[0], args.argv);
  const int reason = errno;
  [[maybe_unused]] const ssize_t written = write(args.failure, &reason, sizeof reason);
  _exit(127);
}

}  // namespace

std::vector<std::string> own_environment() {
  std::vector<std::string> all;
  for (char** entry = environ; *entry != nullptr; ++entry) all.emplace_back(*entry);
  return all;
}

Process start_process(const ProcessSpec& spec, int& error) {
  const std::vector<char*> argv = pointers(spec.command);
  std::vector<char*> environment = pointers(spec.environment);
  Pipe failure = make_pipe();
  Pipe out;
  Pipe err;
  if (spec.output == Output::piped) {
    out = make_pipe();
    err = make_pipe();
  }
  const ChildArgs args{getpid(),        argv.data(),     environment.data(), spec.inherit_stdin,
                       out.write.get(), err.write.get(), failure.write.get()};
  const pid_t pid = fork();
  if (pid < 0) throw std::system_error(errno, std::generic_category(), "cannot fork");
  if (pid == 0) run_child(args);
  setpgid(pid, pid);  // in both, so that neither has to wait for the other
  failure.write.reset();

  error = 0;
  ssize_t got = 0;
  do {
    got = read(failure.read.get(), &error, sizeof error);  // ends at exec (close-on-exec)
  } while (got < 0 && errno == EINTR);
  if (got == static_cast<ssize_t>(sizeof error)) {
    reap(pid);
    return {};
  }
  for (const UniqueDescriptor* fd : {&out.read, &err.read}) {
    if (*fd) fcntl(fd->get(), F_SETFL, O_NONBLOCK);
  }
  return {.pid = pid, .out = std::move(out.read), .err = std::move(err.read)};
}

Transfer read_from(const UniqueDescriptor& pipe, std::span<std::byte> into) {
  const ssize_t got = read(pipe.get(), into.data(), into.size());
  if (got > 0) return {.bytes = static_cast<std::size_t>(got)};
  return {.ended = got == 0 || (errno != EAGAIN && errno != EINTR)};
}

std::optional<ProcessEnd> end_of(const Process& process) {
  return end_of(process.pid);
}

}  // namespace ferry
