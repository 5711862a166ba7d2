#include "platform/posix/process_group.hpp"

#include <fcntl.h>
#include <sched.h>
#include <sys/mman.h>
#include <sys/prctl.h>
#include <sys/signalfd.h>
#include <sys/wait.h>
#include <unistd.h>

#include <cerrno>
#include <csignal>
#include <cstdio>
#include <system_error>

namespace ferry {
namespace {

[[noreturn]] void fail(const char* what) {
  throw std::system_error(errno, std::generic_category(), what);
}

pid_t number(std::int64_t pid) {
  return static_cast<pid_t>(pid);
}

}  // namespace

std::int64_t fork_process(const std::function<int()>& body) {
  std::fflush(nullptr);  // or the child would write the buffers once more
  const pid_t parent = getpid();
  const pid_t pid = fork();
  if (pid < 0) fail("cannot fork");
  if (pid > 0) return pid;
  prctl(PR_SET_PDEATHSIG, SIGKILL);
  if (getppid() != parent) _exit(1);
  const int code = body();
  std::fflush(nullptr);
  _exit(code);
}

std::optional<ProcessEnd> end_of(std::int64_t pid) {
  siginfo_t info{};
  if (waitid(P_PID, static_cast<id_t>(pid), &info, WEXITED | WNOHANG | WNOWAIT) != 0 ||
      info.si_pid == 0) {
    return std::nullopt;
  }
  return info.si_code == CLD_EXITED ? ProcessEnd{info.si_status, 0} : ProcessEnd{0, info.si_status};
}

ProcessEnd reap(std::int64_t pid) {
  int status = 0;
  pid_t gone = -1;
  do {
    gone = waitpid(number(pid), &status, 0);
  } while (gone < 0 && errno == EINTR);
  if (gone < 0) return {.code = -1};  // no child of this process
  return WIFEXITED(status) ? ProcessEnd{.code = WEXITSTATUS(status)}
                           : ProcessEnd{.signal = WTERMSIG(status)};
}

void kill_process(std::int64_t pid) {
  kill(number(pid), SIGKILL);
}

void signal_group(std::int64_t group, int signal) {
  kill(-number(group), signal);
}

bool group_remains(std::int64_t group) {
  while (waitpid(-number(group), nullptr, WNOHANG) > 0) {
  }
  return kill(-number(group), 0) == 0;
}

void adopt_orphans() {
  prctl(PR_SET_CHILD_SUBREAPER, 1);
}

std::shared_ptr<void> forked_block(std::size_t bytes) {
  void* const at = mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0);
  if (at == MAP_FAILED) fail("cannot map shared memory");
  return {at, [bytes](void* block) { munmap(block, bytes); }};
}

SignalQueue::SignalQueue(std::initializer_list<int> signals) {
  sigset_t set;
  sigemptyset(&set);
  for (const int signal : signals) sigaddset(&set, signal);
  sigprocmask(SIG_BLOCK, &set, nullptr);
  queue_ = UniqueDescriptor(signalfd(-1, &set, SFD_NONBLOCK | SFD_CLOEXEC));
  if (!queue_) fail("signalfd");
}

int SignalQueue::next() {
  signalfd_siginfo info{};
  const bool came = read(queue_.get(), &info, sizeof info) == static_cast<ssize_t>(sizeof info);
  return came ? static_cast<int>(info.ssi_signo) : 0;
}

int become_program(const std::vector<std::string>& command) {
  std::vector<char*> arguments;
  for (const std::string& word : command) arguments.push_back(const_cast<char*>(word.c_str()));
  arguments.push_back(nullptr);
  execvp(arguments.front(), arguments.data());
  return errno;
}

void enter_network_namespace(const std::string& name) {
  const UniqueDescriptor file(open(("/run/netns/" + name).c_str(), O_RDONLY | O_CLOEXEC));
  if (file && setns(file.get(), CLONE_NEWNET) == 0) return;
  throw std::system_error(errno, std::generic_category(), "network namespace " + name);
}

}  // namespace ferry
