#include "shared_ranks.hpp"

#include <cuda_runtime_api.h>
#include <execinfo.h>
#include <signal.h>
#include <sys/mman.h>
#include <sys/wait.h>
#include <unistd.h>

#include <cstdio>
#include <cstring>
#include <new>
#include <stdexcept>
#include <thread>

#include "board.hpp"

namespace ferry::test {
namespace {

class BoardBootstrap final : public Bootstrap {
 public:
  BoardBootstrap(Board& board, int rank, int size) : board_(board), rank_(rank), size_(size) {}
  int rank() const override { return rank_; }
  int size() const override { return size_; }
  // Two slots suffice, as in a swap.
  std::vector<std::vector<std::byte>> all_gather(std::span<const std::byte> mine,
                                                 std::chrono::nanoseconds deadline,
                                                 const OnWait& on_wait) override {
    const auto until = std::chrono::steady_clock::now() + deadline;
    const std::size_t slot = ++generation_ % 2;
    if (mine.size() > kSlot) throw std::runtime_error("the test's all_gather takes less");
    Board::Rank& own = board_.ranks[rank_];
    if (!mine.empty()) std::memcpy(own.slot[slot], mine.data(), mine.size());
    own.bytes[slot] = mine.size();
    own.given.store(generation_, std::memory_order_release);
    std::vector<std::vector<std::byte>> all;
    for (int r = 0; r < size_; ++r) {
      const Board::Rank& other = board_.ranks[r];
      while (other.given.load(std::memory_order_acquire) < generation_) {
        if (std::chrono::steady_clock::now() > until) {
          throw std::runtime_error("all_gather: rank " + std::to_string(r) + " did not come");
        }
        if (on_wait) on_wait();
        std::this_thread::sleep_for(std::chrono::microseconds(50));
      }
      all.emplace_back(other.slot[slot], other.slot[slot] + other.bytes[slot]);
    }
    return all;
  }

 private:
  Board& board_;
  int rank_;
  int size_;
  std::uint64_t generation_ = 0;
};

void run_rank(Board& board, int rank, int ranks, const RankBody& body) {
  char* problem = board.ranks[rank].problem;
  try {
    BoardBootstrap bootstrap(board, rank, ranks);
    body(bootstrap);
    problem[0] = '\0';
  } catch (const std::exception& error) {
    std::snprintf(problem, sizeof Board::Rank::problem, "rank %d: %s", rank, error.what());
  }
}

constexpr const char* kEndedWell = "exit status 0";

std::string unended(int rank) {
  return "rank " + std::to_string(rank) + ": it did not end";
}

/// A signal of an error has come; it is raised anew, by SA_RESETHAND.
void tell_where(int signal) {
  constexpr char kIntro[] = "a rank's process is ended by a signal; it was in\n";
  (void)!write(STDERR_FILENO, kIntro, sizeof kIntro - 1);
  void* frames[48];
  backtrace_symbols_fd(frames, backtrace(frames, 48), STDERR_FILENO);
  raise(signal);
}

/// Waits for a child, which is killed when it has not ended by then; how it ended.
std::string await_end(pid_t child, std::chrono::steady_clock::time_point until) {
  int status = 0;
  bool late = false;
  while (waitpid(child, &status, WNOHANG) == 0) {
    if (std::chrono::steady_clock::now() > until) {
      late = true;
      kill(child, SIGKILL);
    }
    std::this_thread::sleep_for(std::chrono::milliseconds(2));
  }
  return late ? "it was killed, as it had not ended in time" : spell_end(status);
}

}  // namespace

void Board::clear(int count) {
  for (int r = 0; r < count; ++r) {
    ranks[r].given.store(0);
    std::snprintf(ranks[r].problem, sizeof Rank::problem, "%s", unended(r).c_str());
  }
}

void Board::note_end(int first, int threads, int count, const std::string& how) {
  for (int r = first; r < first + threads && r < count; ++r) {
    char* problem = ranks[r].problem;
    const bool ended_well = problem[0] == '\0' && how == kEndedWell;
    if (ended_well || (problem[0] != '\0' && problem != unended(r))) continue;
    std::snprintf(problem, sizeof Rank::problem, "rank %d: its process ended before it did: %s", r,
                  how.c_str());
  }
}

void tell_of_signals() {
  void* first[1];
  backtrace(first, 1);  // loads what it needs, now
  struct sigaction action{};
  action.sa_handler = tell_where;
  action.sa_flags = SA_RESETHAND | SA_NODEFER;
  for (const int signal : {SIGSEGV, SIGBUS, SIGABRT, SIGFPE, SIGILL}) {
    sigaction(signal, &action, nullptr);
  }
}

std::string spell_end(int status) {
  if (!WIFSIGNALED(status)) return "exit status " + std::to_string(WEXITSTATUS(status));
  const int signal = WTERMSIG(status);
  return "signal " + std::to_string(signal) + " (" + strsignal(signal) + ")";
}

std::vector<std::string> Board::problems(int count) const {
  std::vector<std::string> all;
  for (int r = 0; r < count; ++r) {
    if (ranks[r].problem[0] != '\0') all.emplace_back(ranks[r].problem);
  }
  return all;
}

void run_here(Board& board, int first, int threads, int ranks, const RankBody& body) {
  std::vector<std::thread> others;
  for (int t = 0; t < threads && first + t < ranks; ++t) {
    others.emplace_back([&, r = first + t] { run_rank(board, r, ranks, body); });
  }
  for (std::thread& other : others) other.join();
}

std::vector<std::string> run_ranks(int ranks, int threads, const RankBody& body, int seconds) {
  void* memory =
      mmap(nullptr, sizeof(Board), PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0);
  if (memory == MAP_FAILED || ranks > kMostRanks) return {"run_ranks: no shared memory"};
  Board& board = *new (memory) Board();
  board.clear(ranks);
  std::vector<pid_t> children;
  for (int first = 0; first < ranks; first += threads) {
    const pid_t child = fork();
    if (child == 0) {
      tell_of_signals();
      run_here(board, first, threads, ranks, body);
      _exit(0);
    }
    children.push_back(child);
  }
  const auto until = std::chrono::steady_clock::now() + std::chrono::seconds(seconds);
  int first = 0;
  for (const pid_t child : children) {
    board.note_end(first, threads, ranks, await_end(child, until));
    first += threads;
  }
  const std::vector<std::string> problems = board.problems(ranks);
  munmap(memory, sizeof(Board));
  return problems;
}

int gpu_count() {
  static const int count = [] {
    const pid_t child = fork();
    if (child == 0) {
      int seen = 0;
      _exit(cudaGetDeviceCount(&seen) == cudaSuccess ? seen : 0);
    }
    int status = 0;
    waitpid(child, &status, 0);
    return WIFEXITED(status) ? WEXITSTATUS(status) : 0;
  }();
  return count;
}

}  // namespace ferry::test
