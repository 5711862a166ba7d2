// Ranks as forked processes.
#include <algorithm>
#include <csignal>
#include <cstring>
#include <optional>
#include <system_error>
#include <thread>

#include "platform/posix/process_group.hpp"
#include "posix/process_end.hpp"
#include "run/ports.hpp"
#include "run/ranks.hpp"
#include "run/shared_array.hpp"

namespace ferry::cli {
namespace {

using Clock = std::chrono::steady_clock;
constexpr auto kRankPollPeriod = std::chrono::milliseconds(50);
constexpr auto kGrace = std::chrono::seconds(5);

struct Message {
  char text[1024];
};

struct Child {
  std::int64_t pid = -1;
  std::optional<ProcessEnd> end{};
};

int run_child(const RankBody& body, const TcpOptions& options, Message& message) {
  const auto failure = failure_of([&] { body(options.rank, tcp_bootstrap(options)); });
  if (failure) std::strncpy(message.text, failure->c_str(), sizeof message.text - 1);
  return failure ? 1 : 0;
}

// True when all have ended; sets `failed` when one did badly.
bool look_at(std::vector<Child>& children, bool& failed) {
  bool all = true;
  for (Child& child : children) {
    if (!child.end && (child.end = end_of(child.pid))) {
      reap(child.pid);
      failed = failed || child.end->failed();
    }
    all = all && child.end;
  }
  return all;
}

std::vector<RankFailure> failures_of(const std::vector<Child>& children,
                                     const SharedArray<Message>& messages, bool ended_by_us) {
  std::vector<RankFailure> killed;
  std::vector<RankFailure> others;
  for (std::size_t r = 0; r < children.size(); ++r) {
    const ProcessEnd& end = *children[r].end;
    if (!end.failed()) continue;
    const int rank = static_cast<int>(r);
    const std::string said = messages[r].text;
    if (end.signal == 0) {
      others.push_back({rank, said.empty() ? "its process " + describe(end) : said});
    } else if (end.signal == SIGKILL && ended_by_us) {
      others.push_back({rank, "did not end in time and was killed"});
    } else {
      killed.push_back({rank, "its process " + describe(end)});
    }
  }
  killed.insert(killed.end(), others.begin(), others.end());
  return killed;
}

}  // namespace

std::shared_ptr<void> shared_with_ranks(std::size_t bytes) {
  return forked_block(bytes);
}

std::vector<RankFailure> run_processes(const RankRun& run, const RankBody& body) {
  const ReservedPort port;
  const std::string secret = random_secret();
  const SharedArray<Message> messages(static_cast<std::size_t>(run.ranks));
  std::vector<Child> children;
  for (int r = 0; r < run.ranks; ++r) {
    TcpOptions options;
    options.rank = r;
    options.size = run.ranks;
    options.port = port.number();
    options.secret = secret;
    try {
      children.push_back({fork_process(
          [&] { return run_child(body, options, messages[static_cast<std::size_t>(r)]); })});
    } catch (const std::system_error&) {
      for (const Child& child : children) kill_process(child.pid);
      for (const Child& child : children) reap(child.pid);
      throw;
    }
  }

  bool failed = false;
  bool ended_by_us = false;
  Clock::time_point until = Clock::now() + std::chrono::duration_cast<Clock::duration>(run.limit);
  Clock::time_point last_poll = Clock::now();
  std::optional<Clock::time_point> failed_at;
  while (!look_at(children, failed)) {
    const Clock::time_point now = Clock::now();
    if (failed && !failed_at) {
      failed_at = now;
      until = std::min(until, now + kGrace);
    }
    if (now >= until) {
      ended_by_us = true;
      for (const Child& child : children) {
        if (!child.end) kill_process(child.pid);
      }
    }
    std::this_thread::sleep_for(kRankPollPeriod / 10);
    if (run.tick && now - last_poll >= kRankPollPeriod) {
      last_poll = now;
      run.tick();
    }
  }
  return failures_of(children, messages, ended_by_us);
}

}  // namespace ferry::cli
