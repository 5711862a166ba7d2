// Where no process can be forked: ranks are threads.
#include <stdexcept>

#include "fleet_board.hpp"

namespace ferry::conformance {

bool can_fork() {
  return false;
}

std::shared_ptr<Board> make_board() {
  return std::make_shared<Board>();
}

void run_processes(Board& /*board*/, const Fleet& /*fleet*/,
                   const std::function<void(Rank&)>& /*body*/) {
  throw std::logic_error("fleet: this system has no fork");
}

void run_threads_in_child(Board& board, const Fleet& fleet,
                          const std::function<void(Rank&)>& body) {
  run_threads(board, fleet, body);
}

}  // namespace ferry::conformance
