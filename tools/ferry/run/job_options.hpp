// What `ferry run` is asked for.
#pragma once
#include <chrono>
#include <cstdint>
#include <stdexcept>
#include <string>
#include <vector>

namespace ferry::cli {

/// The program could not be started.
class CannotStart : public std::runtime_error {
 public:
  using std::runtime_error::runtime_error;
};

struct JobOptions {
  int ranks = 0;  ///< of this host
  /// All hosts, by their addresses, each of which runs the same command; empty: this one alone.
  std::vector<std::string> hosts{};
  bool keep_going = false;
  // Of an elastic job; both count the ranks that this command starts.
  int least = 0;            ///< > 0: elastic; the job ends when fewer ranks than this are left
  int restarts = 0;         ///< how many processes may be started for ranks that failed, in all
  std::vector<int> only{};  ///< of this host, which are started; empty: all
  bool joins = false;       ///< all of them join a group that runs
  std::chrono::milliseconds grace{5000};  ///< between the first failure and SIGTERM for the others
  bool prefix = true;
  int tty_rank = -1;  ///< this rank's output is the launcher's own, unprefixed
  std::uint16_t port =
      0;  ///< MASTER_PORT; 0: any free one. Of several hosts, or elastic, FERRY_PORT is the next
  std::vector<std::string> command{};
};

/// Runs the job to its end; returns the exit code of `ferry run`. Throws CannotStart. Once in a
/// process, before any thread.
int run_job(const JobOptions& options);

}  // namespace ferry::cli
