// Ranks that live inside this command: as threads, or as processes.
#pragma once
#include <chrono>
#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "ferry/bootstrap.hpp"

namespace ferry::cli {

/// What one rank does. It makes its own group from the bootstrap; an exception is its failure.
using RankBody = std::function<void(int rank, std::shared_ptr<Bootstrap> bootstrap)>;

struct RankFailure {
  int rank = 0;
  std::string message{};
};
/// One line for all of them: "rank 2: ... (2 more ranks failed)".
std::string summary(const std::vector<RankFailure>& failures);

struct RankRun {
  int ranks = 1;
  bool processes = false;  ///< to be called before any thread exists
  std::chrono::nanoseconds limit = std::chrono::hours(24);  ///< then processes are killed
  std::function<void()> tick{};  ///< called every 50 ms while ranks run, from the calling thread
};

/// Runs `body` as every rank and returns when all have ended: the failures, those that say nothing
/// because they were killed first, else in rank order. When a process fails, the others get 5 s and
/// are then killed. Throws when ranks cannot be started.
std::vector<RankFailure> run_ranks(const RankRun& run, const RankBody& body);

/// Of `run_ranks`: with processes. Linux: forked. Windows: this command anew, with the same
/// arguments, which comes to the same call and is a rank there.
std::vector<RankFailure> run_processes(const RankRun& run, const RankBody& body);
/// The message of the exception that `work` throws; nothing when it does not.
std::optional<std::string> failure_of(const std::function<void()>& work);

}  // namespace ferry::cli
