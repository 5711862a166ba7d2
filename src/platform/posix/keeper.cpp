#include "platform/posix/keeper.hpp"

#include <fcntl.h>
#include <sys/prctl.h>
#include <unistd.h>

#include <cerrno>
#include <csignal>
#include <system_error>
#include <vector>

#include "platform/posix/process_group.hpp"

namespace ferry {
namespace {

constexpr std::int64_t kDone = 0;

[[noreturn]] void keep(int pipe) {
  setsid();  // Ctrl-C and the end of the terminal are not for the keeper
  for (const int signal : {SIGINT, SIGTERM, SIGHUP, SIGQUIT}) ::signal(signal, SIG_IGN);
  prctl(PR_SET_NAME, "ferry-keeper");
  const int null = open("/dev/null", O_RDWR);
  for (int fd = 0; fd < 3 && null >= 0; ++fd) dup2(null, fd);
  std::vector<std::int64_t> groups;
  for (;;) {
    std::int64_t group = kDone;
    const ssize_t got = read(pipe, &group, sizeof group);  // shorter than PIPE_BUF: never torn
    if (got < 0 && errno == EINTR) continue;
    if (got == static_cast<ssize_t>(sizeof group)) {
      if (group == kDone) _exit(0);
      groups.push_back(group);
      continue;
    }
    for (const std::int64_t each : groups) signal_group(each, SIGKILL);
    _exit(0);
  }
}

}  // namespace

Keeper::Keeper() {
  int ends[2];
  if (pipe2(ends, O_CLOEXEC) != 0) {
    throw std::system_error(errno, std::generic_category(), "cannot make a pipe (pipe2)");
  }
  UniqueDescriptor read_end(ends[0]);
  pipe_ = UniqueDescriptor(ends[1]);
  pid_ = fork();
  if (pid_ < 0) throw std::system_error(errno, std::generic_category(), "cannot fork");
  if (pid_ == 0) {
    pipe_.reset();
    keep(read_end.get());
  }
}

Keeper::~Keeper() {
  watch(kDone);
  reap(pid_);
}

void Keeper::watch(std::int64_t group) {
  [[maybe_unused]] const ssize_t written = write(pipe_.get(), &group, sizeof group);
}

}  // namespace ferry
