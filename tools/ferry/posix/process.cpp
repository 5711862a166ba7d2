#include "posix/process.hpp"

#include <fcntl.h>
#include <fmt/format.h>
#include <sys/prctl.h>
#include <sys/wait.h>
#include <unistd.h>

#include <cerrno>
#include <csignal>
#include <cstring>
#include <map>
#include <system_error>

#include "run/environment.hpp"

extern char** environ;

namespace ferry::cli {

char** own_environment() {
  return environ;
}

namespace {

// sigabbrev_np is newer (glibc 2.32) than what packages run on.
const std::map<int, const char*> kSignalNames{
    {SIGABRT, "ABRT"}, {SIGALRM, "ALRM"}, {SIGBUS, "BUS"},   {SIGCONT, "CONT"},
    {SIGFPE, "FPE"},   {SIGHUP, "HUP"},   {SIGILL, "ILL"},   {SIGINT, "INT"},
    {SIGIO, "IO"},     {SIGKILL, "KILL"}, {SIGPIPE, "PIPE"}, {SIGPROF, "PROF"},
    {SIGQUIT, "QUIT"}, {SIGSEGV, "SEGV"}, {SIGSYS, "SYS"},   {SIGTERM, "TERM"},
    {SIGTRAP, "TRAP"}, {SIGUSR1, "USR1"}, {SIGUSR2, "USR2"}, {SIGVTALRM, "VTALRM"},
    {SIGXCPU, "XCPU"}, {SIGXFSZ, "XFSZ"}};

struct Pipe {
  UniqueFd read;
  UniqueFd write;
};

Pipe make_pipe() {
  int ends[2];
  if (pipe2(ends, O_CLOEXEC) != 0) {
    throw std::system_error(errno, std::generic_category(), "cannot make a pipe (pipe2)");
  }
  return {UniqueFd(ends[0]), UniqueFd(ends[1])};
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
  // A rank that owns the terminal is in the background of it and may still set it up.
  ::signal(SIGTTOU, SIG_IGN);
  sigset_t none;
  sigemptyset(&none);
  sigprocmask(SIG_SETMASK, &none, nullptr);
}

[[noreturn]] void run_child(const ChildArgs& args) {
  setpgid(0, 0);
  prctl(PR_SET_PDEATHSIG, SIGKILL);
  if (getppid() != args.parent) _exit(127);  // the launcher died before the line above
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

std::string reason_not_started(const std::string& program, int reason) {
  std::string hint;
  if (reason == ENOENT && program.find('/') == std::string::npos) {
    hint = "; it is not in PATH (a program of this folder is ./" + program + ")";
  } else if (reason == EACCES) {
    hint = "; it must be a file with the right to execute (chmod +x)";
  } else if (reason == ENOEXEC) {
    hint =
        "; it is not a program of this machine, and a script needs a first line like "
        "#!/usr/bin/env python3";
  }
  return fmt::format("cannot start '{}': {}{}", program, std::strerror(reason), hint);
}

}  // namespace

std::string describe(const ProcessEnd& end) {
  if (end.signal == 0) return fmt::format("exited with code {}", end.code);
  const auto name = kSignalNames.find(end.signal);
  return name != kSignalNames.end()
             ? fmt::format("was killed by signal {} (SIG{})", end.signal, name->second)
             : fmt::format("was killed by signal {}", end.signal);
}

Process start_process(const ProcessSpec& spec) {
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
  failure.write.close();

  int reason = 0;
  ssize_t got = 0;
  do {
    got = read(failure.read.get(), &reason, sizeof reason);  // ends at exec (close-on-exec)
  } while (got < 0 && errno == EINTR);
  if (got == static_cast<ssize_t>(sizeof reason)) {
    reap(pid);
    throw CannotStart(reason_not_started(spec.command.front(), reason));
  }
  for (const UniqueFd* fd : {&out.read, &err.read}) {
    if (*fd) fcntl(fd->get(), F_SETFL, O_NONBLOCK);
  }
  return {pid, std::move(out.read), std::move(err.read)};
}

bool has_ended(pid_t pid, ProcessEnd& end) {
  siginfo_t info{};
  if (waitid(P_PID, static_cast<id_t>(pid), &info, WEXITED | WNOHANG | WNOWAIT) != 0 ||
      info.si_pid == 0) {
    return false;
  }
  end = info.si_code == CLD_EXITED ? ProcessEnd{info.si_status, 0} : ProcessEnd{0, info.si_status};
  return true;
}

void reap(pid_t pid) {
  while (waitpid(pid, nullptr, 0) < 0 && errno == EINTR) {
  }
}

void signal_group(pid_t group, int signal) {
  kill(-group, signal);
}

bool group_remains(pid_t group) {
  while (waitpid(-group, nullptr, WNOHANG) > 0) {
  }
  return kill(-group, 0) == 0;
}

}  // namespace ferry::cli
