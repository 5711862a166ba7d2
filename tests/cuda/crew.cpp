#include "crew.hpp"

#include <gtest/gtest.h>
#include <signal.h>
#include <sys/mman.h>
#include <sys/prctl.h>
#include <sys/wait.h>
#include <unistd.h>

#include <atomic>
#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <map>
#include <memory>
#include <new>
#include <thread>
#include <utility>

#include "board.hpp"

namespace ferry::test {
namespace {

using Clock = std::chrono::steady_clock;

/// What the processes of a crew share with the one that runs the tests.
struct Desk {
  std::atomic<std::uint64_t> job{0};
  char test[512]{};
  int body = 0;  // which call of run_on_crew in it
  std::atomic<std::uint64_t> done[kMostRanks]{};
  Board board{};
};

/// Set in a crew's process.
struct Worker {
  Desk* desk;
  int first, threads, ranks;  // its ranks, of all
  int calls = 0;              // of run_on_crew in this job
};
std::unique_ptr<Worker> worker;

void become_quiet() {
  auto& listeners = testing::UnitTest::GetInstance()->listeners();
  delete listeners.Release(listeners.default_result_printer());
  delete listeners.Release(listeners.default_xml_generator());
  for (const char* name : {"GTEST_TOTAL_SHARDS", "GTEST_SHARD_INDEX", "GTEST_SHARD_STATUS_FILE"}) {
    unsetenv(name);
  }
  GTEST_FLAG_SET(repeat, 1);
  GTEST_FLAG_SET(shuffle, false);
}

/// A crew's process: runs the test of each job until it is killed.
[[noreturn]] void serve(Desk& desk, int first, int threads, int ranks, pid_t parent) {
  prctl(PR_SET_PDEATHSIG, SIGKILL);
  if (getppid() != parent) _exit(1);
  become_quiet();
  tell_of_signals();
  worker = std::make_unique<Worker>(Worker{&desk, first, threads, ranks});
  for (std::uint64_t job = 1;; ++job) {
    while (desk.job.load(std::memory_order_acquire) < job) {
      std::this_thread::sleep_for(std::chrono::microseconds(200));
    }
    GTEST_FLAG_SET(filter, desk.test);
    worker->calls = 0;
    (void)!RUN_ALL_TESTS();
    desk.done[first].store(job, std::memory_order_release);
  }
}

class Crew {
 public:
  Crew(int ranks, int threads) : ranks_(ranks), threads_(threads) {
    void* memory =
        mmap(nullptr, sizeof(Desk), PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0);
    if (memory == MAP_FAILED) return;
    desk_ = new (memory) Desk();
    for (int first = 0; first < ranks; first += threads) {
      const pid_t parent = getpid();
      const pid_t child = fork();
      if (child == 0) serve(*desk_, first, threads, ranks, parent);
      children_.push_back(child);
    }
  }
  ~Crew() {
    for (const pid_t child : children_) kill(child, SIGKILL);
    for (const pid_t child : children_) waitpid(child, nullptr, 0);
    if (desk_ != nullptr) munmap(desk_, sizeof(Desk));
  }
  Crew(const Crew&) = delete;
  Crew& operator=(const Crew&) = delete;

  std::vector<std::string> run(const std::string& test, int body, int seconds) {
    if (desk_ == nullptr) return {"run_on_crew: no shared memory"};
    desk_->board.clear(ranks_);
    std::snprintf(desk_->test, sizeof desk_->test, "%s", test.c_str());
    desk_->body = body;
    const std::uint64_t job = desk_->job.load(std::memory_order_relaxed) + 1;
    desk_->job.store(job, std::memory_order_release);
    const auto until = Clock::now() + std::chrono::seconds(seconds);
    for (std::size_t i = 0; i < children_.size(); ++i) {
      const auto& done = desk_->done[static_cast<std::size_t>(threads_) * i];
      while (done.load(std::memory_order_acquire) < job && Clock::now() < until) {
        int status = 0;
        if (waitpid(children_[i], &status, WNOHANG) != 0) {
          children_.erase(children_.begin() + static_cast<std::ptrdiff_t>(i));
          desk_->board.note_end(threads_ * static_cast<int>(i), threads_, ranks_,
                                spell_end(status));
          return desk_->board.problems(ranks_);
        }
        std::this_thread::sleep_for(std::chrono::microseconds(500));
      }
    }
    return desk_->board.problems(ranks_);
  }

 private:
  int ranks_, threads_;
  Desk* desk_ = nullptr;
  std::vector<pid_t> children_;
};

/// How often the test that runs now has asked before.
int calls_before() {
  static const testing::TestInfo* last = nullptr;
  static testing::TimeInMillis last_start = 0;
  static int calls = 0;
  const testing::TestInfo* now = testing::UnitTest::GetInstance()->current_test_info();
  const testing::TimeInMillis start = now->result()->start_timestamp();
  if (now != last || start != last_start) calls = 0;
  last = now, last_start = start;
  return calls++;
}

}  // namespace

std::vector<std::string> run_on_crew(int ranks, int threads, const RankBody& body, int seconds) {
  if (worker) {
    if (worker->calls++ == worker->desk->body) {
      run_here(worker->desk->board, worker->first, worker->threads, worker->ranks, body);
    }
    return {};
  }
  static std::map<std::pair<int, int>, std::unique_ptr<Crew>> crews;
  const testing::TestInfo* test = testing::UnitTest::GetInstance()->current_test_info();
  auto& crew = crews[{ranks, threads}];
  if (!crew) crew = std::make_unique<Crew>(ranks, threads);
  const auto problems =
      crew->run(std::string(test->test_suite_name()) + "." + test->name(), calls_before(), seconds);
  if (!problems.empty()) crew.reset();
  return problems;
}

}  // namespace ferry::test
