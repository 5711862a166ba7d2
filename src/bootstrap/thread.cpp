// Ranks as threads of one process: a rendezvous in shared memory.
#include <ferry/bootstrap.hpp>
#include <ferry/error.hpp>

#include <algorithm>
#include <condition_variable>
#include <mutex>
#include <optional>
#include <string>
#include <utility>

#include "base/log.hpp"
#include "base/text.hpp"
#include "base/wait_notice.hpp"
#include "bootstrap/wait.hpp"

namespace ferry {
namespace {

using bootstrap::Clock;
using Parts = std::vector<std::vector<std::byte>>;

// Why the ranks cannot meet any more. The first reason stays: later ones are its consequences.
struct Failure {
  ErrorKind kind = ErrorKind::peer_failed;
  int peer = -1;               // who is named
  int by = -1;                 // deadline: who gave up
  std::vector<int> missing{};  // deadline: who had not come
  std::string text{};          // follows "rank N: all_gather G: "
};

class Rendezvous {
 public:
  explicit Rendezvous(int ranks) : size_(ranks), given_(std::size_t(ranks)), here_(given_.size()) {}

  int size() const { return size_; }
  Parts gather(int rank, std::span<const std::byte> mine, std::chrono::nanoseconds deadline,
               const OnWait& on_wait, const std::string& stage);
  void leave(int rank);

 private:
  void give(int rank, std::span<const std::byte> mine);
  void finish_round();
  void fail(Failure failure);
  std::vector<int> missing() const;
  [[noreturn]] void raise(int rank) const;

  const int size_;
  const std::chrono::nanoseconds notice_after_ = wait_notice_after();
  std::mutex mutex_;
  std::condition_variable changed_;
  // All below is guarded by mutex_.
  std::uint64_t round_ = 0;            // rounds finished
  std::size_t count_ = 0;              // ranks that gave in this round
  Parts given_;                        // of this round
  std::vector<bool> here_;             // who gave in this round
  std::shared_ptr<const Parts> last_;  // of round_ - 1; the next cannot finish before all took it
  int left_ = -1;                      // a rank that left
  std::optional<Failure> failure_;
};

std::vector<int> Rendezvous::missing() const {
  std::vector<int> out;
  for (int r = 0; r < size_; ++r) {
    if (!here_[std::size_t(r)]) out.push_back(r);
  }
  return out;
}

void Rendezvous::fail(Failure failure) {
  if (!failure_) failure_ = std::move(failure);
  changed_.notify_all();
}

void Rendezvous::raise(int rank) const {
  const Failure& f = *failure_;
  ErrorKind kind = f.kind;
  int peer = f.peer;
  std::string text = f.text;
  if (kind == ErrorKind::deadline &&
      std::find(f.missing.begin(), f.missing.end(), rank) != f.missing.end()) {
    kind = ErrorKind::peer_failed;
    peer = f.by;
    text = "this rank came too late: rank " + std::to_string(f.by) +
           " reached its deadline; give a longer deadline, or see what held this rank up";
  }
  throw Error(
      kind, "rank " + std::to_string(rank) + ": all_gather " + std::to_string(round_) + ": " + text,
      {.rank = rank,
       .peer = peer,
       .stage = "bootstrap: all_gather",
       .generation = round_,
       .expected = std::uint64_t(size_),
       .seen = count_});
}

void Rendezvous::give(int rank, std::span<const std::byte> mine) {
  if (here_[std::size_t(rank)]) {
    throw Error(ErrorKind::invalid_argument,
                "rank " + std::to_string(rank) +
                    ": all_gather was called by two threads at once; each rank calls it from one "
                    "thread at a time",
                {.rank = rank, .stage = "bootstrap: all_gather", .generation = round_});
  }
  given_[std::size_t(rank)].assign(mine.begin(), mine.end());
  here_[std::size_t(rank)] = true;
  if (++count_ == here_.size()) finish_round();
}

void Rendezvous::finish_round() {
  last_ = std::make_shared<const Parts>(std::exchange(given_, Parts(here_.size())));
  here_.assign(here_.size(), false);
  count_ = 0;
  ++round_;
  changed_.notify_all();
}

Parts Rendezvous::gather(int rank, std::span<const std::byte> mine,
                         std::chrono::nanoseconds deadline, const OnWait& on_wait,
                         const std::string& stage) {
  const Clock::time_point due = bootstrap::due_after(deadline);
  WaitNotice notice(notice_after_, Clock::now(), due);
  std::unique_lock lock(mutex_);
  if (!failure_ && left_ >= 0) {
    fail({.kind = ErrorKind::peer_left,
          .peer = left_,
          .text = "rank " + std::to_string(left_) + " left: its bootstrap was destroyed"});
  }
  if (failure_) raise(rank);
  const std::uint64_t round = round_;
  give(rank, mine);
  // A finished round counts before a failure: who left after it is no loss.
  while (round_ == round) {
    if (failure_) raise(rank);
    if (Clock::now() >= due) {
      const std::vector<int> late = missing();
      fail({.kind = ErrorKind::deadline,
            .peer = late.front(),
            .by = rank,
            .missing = late,
            .text = spell_ranks(late) + " did not come within " + bootstrap::spell(deadline) +
                    " (deadline of rank " + std::to_string(rank) +
                    "); see whether that rank still runs, or give a longer deadline"});
      raise(rank);
    }
    changed_.wait_until(lock, std::min(due, Clock::now() + bootstrap::kWaitSlice));
    if (round_ == round && Clock::now() >= notice.next()) {
      const std::string late = spell_ranks(missing());
      lock.unlock();  // whoever reads stderr may be slow
      notice.say(rank, for_others("", stage) + ": " + late + " did not come yet");
      lock.lock();
    }
    if (!on_wait) continue;
    lock.unlock();
    try {
      on_wait();
    } catch (...) {
      lock.lock();
      if (round_ == round) {
        fail({.kind = ErrorKind::peer_failed,
              .peer = rank,
              .text = "rank " + std::to_string(rank) + " was interrupted while it waited"});
      }
      throw;
    }
    lock.lock();
  }
  const std::shared_ptr<const Parts> parts = last_;
  lock.unlock();
  return *parts;
}

void Rendezvous::leave(int rank) {
  const std::lock_guard lock(mutex_);
  if (left_ < 0) left_ = rank;
  if (count_ == 0) return;  // nobody waits for this rank
  fail({.kind = ErrorKind::peer_left,
        .peer = rank,
        .text = "rank " + std::to_string(rank) + " left: its bootstrap was destroyed"});
}

class ThreadBootstrap final : public Bootstrap {
 public:
  ThreadBootstrap(int rank, std::shared_ptr<Rendezvous> rendezvous)
      : rank_(rank), rendezvous_(std::move(rendezvous)) {}
  ~ThreadBootstrap() override { rendezvous_->leave(rank_); }
  ThreadBootstrap(const ThreadBootstrap&) = delete;
  ThreadBootstrap& operator=(const ThreadBootstrap&) = delete;

  int rank() const override { return rank_; }
  int size() const override { return rendezvous_->size(); }
  Parts all_gather(std::span<const std::byte> mine, std::chrono::nanoseconds deadline,
                   const OnWait& on_wait) override {
    return rendezvous_->gather(rank_, mine, deadline, on_wait, stage());
  }

 private:
  const int rank_;
  const std::shared_ptr<Rendezvous> rendezvous_;
};

}  // namespace

std::vector<std::shared_ptr<Bootstrap>> thread_bootstrap(int ranks) {
  read_log_level();
  if (ranks < 1) {
    throw Error(ErrorKind::invalid_argument,
                "thread_bootstrap: ranks is " + std::to_string(ranks) + ", expected at least 1");
  }
  const auto rendezvous = std::make_shared<Rendezvous>(ranks);
  std::vector<std::shared_ptr<Bootstrap>> out;
  for (int r = 0; r < ranks; ++r) out.push_back(std::make_shared<ThreadBootstrap>(r, rendezvous));
  return out;
}

}  // namespace ferry
