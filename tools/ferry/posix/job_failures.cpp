// What `ferry run` does about ranks that fail: it ends the others, lets them go on, or, in an
// elastic job, starts processes that take their places.
#include <fmt/format.h>
#include <fmt/ranges.h>

#include <algorithm>
#include <csignal>
#include <exception>

#include "posix/job.hpp"
#include "posix/process_end.hpp"

namespace ferry::cli {

int Job::running() const {
  return static_cast<int>(
      std::count_if(ranks_.begin(), ranks_.end(), [](const Rank& rank) { return !rank.end; }));
}

int Job::ended_well() const {
  return static_cast<int>(std::count_if(ranks_.begin(), ranks_.end(), [](const Rank& rank) {
    return rank.end && !rank.end->failed();
  }));
}

int Job::exit_code() const {
  if (first_failure_ == nullptr) return 0;
  const bool enough = options_.least > 0 && ended_well() >= options_.least && !ends_group_;
  return enough ? 0 : first_failure_->end->exit_code();
}

void Job::on_failure(const Rank& rank) {
  if (options_.least > 0) return on_loss(rank);
  const bool first = first_failure_ == nullptr;
  if (first) {
    first_failure_ = &rank;
    failed_at_ = Clock::now();
    ends_group_ = !options_.keep_going;
  }
  if (!first && !options_.keep_going) return;  // a consequence
  const bool alone = all_ended();
  const char* next = alone                 ? ""
                     : options_.keep_going ? "; the other ranks go on (--keep-going)"
                                           : "; the other ranks are ended after the grace of ";
  const std::string grace =
      alone || options_.keep_going ? "" : fmt::format("{} s", options_.grace.count() / 1000.0);
  say(fmt::format("rank {} (pid {}) {}{}{}", rank.rank, rank.pid, describe(*rank.end), next,
                  grace));
}

void Job::end_group_in_time() {
  if (!ends_group_ || all_ended()) return;
  const Clock::time_point now = Clock::now();
  if (ending_ == Ending::not_yet && now >= failed_at_ + options_.grace) {
    std::vector<int> left;
    for (const Rank& rank : ranks_) {
      if (!rank.end) left.push_back(rank.rank);
    }
    say(fmt::format("ending rank{} {}, still running {} s after rank {} failed",
                    left.size() == 1 ? "" : "s", fmt::join(left, ", "),
                    options_.grace.count() / 1000.0, first_failure_->rank));
    signal_all(SIGTERM);
    signal_all(SIGCONT);  // a stopped process does not see SIGTERM
    ending_ = Ending::asked;
    asked_at_ = now;
  } else if (ending_ == Ending::asked && now >= asked_at_ + kKillAfter) {
    signal_all(SIGKILL);
    ending_ = Ending::forced;
  }
}

void Job::on_loss(const Rank& rank) {
  if (first_failure_ == nullptr) first_failure_ = &rank;
  if (ends_group_ || stop_requested_) return;  // a consequence
  const std::string lost =
      fmt::format("rank {} (pid {}) {}", rank.rank, rank.pid, describe(*rank.end));
  const int left = running();
  // Who has ended well has left the group: those that still run are about to. Where all that this
  // command started have failed, those of other commands may run.
  const bool more = environment_.hosts > 1 || options_.joins || !options_.only.empty();
  const bool over = ended_well() > 0 || (left == 0 && !more);
  std::string next;
  if (!over && restarted_ < options_.restarts) {
    try {
      start_rank(rank.rank - environment_.host * options_.ranks, Entry::joins);
      ++restarted_;
      return say(fmt::format("{}; process {} takes its place (restart {} of {})", lost,
                             ranks_.back().pid, restarted_, options_.restarts));
    } catch (const std::exception& error) {
      next = fmt::format(", and could not be started again: {}", error.what());
    }
  } else if (!over) {
    next = fmt::format("; {}", options_.restarts == 0 ? "no restarts were allowed (--restarts)"
                                                      : "all restarts are used up");
  }
  if (left + ended_well() >= options_.least) {
    const std::string others =
        left == 0 ? std::string() : fmt::format("; the other {} go on", left);
    return say(lost + next + others);
  }
  say(fmt::format("{}{}; {} of at least {} ranks are left{}", lost, next, left + ended_well(),
                  options_.least,
                  left == 0 ? std::string()
                            : fmt::format(", which are ended after the grace of {} s",
                                          options_.grace.count() / 1000.0)));
  first_failure_ = &rank;
  failed_at_ = Clock::now();
  ends_group_ = true;
}

}  // namespace ferry::cli
