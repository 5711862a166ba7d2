#include "platform/test_child.hpp"

#include <sys/mman.h>
#include <sys/prctl.h>
#include <sys/wait.h>
#include <unistd.h>

#include <csignal>
#include <cstdio>
#include <new>
#include <system_error>
#include <utility>

namespace ferry::test {

std::shared_ptr<void> shared_block(std::size_t bytes) {
  void* const at = mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0);
  if (at == MAP_FAILED) throw std::bad_alloc();
  return {at, [bytes](void* block) { munmap(block, bytes); }};
}

Child::Child(const std::function<int()>& body) {
  constexpr unsigned kLongestLife = 60;  // seconds
  std::fflush(nullptr);
  const pid_t parent = getpid();
  const pid_t pid = fork();
  if (pid < 0) throw std::system_error(errno, std::generic_category(), "fork");
  if (pid == 0) {
    prctl(PR_SET_PDEATHSIG, SIGKILL);
    if (getppid() != parent) _exit(1);
    alarm(kLongestLife);
    const int code = body();
    std::fflush(nullptr);
    _exit(code);
  }
  pid_ = pid;
}

Child::~Child() {
  if (pid_ == 0) return;
  kill();
  wait();
}

Child::Child(Child&& other) noexcept : pid_(std::exchange(other.pid_, 0)) {}

void Child::kill() {
  if (pid_ != 0) ::kill(static_cast<pid_t>(pid_), SIGKILL);
}

bool Child::ended() const {
  siginfo_t info{};
  return pid_ == 0 ||
         (waitid(P_PID, static_cast<id_t>(pid_), &info, WEXITED | WNOHANG | WNOWAIT) == 0 &&
          info.si_pid != 0);
}

Child::End Child::wait() {
  int status = 0;
  waitpid(static_cast<pid_t>(std::exchange(pid_, 0)), &status, 0);
  return {.killed = WIFSIGNALED(status), .code = WIFEXITED(status) ? WEXITSTATUS(status) : -1};
}

}  // namespace ferry::test
