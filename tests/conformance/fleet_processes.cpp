#include <algorithm>
#include <chrono>
#include <new>
#include <string>
#include <thread>
#include <vector>

#include "fleet_board.hpp"
#include "platform/test_child.hpp"

// There under the address sanitizer, which otherwise looks at exit() alone.
extern "C" int __lsan_do_recoverable_leak_check() __attribute__((weak));

namespace ferry::conformance {
namespace {

constexpr auto kForEver = std::chrono::seconds(0);

int child(Board& board, const Fleet& fleet, int r, const std::function<void(Rank&)>& body) {
  {
    Rank rank(board, r, fleet.ranks, fleet.wires,
              custom_bootstrap(r, fleet.ranks, gather_on(board.gather, r, fleet.ranks)),
              device_of(fleet, r));
    run_rank(rank, board, body);
  }
  if (__lsan_do_recoverable_leak_check != nullptr && __lsan_do_recoverable_leak_check() != 0) {
    board.fail(r, "its process leaks memory");
  }
  return 0;
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
  std::vector<ferry::test::Child> children;
  for (int r = 0; r < fleet.ranks; ++r) {
    children.emplace_back([&, r] { return child(board, fleet, r, body); }, kForEver);
  }
  std::vector<bool> left(children.size(), true);
  bool killed = false;
  for (int n = 0; std::find(left.begin(), left.end(), true) != left.end(); ++n) {
    std::this_thread::sleep_for(std::chrono::microseconds(n < 100 ? 200 : 2000));
    for (int r = 0; r < fleet.ranks; ++r) {
      const auto at = static_cast<std::size_t>(r);
      if (!left[at] || !children[at].ended()) continue;
      left[at] = false;
      const auto end = children[at].wait();
      if (killed || end.good()) continue;
      if (r == fleet.victim && end.killed) {
        board.progress[r].ended = true;
        continue;
      }
      board.fail(r, (end.killed ? "its process was ended by signal " : "its process exited with ") +
                        std::to_string(end.code));
    }
    const int rank = killed ? -1 : stuck(board, fleet);
    if (rank < 0) continue;
    board.fail(rank, "HANGS");
    killed = true;
    for (ferry::test::Child& one : children) one.kill();
  }
}

void run_threads_in_child(Board& board, const Fleet& fleet,
                          const std::function<void(Rank&)>& body) {
  ferry::test::Child all(
      [&] {
        run_threads(board, fleet, body);
        return 0;
      },
      kForEver);
  const auto end = all.wait();
  if (!end.good()) {
    board.fail(0, std::string("the process of all ranks ended with ") +
                      (end.killed ? "signal " : "code ") + std::to_string(end.code));
  }
}

}  // namespace ferry::conformance
