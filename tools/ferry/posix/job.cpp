#include "posix/job.hpp"

#include <fmt/format.h>
#include <fmt/ranges.h>

#include <algorithm>
#include <array>
#include <cerrno>
#include <csignal>
#include <cstdlib>
#include <cstring>
#include <span>
#include <string_view>
#include <system_error>

#include "platform/limits.hpp"
#include "platform/terminal.hpp"

namespace ferry::cli {
namespace {

using std::chrono::milliseconds;

constexpr milliseconds kLeftoverTime{500};       // for what a rank left behind to end by itself
constexpr milliseconds kLeftoverPollPeriod{20};  // between two polls of what was left behind
constexpr int kBrokenPipeCode = 128 + SIGPIPE;

// What to do when a port that all commands of the job name is in use.
std::string_view port_advice(const JobOptions& options) {
  if (options.least == 0) return "choose another with --port, the same on all hosts";
  return "to join a group that runs there, add --join; to begin another one, choose another "
         "--port, the same for all commands of the group";
}

// A terminal would stop a process of the background that reads from it.
bool stdin_can_be_passed_on() {
  return is_open(0) && !is_terminal(0);
}

int all_ranks(const JobOptions& options) {
  return options.ranks * std::max(1, static_cast<int>(options.hosts.size()));
}

bool is_given(const char* name) {
  const char* value = std::getenv(name);
  return value != nullptr && *value != '\0';
}

/// Empty: the ranks read it from FERRY_SECRET_FILE.
std::string job_secret() {
  if (is_given("FERRY_SECRET")) return std::getenv("FERRY_SECRET");
  return is_given("FERRY_SECRET_FILE") ? std::string() : random_secret();
}

/// Which limit is in the way when a rank cannot be started, and how much is needed.
std::string remedy(int error, int ranks) {
  if (const auto limit = limit_of(Limit::open_files); error == EMFILE && limit) {
    constexpr int kOwn = 32;  // of the launcher, and of a rank while it starts
    return fmt::format(
        "; this process may have {} files open (ulimit -n), and {} ranks need about {}; raise "
        "it before: ulimit -n {}",
        *limit, ranks, 2 * ranks + kOwn, 2 * ranks + kOwn);
  }
  if (error == EAGAIN) {
    const auto limit = limit_of(Limit::threads);
    return fmt::format(
        "; no more processes{}; raise the limit, also that of the container "
        "(pids.max), or start fewer than {} ranks",
        limit ? fmt::format(": this user may have {} (ulimit -u)", *limit) : std::string(), ranks);
  }
  return error == ENOMEM ? "; raise the limit of memory (ulimit -v), or start fewer ranks" : "";
}

std::string reason_not_started(const std::string& program, int reason) {
  std::string hint;
  if (reason == ENOENT && program.find('/') == std::string::npos) {
    hint = "; it is not in PATH (a program of this folder is ./" + program + ")";
  } else if (reason == EACCES) {
    hint = "; it must be a file with the right to execute (chmod +x)";
  } else if (reason == ENOEXEC) {
    hint =
        "; it is not a program of this machine, and a script needs a first line like "
        "#!/usr/bin/env python3";
  }
  return fmt::format("cannot start '{}': {}{}", program, std::strerror(reason), hint);
}

}  // namespace

Job::Job(const JobOptions& options)
    : options_(options),
      out_(1, all_ranks(options), options.prefix, terminal_),
      err_(2, all_ranks(options), options.prefix, terminal_) {}

int Job::run() {
  std::signal(SIGPIPE, SIG_IGN);
  signals_.emplace({SIGCHLD, SIGINT, SIGTERM, SIGHUP, SIGQUIT, SIGTSTP});
  adopt_orphans();  // what a rank leaves behind, so that we can see it end
  keeper_.emplace();
  try {
    start_ranks();
  } catch (...) {
    signal_all(SIGKILL);
    reap_all();
    throw;
  }
  while (!all_ended()) {
    wait_a_while(milliseconds(1000));
    see_who_ended();
    end_group_in_time();
  }
  finish();
  if (nobody_reads_) return kBrokenPipeCode;
  return exit_code();
}

int run_job(const JobOptions& options) {
  return Job(options).run();
}

JobEnvironment Job::one_host() {
  // Ferry and torch.distributed each listen on a port of their own.
  if (options_.least > 0 && options_.port != 0) {  // another command may start processes that join
    if (!options_.joins) master_port_.emplace(options_.port, port_advice(options_));
    const auto next = static_cast<std::uint16_t>(options_.port + 1);
    return {.ranks = options_.ranks, .master_port = options_.port, .ferry_port = next};
  }
  master_port_ = options_.port != 0 ? ReservedPort(options_.port) : ReservedPort();
  ferry_port_.emplace();
  return {.ranks = options_.ranks,
          .master_port = master_port_->number(),
          .ferry_port = ferry_port_->number()};
}

/// Of several hosts each runs the same command, so nothing may be drawn or looked for.
JobEnvironment Job::one_of_several() {
  if (options_.port == 0) {
    throw std::runtime_error(
        "--hosts needs --port, the same on all hosts: MASTER_PORT, and FERRY_PORT is the next");
  }
  if (!is_given("FERRY_SECRET") && !is_given("FERRY_SECRET_FILE")) {
    throw std::runtime_error(
        "--hosts needs FERRY_SECRET (or FERRY_SECRET_FILE), the same random text on all hosts: "
        "once `openssl rand -hex 16`, then `export FERRY_SECRET=...` on each");
  }
  const int host = own_place(options_.hosts);
  const auto next = static_cast<std::uint16_t>(options_.port + 1);
  if (host == 0 && !options_.joins) {  // where both listen
    master_port_.emplace(options_.port, port_advice(options_));
    ferry_port_.emplace(next, port_advice(options_));
  }
  return {.ranks = options_.ranks,
          .hosts = static_cast<int>(options_.hosts.size()),
          .host = host,
          .master = options_.hosts.front(),
          .address = options_.hosts[static_cast<std::size_t>(host)],
          .master_port = options_.port,
          .ferry_port = next};
}

void Job::start_ranks() {
  environment_ = options_.hosts.empty() ? one_host() : one_of_several();
  secret_ = job_secret();
  if (options_.only.empty()) {
    for (int r = 0; r < options_.ranks; ++r) {
      start_rank(r, options_.joins ? Entry::joins : Entry::together);
    }
  }
  for (const int r : options_.only) {
    const bool begins = ranks_.empty() && !options_.joins;
    start_rank(r, begins ? Entry::begins : Entry::joins);
  }
}

void Job::start_rank(int r, Entry entry) {
  const int number = environment_.host * options_.ranks + r;
  ProcessSpec spec;
  spec.command = options_.command;
  spec.environment = environment_of_rank(environment_, secret_, r, entry);
  spec.inherit_stdin = r == 0 && entry != Entry::joins && stdin_can_be_passed_on();
  spec.output = r == options_.tty_rank ? Output::inherited : Output::piped;
  Process process;
  int refused = 0;
  try {
    process = start_process(spec, refused);
  } catch (const std::system_error& error) {
    throw std::runtime_error(fmt::format("rank {} of {}: {}{}", number, all_ranks(options_),
                                         error.what(),
                                         remedy(error.code().value(), options_.ranks)));
  }
  if (refused != 0) throw CannotStart(reason_not_started(spec.command.front(), refused));
  keeper_->watch(process.pid);
  Rank& rank = ranks_.emplace_back();
  rank.rank = number;
  rank.pid = process.pid;
  rank.out = {std::move(process.out), &out_, {}, {rank.rank, {}}};
  rank.err = {std::move(process.err), &err_, {}, {rank.rank, {}}};
}

void Job::wait_a_while(milliseconds longest) {
  const Clock::time_point now = Clock::now();
  auto until = now + longest;
  if (ends_group_) {
    if (ending_ == Ending::not_yet) until = std::min(until, failed_at_ + options_.grace);
    if (ending_ == Ending::asked) until = std::min(until, asked_at_ + kKillAfter);
  }
  std::vector<Polled> polled = {{.socket = signals_->descriptor(), .read = true}};
  std::vector<Stream*> streams;
  for (Rank& rank : ranks_) {
    for (Stream* stream : {&rank.out, &rank.err}) {
      if (!stream->fd) continue;
      polled.push_back({.socket = stream->fd.get(), .read = true});
      streams.push_back(stream);
    }
  }
  const auto left = std::chrono::ceil<milliseconds>(until - now);
  if (!wait_for(polled, std::max(left, milliseconds(0)))) return;
  for (std::size_t i = 0; i < streams.size(); ++i) {
    if (polled[i + 1].readable) read_stream(*streams[i]);
  }
  if (polled[0].readable) read_signals();
}

void Job::read_stream(Stream& stream) {
  const auto sink = [&stream](std::string_view line, LineEnd end) {
    stream.to->add(stream.source, line, end);
  };
  std::array<char, std::size_t{1} << 16> bytes;
  const Transfer got = read_from(stream.fd, std::as_writable_bytes(std::span(bytes)));
  if (got.bytes > 0) stream.lines.feed({bytes.data(), got.bytes}, sink);
  if (got.ended) {
    stream.lines.finish(sink);
    stream.fd.reset();
  }
  if (!stream.to->flush() && !nobody_reads_) {  // as `head` does to what it has read enough of
    nobody_reads_ = true;
    on_stop_signal(SIGTERM);
  }
}

void Job::read_signals() {
  while (const int signal = signals_->next()) {
    if (signal == SIGTSTP) {
      on_suspend();
    } else if (signal != SIGCHLD) {
      on_stop_signal(signal);
    }
  }
}

// The first is for the ranks to end in their own way; whoever asks twice means it.
void Job::on_stop_signal(int signal) {
  signal_all(stop_requested_ ? SIGKILL : signal);
  signal_all(SIGCONT);  // a stopped rank would not hear of it
  stop_requested_ = true;
}

void Job::on_suspend() {
  signal_all(SIGSTOP);
  std::raise(SIGSTOP);
  signal_all(SIGCONT);
}

void Job::see_who_ended() {
  std::vector<Rank*> failures;
  for (Rank& rank : ranks_) {
    if (rank.end) continue;
    rank.end = end_of(rank.pid);
    if (rank.end && rank.end->failed()) failures.push_back(&rank);
  }
  // Of those seen at the same time, one that was killed is rather the cause than the consequence.
  std::stable_partition(failures.begin(), failures.end(),
                        [](const Rank* rank) { return rank->end->signal != 0; });
  for (const Rank* rank : failures) on_failure(*rank);
}

// All ranks have ended. What they left behind gets a moment, then SIGTERM, then SIGKILL.
void Job::finish() {
  std::vector<std::int64_t> groups;
  for (const Rank& rank : ranks_) groups.push_back(rank.pid);
  reap_all();
  const auto forget_gone = [&groups] {
    groups.erase(std::remove_if(groups.begin(), groups.end(),
                                [](std::int64_t group) { return !group_remains(group); }),
                 groups.end());
  };
  const auto signal_left = [&groups](int signal) {
    for (const std::int64_t group : groups) signal_group(group, signal);
  };
  Clock::time_point until = Clock::now() + kLeftoverTime;
  Ending ending = nobody_reads_ ? Ending::forced : Ending::not_yet;
  if (ending == Ending::forced) signal_left(SIGKILL);
  for (;;) {
    forget_gone();
    if (groups.empty()) break;
    if (Clock::now() >= until || stop_requested_) {
      if (ending == Ending::forced) break;  // not ours to wait for: stuck in the kernel
      signal_left(ending == Ending::not_yet ? SIGTERM : SIGKILL);
      until = Clock::now() + (ending == Ending::not_yet ? kKillAfter : kLeftoverTime);
      ending = ending == Ending::not_yet ? Ending::asked : Ending::forced;
      stop_requested_ = false;
    }
    wait_a_while(kLeftoverPollPeriod);
  }
  // The pipes now end, unless a process that made itself independent holds one.
  until = Clock::now() + kLeftoverTime;
  while (any_stream_open() && Clock::now() < until) wait_a_while(kLeftoverPollPeriod);
  for (Rank& rank : ranks_) {
    for (Stream* stream : {&rank.out, &rank.err}) {
      stream->lines.finish([stream](std::string_view line, LineEnd end) {
        stream->to->add(stream->source, line, end);
      });
    }
  }
  for (PrefixedOutput* output : {&out_, &err_}) {
    output->end_bar();
    output->flush();
  }
}

void Job::reap_all() {
  for (const Rank& rank : ranks_) reap(rank.pid);
}

bool Job::all_ended() const {
  return std::all_of(ranks_.begin(), ranks_.end(), [](const Rank& rank) { return rank.end; });
}

bool Job::any_stream_open() const {
  return std::any_of(ranks_.begin(), ranks_.end(),
                     [](const Rank& rank) { return rank.out.fd || rank.err.fd; });
}

void Job::say(const std::string& text) {
  err_.add_message("ferry run: " + text);
  err_.flush();
}

// Every rank keeps its number until finish(), so its group cannot be a stranger's.
void Job::signal_all(int signal) {
  for (const Rank& rank : ranks_) signal_group(rank.pid, signal);
}

}  // namespace ferry::cli
