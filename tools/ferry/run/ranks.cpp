#include "run/ranks.hpp"

#include <fmt/format.h>

#include <atomic>
#include <exception>
#include <thread>

namespace ferry::cli {
namespace {

constexpr auto kThreadPollPeriod = std::chrono::milliseconds(5);

std::vector<RankFailure> run_threads(const RankRun& run, const RankBody& body) {
  const auto bootstraps = thread_bootstrap(run.ranks);
  std::vector<std::optional<std::string>> messages(static_cast<std::size_t>(run.ranks));
  std::atomic<int> ended{0};
  std::vector<std::thread> threads;
  for (int r = 0; r < run.ranks; ++r) {
    threads.emplace_back([&, r] {
      const auto i = static_cast<std::size_t>(r);
      messages[i] = failure_of([&] { body(r, bootstraps[i]); });
      ended.fetch_add(1);
    });
  }
  while (ended.load() < run.ranks) {
    std::this_thread::sleep_for(kThreadPollPeriod);
    if (run.tick) run.tick();
  }
  for (std::thread& thread : threads) thread.join();
  std::vector<RankFailure> failures;
  for (int r = 0; r < run.ranks; ++r) {
    const auto& message = messages[static_cast<std::size_t>(r)];
    if (message) failures.push_back({r, *message});
  }
  return failures;
}

}  // namespace

std::optional<std::string> failure_of(const std::function<void()>& work) {
  try {
    work();
    return std::nullopt;
  } catch (const std::exception& error) {
    return error.what();
  } catch (...) {
    return "threw something that is no std::exception";
  }
}

std::string summary(const std::vector<RankFailure>& failures) {
  if (failures.empty()) return {};
  const std::size_t more = failures.size() - 1;
  const std::string others =
      more == 0 ? "" : fmt::format(" ({} more rank{} failed)", more, more == 1 ? "" : "s");
  return fmt::format("rank {}: {}{}", failures.front().rank, failures.front().message, others);
}

std::vector<RankFailure> run_ranks(const RankRun& run, const RankBody& body) {
  return run.processes ? run_processes(run, body) : run_threads(run, body);
}

}  // namespace ferry::cli
