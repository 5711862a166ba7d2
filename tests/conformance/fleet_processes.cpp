#include <sys/prctl.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <csignal>
#include <cstdio>
#include <new>
#include <thread>
#include <vector>

#include "fleet_board.hpp"
#include "platform/test_child.hpp"

// There under the address sanitizer, which otherwise looks at exit() alone.
extern "C" int __lsan_do_recoverable_leak_check() __attribute__((weak));

namespace ferry::conformance {
namespace {

[[noreturn]] void child(Board& board, const Fleet& fleet, int r,
                        const std::function<void(Rank&)>& body) {
  prctl(PR_SET_PDEATHSIG, SIGKILL);
  {
    Rank rank(board, r, fleet.ranks, fleet.wires,
              custom_bootstrap(r, fleet.ranks, gather_on(board.gather, r, fleet.ranks)),
              device_of(fleet, r));
    run_rank(rank, board, body);
  }
  if (__lsan_do_recoverable_leak_check != nullptr && __lsan_do_recoverable_leak_check() != 0) {
    board.fail(r, "its process leaks memory");
  }
  std::fflush(nullptr);
  _exit(0);
}

}  // namespace

bool can_fork() {
  return true;
}

std::shared_ptr<Board> make_board() {
  const auto block = ferry::test::shared_block(sizeof(Board));
  return {block, new (block.get()) Board};
}

void run_processes(Board& board, const Fleet& fleet, const std::function<void(Rank&)>& body) {
  std::fflush(nullptr);
  std::vector<pid_t> children;
  for (int r = 0; r < fleet.ranks; ++r) {
    const pid_t pid = fork();
    if (pid == 0) child(board, fleet, r, body);
    if (pid < 0) board.fail(r, "could not be forked");
    children.push_back(pid);
  }
  int left = static_cast<int>(
      std::count_if(children.begin(), children.end(), [](pid_t pid) { return pid > 0; }));
  bool killed = false;
  for (int n = 0; left > 0; ++n) {
    std::this_thread::sleep_for(std::chrono::microseconds(n < 100 ? 200 : 2000));
    for (int r = 0; r < fleet.ranks; ++r) {
      pid_t& pid = children[static_cast<std::size_t>(r)];
      int status = 0;
      if (pid <= 0 || waitpid(pid, &status, WNOHANG) != pid) continue;
      pid = 0;
      --left;
      if (killed || (WIFEXITED(status) && WEXITSTATUS(status) == 0)) continue;
      if (r == fleet.victim && WIFSIGNALED(status)) {
        board.progress[r].ended = true;
        continue;
      }
      board.fail(r, WIFSIGNALED(status)
                        ? "its process was ended by signal " + std::to_string(WTERMSIG(status))
                        : "its process exited with " + std::to_string(WEXITSTATUS(status)));
    }
    const int rank = killed ? -1 : stuck(board, fleet);
    if (rank < 0) continue;
    board.fail(rank, "HANGS");
    killed = true;
    for (const pid_t pid : children) {
      if (pid > 0) kill(pid, SIGKILL);
    }
  }
}

void run_threads_in_child(Board& board, const Fleet& fleet,
                          const std::function<void(Rank&)>& body) {
  std::fflush(nullptr);
  const pid_t pid = fork();
  if (pid == 0) {
    prctl(PR_SET_PDEATHSIG, SIGKILL);
    run_threads(board, fleet, body);
    std::fflush(nullptr);
    _exit(0);
  }
  int status = 0;
  if (pid < 0 || waitpid(pid, &status, 0) != pid || status != 0) {
    board.fail(0, "the process of all ranks ended with status " + std::to_string(status));
  }
}

}  // namespace ferry::conformance
