#include "shared_ranks.hpp"

#include <cuda_runtime_api.h>
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

/// Waits for a child; true if it ended with 0 in time.
bool ended_well(pid_t child, std::chrono::steady_clock::time_point until) {
  int status = 0;
  while (waitpid(child, &status, WNOHANG) == 0) {
    if (std::chrono::steady_clock::now() > until) kill(child, SIGKILL);
    std::this_thread::sleep_for(std::chrono::milliseconds(2));
  }
  return WIFEXITED(status) && WEXITSTATUS(status) == 0;
}

}  // namespace

void Board::clear(int count) {
  for (int r = 0; r < count; ++r) {
    ranks[r].given.store(0);
    std::snprintf(ranks[r].problem, sizeof Rank::problem,
                  "rank %d: its process ended before it did", r);
  }
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
      run_here(board, first, threads, ranks, body);
      _exit(0);
    }
    children.push_back(child);
  }
  const auto until = std::chrono::steady_clock::now() + std::chrono::seconds(seconds);
  for (const pid_t child : children) ended_well(child, until);
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
