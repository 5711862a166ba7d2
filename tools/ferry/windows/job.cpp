// `ferry run` on Windows. The ranks are in a job object that ends with this process, and so are the
// processes that they start.
#include <fmt/format.h>
#include <fmt/ranges.h>

#include <algorithm>
#include <cstdlib>
#include <deque>
#include <mutex>
#include <optional>
#include <span>
#include <system_error>
#include <thread>

#include "platform/windows/child_process.hpp"
#include "run/environment.hpp"
#include "run/job_options.hpp"
#include "run/ports.hpp"
#include "run/prefix.hpp"

namespace ferry::cli {

namespace {

using JobClock = std::chrono::steady_clock;
constexpr unsigned kTerminated = 143;  // as a shell says of SIGTERM
constexpr unsigned kInterrupted = 130;
constexpr auto kJobPollPeriod = std::chrono::milliseconds(5);

/// The processes of one job, from start to end.
class WindowsJob {
 public:
  explicit WindowsJob(const JobOptions& options)
      : options_(options),
        out_(1, options.ranks, options.prefix, terminal_),
        err_(2, options.ranks, options.prefix, terminal_) {}

  int run() {
    const ReservedPort master = options_.port != 0 ? ReservedPort(options_.port) : ReservedPort();
    const ReservedPort ferry;
    const JobEnvironment environment{
        .ranks = options_.ranks, .master_port = master.number(), .ferry_port = ferry.number()};
    const char* const given = std::getenv("FERRY_SECRET");
    const std::string secret = given != nullptr && *given != '\0' ? given : random_secret();
    for (int r = 0; r < options_.ranks; ++r) {
      start(r, environment_of_rank(environment, secret, r));
    }
    while (!see_who_ended()) end_group_in_time();
    windows::end_started(kTerminated);  // what ranks left behind
    for (std::thread& reader : readers_) reader.join();
    for (PrefixedOutput* output : {&out_, &err_}) {
      output->end_bar();
      output->flush();
    }
    return first_failure_ ? ranks_[*first_failure_].end->code : 0;
  }

 private:
  struct Started {
    Process process{};
    std::optional<ProcessEnd> end{};
  };

  void start(int rank, const std::vector<std::string>& environment) {
    const bool piped = rank != options_.tty_rank;
    int refused = 0;
    Process process = start_process({.command = options_.command,
                                     .environment = environment,
                                     .output = piped ? Output::piped : Output::inherited},
                                    refused);
    if (refused != 0) {
      throw CannotStart(fmt::format("cannot start '{}': {}", options_.command.front(),
                                    std::system_category().message(refused)));
    }
    if (piped) {
      readers_.emplace_back(
          [this, rank, pipe = std::move(process.out)] { read(rank, pipe, out_); });
      readers_.emplace_back(
          [this, rank, pipe = std::move(process.err)] { read(rank, pipe, err_); });
    }
    ranks_.push_back({std::move(process)});
  }

  void read(int rank, const UniqueDescriptor& pipe, PrefixedOutput& to) {
    LineSplitter lines;
    PrefixedOutput::Source source{rank, {}};
    const auto sink = [&](std::string_view line, LineEnd end) { to.add(source, line, end); };
    std::vector<char> bytes(std::size_t{1} << 16);
    for (bool ended = false; !ended;) {
      const Transfer got = read_from(pipe, std::as_writable_bytes(std::span(bytes)));
      const std::lock_guard lock(mutex_);
      lines.feed({bytes.data(), got.bytes}, sink);
      if (got.ended) lines.finish(sink);
      to.flush();
      ended = got.ended;
    }
  }

  void say(const std::string& text) {
    const std::lock_guard lock(mutex_);
    err_.add_message("ferry run: " + text);
    err_.flush();
  }

  /// Waits a moment. True when all have ended.
  bool see_who_ended() {
    std::this_thread::sleep_for(kJobPollPeriod);
    bool all = true;
    for (std::size_t r = 0; r < ranks_.size(); ++r) {
      Started& rank = ranks_[r];
      if (!rank.end && (rank.end = end_of(rank.process)) && rank.end->failed()) on_failure(r);
      all = all && rank.end;
    }
    return all;
  }

  void on_failure(std::size_t rank) {
    if (first_failure_ && !options_.keep_going) return;  // a consequence
    const Started& it = ranks_[rank];
    const bool alone = std::all_of(ranks_.begin(), ranks_.end(),
                                   [](const Started& each) { return each.end.has_value(); });
    say(fmt::format("rank {} (pid {}) exited with code {}{}", rank, it.process.pid, it.end->code,
                    alone                 ? std::string()
                    : options_.keep_going ? "; the other ranks go on (--keep-going)"
                                          : fmt::format("; the other ranks are ended after the "
                                                        "grace of {} s",
                                                        options_.grace.count() / 1000.0)));
    if (first_failure_) return;
    first_failure_ = rank;
    failed_at_ = JobClock::now();
  }

  void end_group_in_time() {
    if (windows::interrupts() >= 2) windows::end_started(kInterrupted);
    if (!first_failure_ || options_.keep_going || forced_ ||
        JobClock::now() < failed_at_ + options_.grace) {
      return;
    }
    std::vector<std::size_t> left;
    for (std::size_t r = 0; r < ranks_.size(); ++r) {
      if (!ranks_[r].end) left.push_back(r);
    }
    if (left.empty()) return;
    say(fmt::format("ending rank{} {}, still running {} s after rank {} failed",
                    left.size() == 1 ? "" : "s", fmt::join(left, ", "),
                    options_.grace.count() / 1000.0, *first_failure_));
    windows::end_started(kTerminated);
    forced_ = true;
  }

  const JobOptions& options_;
  PrefixedOutput::Terminal terminal_{};
  std::mutex mutex_{};  // of the outputs
  PrefixedOutput out_;
  PrefixedOutput err_;
  std::deque<Started> ranks_{};
  std::vector<std::thread> readers_{};
  std::optional<std::size_t> first_failure_{};
  JobClock::time_point failed_at_{};
  bool forced_ = false;
};

}  // namespace

int run_job(const JobOptions& options) {
  if (!options.hosts.empty()) {
    throw std::runtime_error("--hosts: on Windows the ranks are of one host");
  }
  if (options.least > 0) {
    throw std::runtime_error("--elastic: there are no elastic groups on Windows yet");
  }
  windows::take_console();
  return WindowsJob(options).run();
}

}  // namespace ferry::cli
