// `ferry run`: the processes of one job, from start to end.
#pragma once
#include <chrono>
#include <cstdint>
#include <deque>
#include <optional>
#include <string>
#include <vector>

#include "platform/child_process.hpp"
#include "platform/posix/keeper.hpp"
#include "platform/posix/process_group.hpp"
#include "run/environment.hpp"
#include "run/job_options.hpp"
#include "run/ports.hpp"
#include "run/prefix.hpp"

namespace ferry::cli {

/// Starts the ranks, carries their output, and ends the group when one of them fails. Only one in
/// a process, made before any thread: it takes over signals and child processes.
class Job {
 public:
  explicit Job(const JobOptions& options);

  /// Returns the exit code of `ferry run`. Throws CannotStart.
  int run();

 private:
  using Clock = std::chrono::steady_clock;
  /// Between SIGTERM and SIGKILL.
  static constexpr std::chrono::milliseconds kKillAfter{2000};

  struct Stream {
    UniqueDescriptor fd{};
    PrefixedOutput* to = nullptr;
    LineSplitter lines{};
    PrefixedOutput::Source source{};
  };
  struct Rank {
    int rank = 0;
    std::int64_t pid = -1;
    std::optional<ProcessEnd> end{};
    Stream out{};
    Stream err{};
  };
  enum class Ending { not_yet, asked, forced };  // what the launcher did to end the group

  void start_ranks();
  void start_rank(int r, Entry entry);
  JobEnvironment one_host();
  JobEnvironment one_of_several();
  void wait_a_while(std::chrono::milliseconds longest);
  void read_stream(Stream& stream);
  void read_signals();
  void on_stop_signal(int signal);
  void on_suspend();
  void see_who_ended();
  // job_failures.cpp
  void on_failure(const Rank& rank);
  void on_loss(const Rank& rank);
  void end_group_in_time();
  int exit_code() const;
  int ended_well() const;
  int running() const;
  void finish();
  void reap_all();
  bool all_ended() const;
  bool any_stream_open() const;
  void say(const std::string& text);
  void signal_all(int signal);

  const JobOptions options_;
  PrefixedOutput::Terminal terminal_{};
  PrefixedOutput out_;
  PrefixedOutput err_;
  std::optional<Keeper> keeper_{};
  std::optional<ReservedPort> master_port_{};  // claimed while the job lives
  std::optional<ReservedPort> ferry_port_{};
  std::optional<SignalQueue> signals_{};
  JobEnvironment environment_{};
  std::string secret_{};
  std::deque<Rank> ranks_{};  // of an elastic job those before, too
  int restarted_ = 0;
  const Rank* first_failure_ = nullptr;
  bool ends_group_ = false;  // the others are ended after the grace
  Clock::time_point failed_at_{};
  Clock::time_point asked_at_{};
  Ending ending_ = Ending::not_yet;
  bool stop_requested_ = false;
  bool nobody_reads_ = false;
};

}  // namespace ferry::cli
